"""Asks the server of this container for its health; a container whose first process is no server is always well."""

import sys
from pathlib import Path

ADDRESS = "127.0.0.1:50052"  # where manifests and examples let --health-listen listen


def main() -> int:
    """0 when it serves, 1 otherwise."""
    if b"fedrpc-server" not in Path("/proc/1/cmdline").read_bytes():
        return 0
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(ADDRESS) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.RpcError as error:
            print(f"no answer from {ADDRESS}: {error.code().name}")
            return 1
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main())
