"""Files of the user's own: imported by path, told apart by their hashes, and explained in one line when wrong."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from fedrpc import config, models, owncode
from fedrpc.errors import ConfigError, Damaged, Refused, UnknownName
from fedrpc.methods import METHODS
from fedrpc.models import MODELS, Model
from fedrpc.own_names import resolve_method, resolve_model
from tests.fakes import problem_of, run_in_memory

FOCAL = """
from fedrpc.methods.fedavg import FedAvg
from fedrpc.methods.method import Params

class OwnParams(Params):
    strength: float = 0.5

class Own(FedAvg[OwnParams]):
    "FedAvg under another name."
    name = "own"
"""
NETS = """
from torch import nn

class Net(nn.Module):
    "A linear network."
    def __init__(self, num_classes):
        super().__init__()
        self.linear = nn.Linear(784, num_classes)

    def forward(self, x):
        return self.linear(x.flatten(1))
"""
SHAPE = (1, 28, 28)

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes files of own code into a folder of their own, and forgets their imports after the test."""
    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def put(source: str, name: str = "own.py") -> Path:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        return path

    yield put
    owncode.forget_all()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# Methods


def test_a_method_in_a_file_runs_and_the_configuration_records_the_file(write: Write) -> None:
    path = write(FOCAL)
    found = config.build({"method": "own.py"})
    assert (found.method, found.params, found.code) == ("own", {"strength": 0.5}, {"own.py": sha256(path)})
    plain = run_in_memory(problem_of("fedavg"), 1)
    assert run_in_memory(problem_of("own"), 1).sha256 == plain.sha256


def test_a_run_without_own_code_keeps_its_name(write: Write) -> None:
    before = config.build({})
    assert "code" not in config.to_toml(before)
    assert "code" not in before.dump_for_join()
    config.build({"method": str(write(FOCAL))})
    assert config.build({}) == before, "the baseline of a comparison has nothing of another method's code"


def test_another_content_is_another_run(write: Write) -> None:
    write(FOCAL)
    first = config.build({"method": "own.py"})
    write(FOCAL + "# changed\n")
    second = config.build({"method": "own.py"})
    assert first.hash != second.hash
    assert [line.split()[0] for line in config.list_differences(first, second)] == ["code.own.py"]


def test_a_file_that_changed_is_imported_again(write: Write) -> None:
    write(FOCAL)
    resolve_method("own.py")
    write(FOCAL.replace("0.5", "0.75"))
    assert config.build({"method": "own.py"}).params == {"strength": 0.75}


def test_registering_oneself_makes_no_difference(write: Write) -> None:
    write("from fedrpc.methods.method import register\n" + FOCAL.replace("class Own(", "@register\nclass Own("))
    assert resolve_method("own.py") == resolve_method("own.py:Own") == "own"


@pytest.mark.parametrize(
    ("source", "spec", "said"),
    [
        (FOCAL, "own.py:Owm", "unknown method of own.py 'Owm'; registered: Own. Did you mean 'Own'?"),
        (
            FOCAL + FOCAL.replace("Own", "Other").replace('"own"', '"other"'),
            "own.py",
            "say which: own.py:Own, own.py:Ot",
        ),
        (NETS, "own.py", "own.py has no method: expected a class that derives from fedrpc.methods.method.Method"),
        ("", "other.py", "no Python file at other.py; check the path, which is relative to "),
        ("class (:\n", "own.py", "cannot import own.py: SyntaxError: invalid syntax, at own.py:1"),
        ("\nimport nosuch", "own.py", "ModuleNotFoundError: No module named 'nosuch', at own.py:2"),
        ("def f():\n    return {}['x']\nf()", "own.py", "cannot import own.py: KeyError: 'x', at own.py:2"),
        ("raise SystemExit(3)", "own.py", "cannot import own.py: SystemExit: 3, at own.py:1"),
        (FOCAL.replace('"own"', '"flea"'), "own.py", "'flea' is the name of a method of fedrpc itself; choose another"),
    ],
)
def test_a_mistake_is_told_in_one_line(write: Write, source: str, spec: str, said: str) -> None:
    write(source)
    with pytest.raises(ConfigError) as caught:
        resolve_method(spec)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 78


def test_a_class_that_inherits_its_name_is_told_where_it_is(write: Write) -> None:
    write("from fedrpc.methods.method import register\n" + FOCAL.replace('    name = "own"\n', "") + "register(Own)\n")
    with pytest.raises(ConfigError, match=r"'fedavg' is the name of a method of fedrpc itself.*, at own\.py:11"):
        resolve_method("own.py")


def test_a_failed_import_leaves_nothing_behind(write: Write) -> None:
    write(FOCAL + "1 / 0\n")
    with pytest.raises(ConfigError, match=r"ZeroDivisionError: division by zero, at own\.py:11"):
        resolve_method("own.py")
    assert "own" not in METHODS
    assert "own" not in sys.modules
    write(FOCAL)
    assert resolve_method("own.py") == "own"


def test_two_files_of_one_name_cannot_be_told_apart(write: Write) -> None:
    write(FOCAL)
    write(NETS, "nets/own.py")
    with pytest.raises(ConfigError, match=r"nets/own\.py and own\.py have the same file name; rename one of them"):
        config.build({"method": "own.py", "import": ["nets/own.py"]})


def test_a_name_that_an_installed_module_has_is_no_obstacle(write: Write) -> None:
    write(FOCAL, "json.py")
    assert resolve_method("json.py") == "own"
    assert sys.modules["json"].__name__ == "json"
    assert "dumps" in vars(sys.modules["json"])


# What a file imports


def test_what_a_file_imports_from_beside_it_is_recorded_too(write: Write) -> None:
    own = write("from layers.sizes import SIZE\nimport losses\n" + FOCAL)
    losses, sizes = write("STRENGTH = 1\n", "losses.py"), write("SIZE = 3\n", "layers/sizes.py")
    write("raise AssertionError('not imported')", "unused.py")
    found = config.build({"method": "own.py"})
    assert found.code == {"layers/sizes.py": sha256(sizes), "losses.py": sha256(losses), "own.py": sha256(own)}
    losses.write_text("STRENGTH = 2\n")
    assert config.build({"method": "own.py"}).hash != found.hash
    assert sys.modules["losses"].STRENGTH == 2


def test_each_method_records_only_what_it_needs(write: Write) -> None:
    write("import losses\n" + FOCAL)
    write("import sizes\n" + FOCAL.replace('"own"', '"other"'), "other.py")
    write("", "losses.py")
    write("", "sizes.py")
    one, two = (config.build({"method": name}) for name in ("own.py", "other.py"))
    assert (set(one.code), set(two.code)) == ({"own.py", "losses.py"}, {"other.py", "sizes.py"})


def test_a_late_import_is_refused_since_it_was_not_recorded(write: Write) -> None:
    write("def late():\n    import losses\n" + FOCAL)
    write("", "losses.py")
    resolve_method("own.py")
    with pytest.raises(ImportError, match="losses is imported too late to be recorded: import it at the top"):
        sys.modules["own"].late()


def test_nothing_is_written_into_the_users_folder(write: Write) -> None:
    path = write(FOCAL)
    resolve_method("own.py")
    assert list(path.parent.iterdir()) == [path]


def test_other_things_come_by_import(write: Write) -> None:
    write("from fedrpc.aggregation.mean import Mean\nclass Same(Mean):\n    name = 'same'\n", "layer.py")
    found = config.build({"import": ["layer.py"], "aggregators": ["same"]})
    assert set(found.code) == {"layer.py"}
    assert config.build({"aggregators": ["same"]}) == found, "the aggregator's file is needed, however it was imported"


# Where files are found


def test_paths_in_a_file_are_relative_to_it(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(FOCAL)
    toml = write('method = "own.py"\nimport = ["nets.py"]\nmodel = "nets.py:Net"\n', "run.toml")
    write(NETS, "nets.py")
    monkeypatch.chdir(tmp_path)
    found = config.build(config.read_own_toml(toml))
    assert (found.method, found.model, set(found.code)) == ("own", "nets:Net", {"own.py", "nets.py"})


def test_a_run_directory_opens_with_its_copies(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, run = write("import losses\n" + FOCAL), tmp_path / "run"
    helper = write("A = 1\n", "losses.py")
    found = config.build({"method": "own.py"})
    owncode.save_copies(run / "code", found.code)
    (run / "config.toml").write_text(config.to_toml(found))
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(path.parent)
    owncode.forget_all()
    assert config.open_run_config(run) == found
    assert sys.modules["own"].__file__ == str(run / "code" / "own.py")
    owncode.forget_all()
    (run / "code" / helper.name).write_text("A = 2\n")
    with pytest.raises(Damaged, match=r"code/losses\.py was changed: expected SHA-256 [0-9a-f]{16}, got [0-9a-f]{16};"):
        config.open_run_config(run)
    assert "own" not in sys.modules, "nothing runs before all files have proved unchanged"
    (run / "code" / helper.name).unlink()
    with pytest.raises(Damaged, match=r"code/losses\.py is missing"):
        config.open_run_config(run)


def test_what_is_named_wins_over_a_copy(write: Write, tmp_path: Path) -> None:
    write(FOCAL)
    found, run = config.build({"method": "own.py"}), tmp_path / "run"
    owncode.save_copies(run / "code", found.code)
    (run / "config.toml").write_text(config.to_toml(found))
    changed = write(FOCAL.replace("0.5", "0.75"))
    values = config.read_own_toml(run / "config.toml") | {"method": "own.py", "params": {}}
    again = config.build(values)
    assert (again.code, again.params) == ({"own.py": sha256(changed)}, {"strength": 0.75})


@pytest.mark.parametrize("name", ["../own.py", "/tmp/own.py", "own.txt", "a/../own.py", "./own.py"])
def test_recorded_names_lead_nowhere_else(name: str) -> None:
    with pytest.raises(ConfigError, match="expected the name of a python file"):
        config.build({"code": {name: "0" * 64}})


# Clients


def test_a_client_needs_the_servers_code(write: Write) -> None:
    write(FOCAL)
    found = config.build({"method": "own.py"})
    owncode.check_same(found.code, "own")
    with pytest.raises(
        Refused, match=r"own\.py differs from the server's own\.py: expected SHA-256 0{16}, got [0-9a-f]"
    ):
        owncode.check_same({"own.py": "0" * 64}, "own")
    owncode.forget_all()
    with pytest.raises(
        Refused, match=r"which no server sends: .* start the client with --import FILE, your copy of own"
    ):
        owncode.check_same(found.code, "own")


def test_a_servers_configuration_makes_a_client_import_nothing(write: Write) -> None:
    write("raise AssertionError('imported')")
    sent = config.RunConfig(method="own.py", model="own.py:Net", code={"own.py": "0" * 64}).dump_for_join()
    got = config.parse_join_config(sent)
    with pytest.raises(Refused):
        owncode.check_same(got.code, "own")
    with pytest.raises(UnknownName):
        METHODS[got.method]
    with pytest.raises(UnknownName):
        MODELS[got.model]


# Models


def build_own(spec: str) -> nn.Module:
    return models.build(resolve_model(spec), SHAPE, 10)


def test_a_plain_module_is_a_model(write: Write) -> None:
    path = write(NETS)
    assert resolve_model("own.py") == resolve_model("own.py:Net") == "own:Net"
    assert config.build({"model": "own.py"}).code == {"own.py": sha256(path)}
    assert build_own("own.py")(torch.zeros(3, *SHAPE)).shape == (3, 10)


def test_initial_weights_follow_the_seed(write: Write) -> None:
    write(NETS)
    one, two, other = (problem_of("fedavg", model=resolve_model("own.py"), seed=seed) for seed in (0, 0, 1))
    first, second, third = (next(each.copy_network().parameters()) for each in (one, two, other))
    assert first.equal(second)
    assert not first.equal(third)


@pytest.mark.parametrize(
    "source",
    [
        "def make(): return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))",
        "def make(shape, num_classes): return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), num_classes))",
        "def make(in_channels): return nn.Sequential(nn.Flatten(), nn.Linear(784 * in_channels, 10))",
        "def make(num_classes=7, **more): return nn.Sequential(nn.Flatten(), nn.Linear(784, num_classes))",
        "class make(nn.Sequential):\n  def __init__(self): super().__init__(nn.Flatten(), nn.Linear(784, 10))",
    ],
)
def test_it_gets_what_it_asks_for(write: Write, source: str) -> None:
    write(f"import math\nfrom torch import nn\n{source}\n")
    network = build_own("own.py:make")
    assert network(torch.zeros(2, *SHAPE)).shape == (2, 10)
    assert isinstance(network, Model), "a Sequential that ends in a Linear can be cut"
    assert network.features(torch.zeros(2, *SHAPE)).shape == (2, 784)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("(self, num_classes)", "(self, num_classes, width)"),
            r"has a parameter 'width' without a default.*, at own\.py:6",
        ),
        (("784", "783"), r"'own:Net' fails for samples of shape \(1, 28, 28\): RuntimeError: .*, at own\.py:11"),
        (
            ("num_classes)\n\n", "7)\n\n"),
            r"gives \(2, 7\) for 2 samples .* expected \(2, 10\), a logit for each .*own\.py:10",
        ),
        (("return self.linear(x.flatten(1))", "return x, x"), r"gives tuple for 2 samples"),
        (
            ("super().__init__()", "{}['x']"),
            r"cannot be built for samples of shape \(1, 28, 28\): KeyError: 'x', at own\.py:7",
        ),
    ],
)
def test_a_network_that_is_none_for_the_data(write: Write, change: tuple[str, str], said: str) -> None:
    write(NETS.replace(*change))
    with pytest.raises(ConfigError, match=said):
        build_own("own.py")


def test_a_network_that_cannot_be_cut_says_what_to_do(write: Write) -> None:
    write(NETS)
    with pytest.raises(ConfigError, match=r"but Net has none; make it a torch\.nn\.Sequential that ends in a Linear"):
        models.cut(build_own("own.py"), 0)


def test_the_trial_leaves_a_network_as_it_was_built(write: Write) -> None:
    write(
        NETS.replace("nn.Linear(784, num_classes)", "nn.Sequential(nn.BatchNorm1d(784), nn.Linear(784, num_classes))")
    )
    network = build_own("own.py")
    assert network.training
    assert network.linear[0].running_mean.equal(torch.zeros(784))
    assert int(network.linear[0].num_batches_tracked) == 0


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("own.py:Nett", "unknown model of own.py 'Nett'; registered: Net. Did you mean 'Net'?"),
        ("two.py", "two.py has 2 models; say which: two.py:Net, two.py:Other"),
        ("none.py", "none.py has no model: expected a class that derives from torch.nn.Module"),
    ],
)
def test_which_model_is_told(write: Write, spec: str, said: str) -> None:
    write(NETS)
    write(NETS + NETS.replace("Net(", "Other("), "two.py")
    write("from torch import nn\nclass _Block(nn.Module): ...\n", "none.py")
    with pytest.raises(ConfigError) as caught:
        resolve_model(spec)
    assert said in str(caught.value)


def test_a_registered_architecture_has_its_name(write: Write) -> None:
    write(
        "from fedrpc.models import architecture\n"
        + NETS.replace(
            "class Net", "@architecture('tiny', takes='an image', fits=lambda shape: True)\nclass Net"
        ).replace("self, num_classes", "self, shape, num_classes")
    )
    assert resolve_model("own.py") == resolve_model("own.py:Net") == "tiny"
    assert set(config.build({"model": "own.py"}).code) == {"own.py"}
    assert build_own("own.py")(torch.zeros(2, *SHAPE)).shape == (2, 10)
