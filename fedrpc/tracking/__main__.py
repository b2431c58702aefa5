"""The process of one tracker: `python -m fedrpc.tracking SPEC RUN_DIR`; it ends when its standard input does."""

from __future__ import annotations

import select
import signal
import sys
from pathlib import Path

from fedrpc import log
from fedrpc.tracking.follow import Follower, describe_failure
from fedrpc.tracking.tracker import make_tracker

_LOOK_S = 0.5  # how often it looks for a round


def main() -> int:
    """Follows the run until the launcher says that it is over, or is gone."""
    spec, folder = sys.argv[1], Path(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher, which then ends our input
    name = spec.partition(":")[0]
    log.set_up("warning", stream=sys.stderr, role="tracker")
    try:
        follower = Follower(folder, name, make_tracker(spec))
        while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
            follower.follow()
        follower.end()
    except Exception as error:  # whatever a tool raises: the run goes on
        log.get("tracker").warning(
            f"{name} failed ({describe_failure(error)}); the run is not affected, and "
            f"`fedrpc track {folder} --tracker {spec}` adds what is missing"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
