"""Finds every example of the Markdown pages, and has for each how it is executed, by which test, or why it is not.

An example is a command of a `console` block, or any other block as a whole. It is named by its page and by the words
that it begins with. `tests/contract/test_examples.py` fails when one stands in no table, `test_examples.py` beside this
file plays those of PLAYED. The tutorials are not in the tables: `test_tutorials.py` replays them whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docs.gather import find_pages
from tests.e2e.sessions import BLOCK, read_console

ROOT = Path(__file__).parents[2]
TUTORIALS = "docs/tutorials/"

Table = dict[str, dict[str, str]]  # by page, then by the beginning of the example

AS_IT_STANDS = "{}"
TINY = "--set train_size=400 --set train.epochs=1"
ONE_ROUND = f"{{}} --rounds 1 {TINY}"
SERVER = f"fedrpc-server --listen 127.0.0.1:50051 --rounds 1 {TINY}"
CHECK_TUN = "python -c 'from fedrpc.emulation.tun import check_tun; check_tun()'"  # not every machine allows it
NO_CLUSTER = "kubectl() { cat \"${@: -1}\" > applied.yaml; }; {} && grep -c '^kind:' applied.yaml"

# How an example is played: shell, or Python for a block of it, with the example in place of {}.
PLAYED: Table = {
    "README.md": {
        "fedrpc run --method fedavg --dataset fmnist-mini": ONE_ROUND,
        "fedrpc run --method fedavgg": AS_IT_STANDS,
        "fedrpc run --recipe quickstart --ui": ONE_ROUND,
        "fedrpc ui runs": "timeout 15 {} > ui.log; grep http://127.0.0.1 ui.log",  # it serves until it is stopped
        "fedrpc compare --methods fedprox,flea --partition quantity:3": f"{ONE_ROUND} --seeds 0-1",
        "fedrpc run --method flea --partition quantity:3 --server-optimizer adam": ONE_ROUND,
        "fedrpc run --method fedavg --dp-sgd": ONE_ROUND,
        "fedrpc audit runs/private": AS_IT_STANDS,
        "fedrpc-server --clients 1 --rounds 2 --dp-sgd": "{} --listen 127.0.0.1:50051 > limited.log 2>&1 &",
        "fedrpc-client --server 127.0.0.1:50051 --client-id 0 --state-dir limited": "{} && wait $!",
        "fedrpc privacy limited": AS_IT_STANDS,
        "fedrpc run --method flea --partition quantity:3 --clients 10": ONE_ROUND,
        "fedrpc attack runs/flea --quick": "{} --aux 200 --samples 16 --epochs 1",
        "fedrpc whatif runs/compare-fmnist-mini-60af100d/flea": (
            "mkdir runs/compare-fmnist-mini-60af100d; cp -r runs/flea runs/compare-fmnist-mini-60af100d; {}"
        ),
        'fedrpc run --method flea --link "down=20mbit': f"{ONE_ROUND} --clients 2",
        "fedrpc run --method flea --link 4g:0.7,wifi:0.3": f"{ONE_ROUND} --clients 2",
        "fedrpc run --method flea --link 4g,loss=1%": f"if {CHECK_TUN}; then {ONE_ROUND} --clients 2; fi",
        "fedrpc-server --recipe quickstart": f"{ONE_ROUND} --clients 3 > server.log 2>&1 &",
        "fedrpc-client --server 127.0.0.1:50051 --client-id 0      # and 1, 2": (
            "for client in 1 2; do fedrpc-client --server 127.0.0.1:50051 --client-id $client & done; "
            "{} && wait && grep ^accuracy server.log"
        ),
        "fedrpc run --dataset mnist --clients 10000": f"{ONE_ROUND} --dataset fmnist-mini --clients 100 --fraction 0.1",
        "fedrpc-client --server 127.0.0.1:50051 --client-ids 0-999": (
            f"{SERVER} --clients 3 --out runs/host > host.log 2>&1 & {{}} --client-ids 0-2 && wait $!"
        ),
    },
    "deploy/README.md": {
        "fedrpc deploy render --config run.toml --clients 500 --clients-per-pod 20 --image IMAGE > run.yaml": (
            f"cp $ROOT/fedrpc/recipes/quickstart.toml run.toml; {NO_CLUSTER}"
        ),
        "fedrpc deploy render --config run.toml --clients 500 --clients-per-pod 20 --image IMAGE --queue": NO_CLUSTER,
        "fedrpc certs certs": AS_IT_STANDS,
    },
    "fedrpc/aggregation/README.md": {
        "@dataclass": (
            "from dataclasses import dataclass\nfrom fedrpc.wire.kinds import Kind\n"
            "from fedrpc.wire.message import Tensors, part\n\n{}"
        ),
        "fedrpc run --method flea --server-optimizer adam": ONE_ROUND,
        "import torch": AS_IT_STANDS,
        "fedrpc run --import trimmed.py": ONE_ROUND,
    },
    "fedrpc/data/README.md": {
        "fedrpc data import PATH": (
            "mkdir PATH; cp $ROOT/docs/machines.csv PATH/train.csv; cp PATH/train.csv PATH/test.csv; {} --label state"
        ),
        "@partitioner": (
            "import numpy as np\nfrom fedrpc.data.partition import make_partition\n"
            "from fedrpc.data.partition_spec import Source, partitioner\n\n{}\n"
            'parts = make_partition("halves:0.3", np.zeros(100), 8, 0).indices\n'
            "assert [len(part) for part in parts] == [30, *[10] * 7]\n"
        ),
    },
    "fedrpc/methods/README.md": {
        "fedrpc run --recipe quickstart --method fedzdac": (
            f"{ONE_ROUND} --rounds 2 --set params.t_start=1 --set params.samples_per_class=2 --set params.iterations=2"
        ),
        "fedrpc synthetic runs/zdac": "{} --per-class 2 --iterations 2 --oracle-epochs 1",
        "fedrpc run --method feddpms": f"{ONE_ROUND} --rounds 2 --set params.preliminary=1",
        "fedrpc synthetic runs/dpms": "{} --per-class 2 --oracle-epochs 1",
        "fedrpc run --method mpgan --rounds 0": f"{{}} {TINY} --set params.steps=2",
        "fedrpc run --method mpgan --rounds 30": ONE_ROUND,
        "fedrpc synthetic runs/mpgan": "{} --per-class 2 --oracle-epochs 1",
    },
    "fedrpc/models/README.md": {
        "@architecture": (
            "import torch\nfrom torch import nn\n"
            "from fedrpc.models.base import Model, Shape, architecture, is_image\n\n{}\n"
            "assert Tiny((1, 28, 28), 10)(torch.zeros(2, 1, 28, 28)).shape == (2, 10)\n"
        ),
    },
    "tests/standin/README.md": {
        "with present()": (
            "import os, sys\nsys.path.insert(0, os.environ['ROOT'])\nimport torch\n"
            "from tests.standin.cuda import present\nfrom tests.standin.syncs import count_reads, recorded\n\n"
            "model, x = torch.nn.Linear(3, 2), torch.zeros(4, 3)\n{}"
        ),
    },
}

OWN_CODE = "tests/e2e/test_readme_own_code.py::test_the_examples_print_what_the_readme_says"
OWN_DATA = "tests/e2e/test_own_data.py::test_the_readmes_session_is_what_happens"
TWO_ROUNDS = "tests/unit/methods/test_readme.py::test_an_example_plays_two_rounds_with_the_predicted_bytes"
OF_DATA = "tests/unit/data/test_examples_of_the_readme.py::"

# Which test executes an example as it stands.
TESTED: Table = {
    "README.md": {
        ">>> import fedrpc": "tests/e2e/test_notebook.py::test_python_examples_come_to_what_they_show",
        "fedrpc data import docs/machines.csv": OWN_DATA,
        "fedrpc partition --dataset machines": OWN_DATA,
        "fedrpc compare --methods flea --dataset machines": OWN_DATA,
        "# net.py": OWN_CODE,
        "fedrpc run --model net.py": OWN_CODE,
        "fedrpc new method fedmine": OWN_CODE,
        "fedrpc compare --methods fedmine.py": OWN_CODE,
        "fedrpc run --method fedwrong.py": OWN_CODE,
    },
    "fedrpc/data/README.md": {
        "from fedrpc.data import import_dataset": OF_DATA + "test_a_data_set_of_hugging_face_is_imported",
        '{"classes"': OF_DATA + "test_a_meta_of_one_line_is_enough",
        "from pathlib import Path": OF_DATA + "test_arrays_are_written_by_layout_write",
    },
    "fedrpc/methods/README.md": {'"""FedFocal': TWO_ROUNDS, '"""FedMeasured': TWO_ROUNDS},
    "fedrpc/tracking/README.md": {
        "import json": (
            "tests/e2e/test_trackers.py::"
            "test_a_run_that_is_stopped_and_resumed_is_tracked_once_and_a_broken_tracker_costs_a_line"
        ),
    },
}

CLUSTER = "needs a cluster"
DRAWING = "a drawing"
IN_A_PACKAGE = "a part of somebody's pyproject.toml, which only counts in an installed package"

# Why an example is not executed by any test.
EXCUSED: Table = {
    "CONTRIBUTING.md": {
        "make setup": "installs packages from the network; CI does it, since each of its targets depends on it",
        ".venv/bin/pre-commit install": "changes the hooks of the clone that is tested",
    },
    "README.md": {
        "make demo": "installs from the network and takes minutes: executed by hand, and its output copied",
        "make test": "is what CI runs",
        "6 methods on fmnist-mini": "the output of make demo",
        "sudo fedrpc run": "needs root; tests/e2e/test_links.py has a run with netem where that is allowed",
        "fedrpc run --method fedavg --device cuda": "needs a GPU",
    },
    "deploy/README.md": {
        "kubectl wait": CLUSTER,
        "kubectl cp": CLUSTER,
        "kubectl run prepare": CLUSTER,
        "docker build -f deploy/Dockerfile -t REGISTRY/fedrpc:0.1.0 .": "downloads gigabytes",
        "docker build -f deploy/Dockerfile -t REGISTRY/fedrpc:0.1.0-cuda": "as the other variant",
        "kubectl create secret generic fedrpc-server-tls": CLUSTER,
        "kubectl create secret generic fedrpc-client-tls": CLUSTER,
    },
    "fedrpc/data/README.md": {"<data-dir>": DRAWING},
    "fedrpc/launch/README.md": {"fedrpc run ──": DRAWING},
    "fedrpc/methods/README.md": {"[project.entry-points": IN_A_PACKAGE},
    "fedrpc/tracking/README.md": {
        "pip install": "installs packages from the network",
        "fedrpc run --recipe quickstart --tracker": "needs these packages: make trackers tests each in an environment",
        "tensorboard --logdir": "another project's program, which serves until it is stopped",
        "[project.entry-points": IN_A_PACKAGE,
    },
    "protos/README.md": {"client process": DRAWING},
}


@dataclass(frozen=True)
class Example:
    """A command with the output that is shown, or a block of another language, which may be a file of that name."""

    page: str
    language: str
    text: str
    shown: str = ""
    file: str | None = None

    def find(self, table: Table) -> list[str]:
        """The beginnings in a table that name this example."""
        return [start for start in table.get(self.page, {}) if self.text.startswith(start)]


def read_examples(page: str, text: str) -> Iterator[Example]:
    """All examples of a page, in order."""
    for block in BLOCK.finditer(text):
        if block["language"] == "console":
            for step in read_console(block["text"]):
                yield Example(page, "console", step.command, step.shown)
        else:
            yield Example(page, block["language"], block["text"], file=block["file"])


def list_pages() -> dict[str, str]:
    """The text of every page but the tutorials, by its path."""
    paths = [path for path in find_pages() if not path.startswith(TUTORIALS)]
    return {path: (ROOT / path).read_text(encoding="utf-8") for path in paths}
