"""Records what small runs of every method come to, and checks that a change of the code left it alone.

`python -m tests.e2e.baseline record` writes baseline.json beside this file, `check` runs everything again and names
what differs: the model's hash, the method's bytes by kind, and the privacy summary. Real processes, fixed seeds. Model
hashes are comparable on one type of machine only, so on another type `check` leaves them out and says so.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from fedrpc.methods import METHODS

FILE = Path(__file__).with_suffix(".json")
COMMON = (
    "--dataset fmnist-mini --partition dirichlet:0.5 --clients 4 --fraction 0.75 --rounds 3 --seed 7 "
    "--set train_size=240 --set local_test=0.2 --set train.batch_size=16 --set train.lr=0.05"
)
GAN = "--set params.steps=3 --set params.batch=4 --set params.width=4 --set params.a_f=0.2 --set params.save_every=2"
ZERO_SHOT = "--set params.t_start=1 --set params.samples_per_class=2 --set params.iterations=3"
DPMS = "--model dpms --set params.preliminary=1 --set params.alpha=4 --set params.tries=3"
DP_SGD = "noise_multiplier=1.1,max_grad_norm=1"
OPTIONS = {  # by method; what is not here runs with its defaults
    "ccvr": "--set params.num_virtual=50 --set params.epochs=2",
    "feddpms": DPMS,
    "fedgen": "--set params.steps=5",
    "fedgen-img": "--set params.start=1 --set params.steps=3",
    "fedvae": "--model dpms",
    "fedzdac": ZERO_SHOT,
    "fedzdas": ZERO_SHOT,
    "mpgan": f"{GAN} --set params.tau=0 --set params.warm_up=1 --set params.min_pool=0",
    "mpgan-ac": f"{GAN} --set params.warm_up=1",
}
VARIANTS = {
    "fedavg with DP-SGD": f"--method fedavg --dp-sgd {DP_SGD} --epsilon-budget 50",
    "fedprox with DP-SGD": f"--method fedprox --dp-sgd {DP_SGD}",
    "feddpms private": f"--method feddpms {DPMS} --set params.mode=private --set params.m=5",
    "flea float16": "--method flea --set params.transport=float16",
    "feddata uint8": "--method feddata --set params.transport=uint8",
    "ccvr diagonal": f"--method ccvr {OPTIONS['ccvr']} --set params.diagonal=true",
    "fedavg adam": "--method fedavg --set train.optimizer=adam --set train.epochs=2",
}


def run(options: str) -> dict[str, Any]:
    """One run's results."""
    with tempfile.TemporaryDirectory() as folder:
        command = [Path(sys.executable).with_name("fedrpc"), "run", *f"{COMMON} {options}".split(), "--out", folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise SystemExit(f"{options}: {done.stderr}")
        summary = json.loads((Path(folder) / "summary.json").read_text())
    return {
        "model_sha256": summary["model_sha256"],
        "bytes": summary["bytes"]["method"],
        "predicted": summary["bytes"]["predicted"],
        "privacy": summary["privacy"],
    }


def machine() -> str:
    """What decides over the bits of a model."""
    return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def main() -> int:
    """Records or checks; the exit code says whether anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["record", "check"])
    parser.add_argument("names", nargs="*", help="only these; all when none is named")
    args = parser.parse_args()
    cases = {name: f"--method {name} {OPTIONS.get(name, '')}" for name in METHODS} | VARIANTS
    kept = json.loads(FILE.read_text()) if FILE.exists() else {"runs": {}}
    same_machine = kept.get("machine", machine()) == machine()
    differing = 0
    for name in args.names or cases:
        found = run(cases[name])
        if args.what == "record":
            kept = {"machine": machine(), "options": COMMON, "runs": kept["runs"] | {name: found}}
            FILE.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
            print(name, found["model_sha256"][:12], flush=True)
            continue
        before = kept["runs"].get(name, {})
        apart = [key for key in found if before.get(key) != found[key] and (same_machine or key != "model_sha256")]
        differing += bool(apart)
        print(name, "differs in " + ", ".join(apart) if apart else "equal", flush=True)
    if args.what == "check" and not same_machine:
        print(f"model hashes were left out: recorded on {kept['machine']}, this is {machine()}")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
