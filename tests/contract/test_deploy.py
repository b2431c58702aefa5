"""Manifests, image and overlays of deploy/ hold against each other and against what the programs serve."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main
import yaml
from cryptography import x509

from fedrpc import cli, errors
from fedrpc.config import LimitsConfig, build
from fedrpc.deploy import shape
from fedrpc.deploy.render import configuration, render, render_run
from fedrpc.deploy.shape import Deployment
from fedrpc.server.app import SERVICE
from fedrpc.server.mailbox import Mailbox
from fedrpc.server.roster import Roster
from fedrpc.tls.certs import make_certificates
from fedrpc.tls.endpoint import check_pem
from tests.contract.kustomize import DEPLOY, KEPT, OVERLAYS, RENDERED, ROOT, Manifest, built, kept, program

ANEW = "build them anew: python -m tests.contract.kustomize"
VERSIONS = ("1.29", "1.33", "latest")  # 1.29 is the first whose Job has all that ours uses
FOREIGN = {("monitoring.coreos.com/v1", "ServiceMonitor")}
needs_kustomize = pytest.mark.skipif(program() is None, reason="neither kubectl nor kustomize is here")


# What is kept is what is built


def test_the_base_is_what_render_prints(capsys: pytest.CaptureFixture[str]) -> None:
    typer.main.get_command(cli.app).main(["deploy", "render", *RENDERED], standalone_mode=False)
    assert capsys.readouterr().out == (DEPLOY / "base" / "run.yaml").read_text(), ANEW


@needs_kustomize
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_builds_to_what_is_kept(overlay: str) -> None:
    assert [each for each in yaml.safe_load_all(built(DEPLOY / "overlays" / overlay)) if each] == kept(overlay), ANEW


@needs_kustomize
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_fits_a_run_of_somebody_elses(overlay: str, tmp_path: Path) -> None:
    """Other names, a data claim, several clients a pod: what is rendered over the base."""
    folder = shutil.copytree(DEPLOY, tmp_path / "deploy")
    values = {"clients": 500, "dataset": "cifar10"}
    run = Deployment(configuration(values), "registry.example.org/f:2", name="other", clients_per_pod=20, data_pvc="d")
    (folder / "base" / "run.yaml").write_text(render(run))
    documents = [each for each in yaml.safe_load_all(built(folder / "overlays" / overlay)) if each]
    check_consistent(documents)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_api_takes_every_object(overlay: str, version: str) -> None:
    check_api(kept(overlay), version)


def check_api(documents: list[Manifest], version: str) -> None:
    checker = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate, of the dev extras, is not here")
    wanted = checker.latest_version() if version == "latest" else version
    for document in documents:
        if (document["apiVersion"], document["kind"]) not in FOREIGN:
            checker.validate(document, wanted, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_api_takes_a_queued_run(version: str) -> None:
    """As the others, and what Kueue asks of a Job: its label on it, and requests in every container."""
    documents = list(yaml.safe_load_all(render_run({}, {"image": "fedrpc:1", "queue": "user-queue"})))
    check_api(documents, version)
    check_consistent(documents)
    job = the(documents, "Job", "client")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "user-queue"
    assert set(main(job["spec"]["template"])["resources"]["requests"]) == {"cpu", "memory"}
    config = build(tomllib.loads(the(documents, "ConfigMap", "run")["data"]["run.toml"]))
    assert math.isinf(config.limits.queue_s), "the server waits as long as the queue does"
    assert "activeDeadlineSeconds" not in job["spec"], "and so do the clients"


# Against the programs


def pods(documents: list[Manifest]) -> dict[str, Manifest]:
    """The pod templates by program."""
    found = {"StatefulSet": "server", "Job": "client"}
    return {found[d["kind"]]: d["spec"]["template"] for d in documents if d["kind"] in found and not is_check(d)}


def is_check(document: Manifest) -> bool:
    """Whether an object belongs to the Job that checks a GPU, and to no run."""
    return document["metadata"]["labels"].get("app.kubernetes.io/component") == "gpu-check"


def main(template: Manifest) -> Manifest:
    """A pod's only container."""
    [only] = template["spec"]["containers"]
    return only


def parsed(program: str, template: Manifest, **env: str) -> dict[str, Any]:
    """What a program makes of its arguments: an option that it does not have fails here."""
    container = main(template)
    assert container["command"] == [f"fedrpc-{program}"]
    command = typer.main.get_command({"server": cli.server_app, "client": cli.client_app}[program])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        context = command.make_context(f"fedrpc-{program}", list(container["args"]))
    return context.params


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def ports(container: Manifest) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container.get("ports", [])}


def the(documents: list[Manifest], kind: str, component: str) -> Manifest:
    [found] = [
        each
        for each in documents
        if each["kind"] == kind and each["metadata"]["labels"].get("app.kubernetes.io/component") == component
    ]
    return found


def check_consistent(documents: list[Manifest]) -> None:
    """Everything that two of the manifests, or a manifest and a program, must say alike."""
    check_server(documents)
    check_clients(documents)
    check_identities(documents)
    check_mounts(documents)


def check_server(documents: list[Manifest]) -> None:
    template = pods(documents)["server"]
    container, said = main(template), parsed("server", template)
    assert port_of(said["listen"]) == ports(container)["grpc"] == shape.PORT
    assert port_of(said["health_listen"]) == ports(container)["health"]
    assert said["linger"], "a late client, or one that missed the farewell, must find somebody to tell it"
    for name, service in (("startupProbe", None), ("livenessProbe", None), ("readinessProbe", SERVICE)):
        probe = container[name]["grpc"]
        assert (probe["port"], probe.get("service")) == (ports(container)["health"], service), name
    service = the(documents, "Service", "server")
    assert service["spec"]["clusterIP"] == "None"
    for port in service["spec"]["ports"]:
        assert ports(container)[port["targetPort"]] == port["port"]
    toml = the(documents, "ConfigMap", "run")["data"]["run.toml"]
    assert (said["config_file"].parent, said["config_file"].name) == (Path("/config"), "run.toml")
    assert said["out"].name.startswith(build(tomllib.loads(toml)).method)
    assert said["metrics_listen"] is None or port_of(said["metrics_listen"]) == ports(container)["metrics"]


def check_clients(documents: list[Manifest]) -> None:
    job, toml = the(documents, "Job", "client"), the(documents, "ConfigMap", "run")["data"]["run.toml"]
    config = build(tomllib.loads(toml))
    said = parsed("client", job["spec"]["template"], JOB_COMPLETION_INDEX="7")
    assert job["spec"]["completionMode"] == "Indexed"
    assert said["client_id"] == 7, "the index of the pod"
    host, port = said["server"].split(":")
    service = the(documents, "Service", "server")
    assert (host, int(port)) == (service["metadata"]["name"], service["spec"]["ports"][0]["port"])
    a_pod = said["clients_per_pod"] or 1
    assert said["clients"] in (None, config.clients)
    assert (job["spec"]["completions"] - 1) * a_pod < config.clients <= job["spec"]["completions"] * a_pod
    assert said["wait_s"] > main(pods(documents)["server"])["startupProbe"]["failureThreshold"] * 5
    assert (said["tls_ca"] is None) == said["insecure"]
    server = parsed("server", pods(documents)["server"])
    assert (server["tls_cert"] is None) == server["insecure"] == said["insecure"]


def check_identities(documents: list[Manifest]) -> None:
    """Selectors select exactly the pods that they are for."""
    labels = {name: template["metadata"]["labels"] for name, template in pods(documents).items()}

    def selected(selector: Manifest) -> set[str]:
        wanted = selector["matchLabels"].items()
        return {name for name, found in labels.items() if wanted <= found.items()}

    for component in ("server", "client"):
        policy = the(documents, "NetworkPolicy", component)["spec"]
        assert selected(policy["podSelector"]) == {component}
        assert selected(the(documents, "PodDisruptionBudget", component)["spec"]["selector"]) == {component}
        account = next(d for d in documents if d["kind"] == "ServiceAccount")
        assert pods(documents)[component]["spec"]["serviceAccountName"] == account["metadata"]["name"]
    assert selected(the(documents, "StatefulSet", "server")["spec"]["selector"]) == {"server"}
    assert selected({"matchLabels": the(documents, "Service", "server")["spec"]["selector"]}) == {"server"}
    stateful = the(documents, "StatefulSet", "server")["spec"]
    assert stateful["serviceName"] == the(documents, "Service", "server")["metadata"]["name"]
    incoming = the(documents, "NetworkPolicy", "server")["spec"]["ingress"][0]
    outgoing = the(documents, "NetworkPolicy", "client")["spec"]["egress"][0]
    assert selected(incoming["from"][0]["podSelector"]) == {"client"}
    assert selected(outgoing["to"][0]["podSelector"]) == {"server"}
    assert incoming["ports"] == outgoing["ports"] == [{"protocol": "TCP", "port": shape.PORT}]


def check_mounts(documents: list[Manifest]) -> None:
    """The root is read-only, every path that a program is given is mounted, and only what it writes is writable."""
    writable = {"server": {"/runs", "/tmp"}, "client": {"/state", "/tmp"}}
    stateful = the(documents, "StatefulSet", "server")["spec"]
    claimed = {claim["metadata"]["name"] for claim in stateful["volumeClaimTemplates"]}
    for name, template in pods(documents).items():
        container = main(template)
        volumes = {volume["name"] for volume in template["spec"]["volumes"]} | (claimed if name == "server" else set())
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert {mount["name"] for mount in mounts.values()} == volumes
        assert {path for path, mount in mounts.items() if not mount.get("readOnly")} == writable[name]
        for word in container["args"]:
            option, _, value = word.partition("=")
            if value.startswith("/"):
                assert any(Path(value).is_relative_to(path) for path in mounts), f"{option} is not on a volume"
        security = container["securityContext"] | template["spec"]["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["runAsNonRoot"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_manifests_and_programs_agree(overlay: str) -> None:
    check_consistent(kept(overlay))


def test_what_a_pods_exit_code_leads_to() -> None:
    """78 and 2, which no retry helps, end an index; 75 and the others are tried again; a signal is nobody's fault."""
    rules = the(kept("cpu"), "Job", "client")["spec"]["podFailurePolicy"]["rules"]
    codes = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])}
    assert codes == {errors.ConfigError.exit_code: "FailIndex", 2: "FailIndex", 143: "Ignore"}
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, errors.FedrpcError):
            assert (error.exit_code in codes) == issubclass(error, errors.ConfigError), error
    assert errors.Unavailable.exit_code == errors.Taken.exit_code == 75
    disrupted = [rule for rule in rules if "onPodConditions" in rule]
    assert [rule["action"] for rule in disrupted] == ["Ignore"]


def test_a_signal_leaves_enough_time() -> None:
    from fedrpc.launch import pod

    for name, template in pods(kept("cpu")).items():
        grace_s = template["spec"]["terminationGracePeriodSeconds"]
        assert grace_s >= {"server": 60, "client": pod.GRACE_S + 5}[name]


def test_gpu_clients_take_a_gpu_and_nothing_else_in_its_place() -> None:
    template = pods(kept("gpu"))["client"]
    assert main(template)["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert parsed("client", template, JOB_COMPLETION_INDEX="0")["device"] == "cuda"
    assert main(template)["image"].endswith("-cuda")
    assert parsed("client", pods(kept("cpu"))["client"], JOB_COMPLETION_INDEX="0")["device"] == "cpu"


def test_a_gpu_is_checked_by_a_job_that_reaches_nobody() -> None:
    documents = kept("gpu")
    job, policy = the(documents, "Job", "gpu-check"), the(documents, "NetworkPolicy", "gpu-check")["spec"]
    template = job["spec"]["template"]
    container = main(template)
    assert container["command"] == ["fedrpc"]
    context = typer.main.get_command(cli.app).make_context("fedrpc", list(container["args"]))
    command = typer.main.get_command(cli.app).get_command(context, container["args"][0])
    said = command.make_context("gpu-check", list(container["args"][1:])).params
    assert said["device"] == "cuda", "not auto: a pod without a GPU has nothing to check"
    mounts = [Path(mount["mountPath"]) for mount in container["volumeMounts"]]
    assert any(said["out"].is_relative_to(path) for path in mounts)
    assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in template["spec"]["volumes"]}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container["image"] == main(pods(documents)["client"])["image"]
    assert policy["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert (policy["ingress"], policy["egress"]) == ([], [])
    run = [the(documents, kind, "client")["spec"] for kind in ("PodDisruptionBudget",)]
    assert not any(each["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items() for each in run)


def find_files(template: Manifest, folder: Path, **env: str) -> dict[str, Path]:
    """What a pod sees of a secret with the files of `folder`, by the path in its container."""
    [volume] = [volume for volume in template["spec"]["volumes"] if volume["name"] == "tls"]
    assert volume["secret"]["defaultMode"] == 0o440, "for the pod's group, which is its user's alone"
    found = {}
    for mount in main(template)["volumeMounts"]:
        if mount["name"] == "tls":
            inner = mount.get("subPathExpr", mount.get("subPath", ""))
            for name, value in env.items():
                inner = inner.replace(f"$({name})", value)
            whole = [(mount["mountPath"], folder / inner)]
            whole = whole if inner else [(f"{mount['mountPath']}/{path.name}", path) for path in folder.iterdir()]
            found |= dict(whole)
    return found


def test_with_mutual_tls_each_pod_has_its_own_certificate_and_sees_no_other(tmp_path: Path) -> None:
    """The files that `fedrpc certs` makes, in the secrets that deploy/README.md makes of them."""
    templates = pods(kept("mtls"))
    client = parsed("client", templates["client"], JOB_COMPLETION_INDEX="0")
    host = client["server"].partition(":")[0]
    make_certificates(tmp_path, [host], clients=10, clients_per_pod=1)
    secrets = {"server": tmp_path / "server-secret", "client": tmp_path / "client-secret"}
    copied = {"server": ["ca.pem", "server.pem", "server.key"], "client": ["ca.pem", "pods"]}
    for name, folder in secrets.items():
        folder.mkdir()
        for path in (tmp_path / item for item in copied[name]):
            for file in path.iterdir() if path.is_dir() else [path]:
                shutil.copy(file, folder)
    server = parsed("server", templates["server"])
    seen = find_files(templates["server"], secrets["server"])
    credentials = [seen[str(server[name])] for name in ("tls_client_ca", "tls_cert", "tls_key")]
    check_pem(*credentials)
    assert server["tls_client_name"] == "client-{client}"
    assert not server["allow_new_keys"], "keys outlive pods"
    for pod in range(10):
        seen = find_files(templates["client"], secrets["client"], JOB_COMPLETION_INDEX=str(pod))
        check_pem(*(seen[str(client[name])] for name in ("tls_ca", "tls_cert", "tls_key")))
        assert {path.name for path in seen.values()} == {"ca.pem", f"{pod}.pem", f"{pod}.key"}
        certificate = x509.load_pem_x509_certificate(seen[str(client["tls_cert"])].read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == [f"pod-{pod}", f"client-{pod}"]


def test_without_certificates_a_pod_that_takes_anothers_index_may_have_a_new_key() -> None:
    assert parsed("server", pods(kept("cpu"))["server"])["allow_new_keys"]


def test_everything_is_on_one_node_in_development() -> None:
    spec = pods(kept("dev"))["client"]["spec"]
    [term] = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"].items() <= pods(kept("dev"))["server"]["metadata"]["labels"].items()
    assert "topologySpreadConstraints" not in spec


# Monitoring


def shown_names(tmp_path: Path) -> Iterator[str]:
    """The names of all metrics that the server shows."""
    pytest.importorskip("prometheus_client", reason="prometheus-client, a dependency since lately, is not here")
    from prometheus_client import CollectorRegistry, ProcessCollector

    from fedrpc.server.monitoring import RunMetrics
    from fedrpc.wire.kinds import Kind
    from fedrpc.wire.ledger import Attempt, LedgerFile

    roster, coordinator = Roster(1, 5), SimpleNamespace(round=1)
    book = LedgerFile(tmp_path)
    attempt = Attempt(0, "fit", "up", 0)
    attempt.add(Kind.WEIGHTS, 9)
    book.book(attempt.close())
    shown: Any = RunMetrics(build({}), "run", coordinator, roster, Mailbox(roster, LimitsConfig(), 0), book)  # type: ignore[arg-type]
    shown.observe("round_finished", {"accuracy": 1.0, "loss": 1.0, "seconds": 1.0, "num_clients": 1})
    registry = CollectorRegistry()
    registry.register(shown)
    ProcessCollector(registry=registry)
    for family in registry.collect():
        yield from (sample.name for sample in family.samples)
    book.close()


def test_the_dashboard_asks_for_figures_that_there_are(tmp_path: Path) -> None:
    board = json.loads((DEPLOY / "components" / "monitoring" / "fedrpc.json").read_text())
    asked = " ".join(target["expr"] for panel in board["panels"] for target in panel["targets"])
    names = set(re.findall(r"\b(?:fedrpc|process)_\w+", asked))
    assert names <= set(shown_names(tmp_path))
    assert {"fedrpc_rounds_finished", "fedrpc_accuracy_percent", "fedrpc_message_bytes_total"} <= names
    assert {"fedrpc_clients_connected", "fedrpc_tasks"} <= names


def test_prometheus_finds_the_port_and_is_let_in() -> None:
    documents = kept("monitoring")
    [monitor] = [d for d in documents if d["kind"] == "ServiceMonitor"]
    service = the(documents, "Service", "server")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    [endpoint] = monitor["spec"]["endpoints"]
    [port] = [port["port"] for port in service["spec"]["ports"] if port["name"] == endpoint["port"]]
    assert port == port_of(parsed("server", pods(documents)["server"])["metrics_listen"])
    allowed = the(documents, "NetworkPolicy", "server")["spec"]["ingress"][1]
    assert allowed["ports"] == [{"protocol": "TCP", "port": port}]
    [dashboard] = [d for d in documents if d["metadata"]["name"] == "fedrpc-dashboard"]
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"


# The image

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def last_stage() -> str:
    return DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :]


def test_the_image_has_what_the_manifests_count_on() -> None:
    stage = last_stage()
    assert f"USER {shape.USER}:{shape.USER}" in stage
    assert f"EXPOSE {shape.PORT} {shape.HEALTH_PORT}" in stage
    assert f'"127.0.0.1:{shape.HEALTH_PORT}"' in (DEPLOY / "healthcheck.py").read_text()
    assert f"FEDRPC_DATA={shape.DATA_DIR} " in stage
    assert f"HOME={shape.TMP_DIR} " in stage
    assert "HEALTHCHECK" in stage
    assert "RUN" not in stage, "nothing is built or installed in what is shipped"
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.\d+\.\d+-slim-\w+$", DOCKERFILE, re.M), "the base is pinned"
    assert DOCKERFILE.count("-c constraints.txt") == DOCKERFILE.count("pip install "), "every package is pinned"


def test_the_context_has_what_is_copied() -> None:
    kept_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        source for words in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.M) for source in words.split()[:-1]
    }
    assert copied == kept_in
    assert all((ROOT / source).exists() for source in copied)


def tool(name: str, how: str) -> str:
    """A program beside this Python, in an environment of its own, or on the path."""
    places = [Path(sys.executable).parent / name, ROOT / f".venv-{name}" / "bin" / name]
    found = next((str(path) for path in places if path.exists()), None) or shutil.which(name)
    if not found:
        pytest.skip(f"{name} is not here; {how}")
    return found


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run(
        [tool("hadolint", "it is in the dev extras"), DEPLOY / "Dockerfile"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(180)
def test_checkov_finds_nothing_but_what_is_explained() -> None:
    words = [tool("checkov", "`make checkov` installs it"), "--config-file", DEPLOY / "checkov.yaml"]
    words += ["--file", DEPLOY / "Dockerfile", *(KEPT / f"{overlay}.yaml" for overlay in OVERLAYS)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = [int(number) for number in re.findall(r"Passed checks: (\d+)", done.stdout)]
    assert len(counts) == 2, f"manifests and Dockerfile: {done.stdout}"
    assert min(counts) > 100


def test_each_skip_of_checkov_is_explained() -> None:
    lines = (DEPLOY / "checkov.yaml").read_text().splitlines()
    skips = [number for number, line in enumerate(lines) if line.startswith("- CKV")]
    assert skips
    assert all(lines[number - 1].startswith("#") for number in skips)
