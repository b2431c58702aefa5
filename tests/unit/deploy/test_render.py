from __future__ import annotations

import hashlib
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedrpc.cli.deploy import render as command
from fedrpc.config import build, parse_set
from fedrpc.deploy import shape
from fedrpc.deploy.render import configuration, manifests, render, render_run
from fedrpc.deploy.shape import Deployment
from fedrpc.errors import ConfigError
from fedrpc.owncode import forget_all


def deployment(values: dict[str, Any] | None = None, **options: Any) -> Deployment:
    return Deployment(config=configuration(values or {}), image=options.pop("image", "registry/fedrpc:1"), **options)


def found(deployed: Deployment, kind: str) -> dict[str, Any]:
    """The object of a kind; of the server when there are two."""
    return next(each for each in manifests(deployed) if each["kind"] == kind)


def container(manifest: dict[str, Any]) -> dict[str, Any]:
    [only] = manifest["spec"]["template"]["spec"]["containers"]
    return only


def test_the_text_is_the_objects_in_yaml_without_anchors() -> None:
    deployed = deployment()
    text = render(deployed)
    assert list(yaml.safe_load_all(text)) == manifests(deployed)
    assert not re.search(r"(: |- )[&*]id", text)


def test_the_configuration_is_complete_and_gives_the_same_run() -> None:
    values = {"method": "fedprox", "clients": 40, "params": {"mu": 0.5}, "train": {"lr": 0.3}}
    deployed = deployment(values)
    carried = build(tomllib.loads(found(deployed, "ConfigMap")["data"]["run.toml"]))
    assert carried == deployed.config
    assert carried.hash == build(values).hash, "a cluster's patience is no other run"


def test_a_cluster_is_given_more_time_unless_the_user_says_otherwise() -> None:
    limits = configuration({"limits": {"absent_s": 7.0}}).limits
    assert (limits.absent_s, limits.join_s) == (7.0, shape.PATIENT["limits"]["join_s"])
    assert limits.join_s > build({}).limits.join_s


@pytest.mark.parametrize(
    ("clients", "clients_per_pod", "quorum", "pods", "needed"),
    [
        (10, 1, 0.5, 10, 5),
        (500, 20, 0.5, 25, 13),
        (50, 20, 1.0, 3, 3),
        (1, 20, 0.0, 1, 1),
        (100_000, 50, 0.5, 2000, 1000),
    ],
)
def test_the_number_of_pods_and_of_those_a_quorum_needs(
    clients: int, clients_per_pod: int, quorum: float, pods: int, needed: int
) -> None:
    deployed = deployment({"clients": clients, "limits": {"quorum": quorum}}, clients_per_pod=clients_per_pod)
    job = found(deployed, "Job")["spec"]
    assert (job["completions"], job["parallelism"]) == (pods, pods)
    assert job["maxFailedIndexes"] == pods - needed
    budget = manifests(deployed)[-2]
    assert (budget["metadata"]["name"], budget["spec"]["minAvailable"]) == ("fedrpc-client", needed)


def test_several_clients_in_a_pod_get_the_number_of_all_clients() -> None:
    alone = container(found(deployment({"clients": 50}), "Job"))
    assert not [word for word in alone["args"] if word.startswith("--clients")]
    shared = container(found(deployment({"clients": 50}, clients_per_pod=20), "Job"))
    assert {"--clients-per-pod=20", "--clients=50"} <= set(shared["args"])


@pytest.mark.parametrize(
    ("values", "clients_per_pod", "cpu", "memory"),
    [
        ({}, 1, "1000m", shape.POD_MIB),
        ({"fraction": 0.1}, 1, "100m", shape.POD_MIB),
        ({"fraction": 0.01}, 1, "20m", shape.POD_MIB),
        ({"fraction": 0.1, "clients": 500}, 5, "500m", shape.POD_MIB + 1),
        ({"fraction": 0.1, "clients": 500}, 20, "1000m", shape.POD_MIB + 2),  # they train one after another
        ({"fraction": 0.1, "clients": 500, "train": {"threads": 4}}, 500, "4000m", shape.POD_MIB + 50),
    ],
)
def test_requests_follow_from_the_clients_of_a_pod(
    values: dict[str, Any], clients_per_pod: int, cpu: str, memory: int
) -> None:
    resources = container(found(deployment(values, clients_per_pod=clients_per_pod), "Job"))["resources"]
    assert resources["requests"] == {"cpu": cpu, "memory": f"{memory}Mi"}
    assert resources["limits"] == {"memory": f"{memory}Mi"}


def test_a_queue_admits_the_clients_and_the_server_waits_for_them() -> None:
    def labels(manifest: dict[str, Any]) -> dict[str, str]:
        return manifest["metadata"]["labels"] | manifest["spec"]["template"]["metadata"]["labels"]

    limits = configuration({}, queued=True).limits
    deployed = deployment(queue="team-a.gpu")
    assert labels(found(deployed, "Job"))[shape.QUEUE_LABEL] == "team-a.gpu"
    assert "suspend" not in found(deployed, "Job")["spec"], "it is Kueue's own once the Job exists"
    assert shape.QUEUE_LABEL not in labels(found(deployed, "StatefulSet")), "two workloads are not admitted together"
    assert shape.QUEUE_LABEL not in labels(found(deployment(), "Job"))
    assert (limits.queue_s, limits.join_s) == (math.inf, configuration({}).limits.join_s)
    assert configuration({}).limits.queue_s == 0.0


def test_a_queues_patience_arrives_and_can_be_limited() -> None:
    def carried(*values: str) -> float:
        text = render_run(parse_set(values), {"image": "fedrpc:1", "queue": "user-queue"})
        config_map = next(each for each in yaml.safe_load_all(text) if each["kind"] == "ConfigMap")
        return build(tomllib.loads(config_map["data"]["run.toml"])).limits.queue_s

    assert carried() == math.inf
    assert carried("limits.queue_s=3600") == 3600.0


def test_sizes_can_be_set() -> None:
    deployed = deployment(server_memory="8Gi", server_cpu="4", client_memory="1Gi", client_cpu="500m", storage="1Ti")
    assert container(found(deployed, "StatefulSet"))["resources"]["requests"] == {"cpu": "4", "memory": "8Gi"}
    assert container(found(deployed, "Job"))["resources"]["requests"] == {"cpu": "500m", "memory": "1Gi"}
    [claim] = found(deployed, "StatefulSet")["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "1Ti"


def test_a_claim_with_data_is_mounted_read_only_by_every_pod() -> None:
    deployed = deployment({"dataset": "cifar10"}, data_pvc="datasets")
    for kind in ("StatefulSet", "Job"):
        spec = found(deployed, kind)["spec"]["template"]["spec"]
        assert {"name": "data", "persistentVolumeClaim": {"claimName": "datasets", "readOnly": True}} in spec["volumes"]
        main = container(found(deployed, kind))
        assert {"name": "data", "mountPath": "/data", "readOnly": True} in main["volumeMounts"]
        assert "--data-dir=/data" in main["args"]


def test_stores_can_outlive_their_pods() -> None:
    def state(deployed: Deployment) -> dict[str, Any]:
        volumes = found(deployed, "Job")["spec"]["template"]["spec"]["volumes"]
        return next(volume for volume in volumes if volume["name"] == "state")

    assert state(deployment())["emptyDir"] == {"sizeLimit": "1Gi"}
    assert state(deployment(clients_per_pod=500))["emptyDir"] == {"sizeLimit": "51Gi"}
    assert state(deployment(state_pvc="stores"))["persistentVolumeClaim"] == {"claimName": "stores", "readOnly": False}


def test_names_and_namespace() -> None:
    for each in manifests(deployment(name="mine", namespace="lab")):
        assert each["metadata"]["name"].startswith("mine")
        assert each["metadata"]["namespace"] == "lab"
    assert not [each for each in manifests(deployment()) if "namespace" in each["metadata"]]
    assert "--server=mine-server:50051" in container(found(deployment(name="mine"), "Job"))["args"]
    assert "kubectl -n lab wait" in render(deployment(namespace="lab"))


def test_another_configuration_has_another_run_directory_and_pod() -> None:
    one, two = (found(deployment({"seed": seed}), "StatefulSet")["spec"]["template"] for seed in (1, 2))
    assert one["metadata"]["annotations"] != two["metadata"]["annotations"]
    assert one["spec"]["containers"][0]["args"] != two["spec"]["containers"][0]["args"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "Fedrpc"}, "--name takes .* got 'Fedrpc'"),
        ({"name": "x" * 41}, "--name takes at most 40"),
        ({"queue": "user_queue"}, "--queue takes the name of a LocalQueue.* got 'user_queue'"),
        ({"queue": "q" * 64}, "--queue takes the name of a LocalQueue"),
        ({"storage": "ten"}, "--storage takes a size such as .* got 'ten'"),
        ({"client_memory": "-1Gi"}, "--client-memory takes a size .* got '-1Gi'"),
        ({"config": configuration({"dataset": "cifar10"})}, "the image has no 'cifar10'.*--data-pvc"),
    ],
)
def test_mistakes_are_reported(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Deployment(**({"config": configuration({}), "image": "fedrpc:1"} | options))


def test_the_help_has_the_default_sizes() -> None:
    options_help = {name: str(kind) for name, kind in command.__annotations__.items()}
    assert f"{shape.SERVER_MEMORY} when not given" in options_help["server_memory"]
    assert f"{shape.SERVER_CPU} when not given" in options_help["server_cpu"]


def test_own_code_is_in_the_config_map_and_every_pod_imports_it(tmp_path: Path) -> None:
    sources = {
        "mine.py": b"from fedrpc.methods.fedavg import FedAvg\nfrom parts.names import N\nclass M(FedAvg):\n  name = N",
        "parts/names.py": "N = 'mine'  # \u00e9, \ttabs, \r\n# and blanks:  \n\n".encode(),
    }
    (tmp_path / "parts").mkdir()
    for name, content in sources.items():
        (tmp_path / name).write_bytes(content)
    try:
        deployed = deployment({"method": str(tmp_path / "mine.py")})
        job = found(deployed, "Job")
        server, client = container(found(deployed, "StatefulSet")), container(job)
        text = render(deployed)
    finally:
        forget_all()
    [data] = [each["data"] for each in yaml.safe_load_all(text) if each["kind"] == "ConfigMap"]
    code = tomllib.loads(data["run.toml"])["code"]
    volume = {"name": "config", "configMap": {"name": "fedrpc-config"}}
    items = [{"key": name.replace("/", ".."), "path": f"code/{name}"} for name in code]
    volume["configMap"]["items"] = items
    assert volume in job["spec"]["template"]["spec"]["volumes"]
    for item, (name, digest) in zip(items, code.items(), strict=True):
        content = data[item["key"]].encode()
        assert (content, hashlib.sha256(content).hexdigest()) == (sources[name], digest)
    assert "--import=/config/code/mine.py" in client["args"]
    assert not any("names.py" in word for word in client["args"]), "mine.py imports it"
    assert "--config=/config/run.toml" in server["args"], "which finds code/ beside it"
