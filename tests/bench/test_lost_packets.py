"""What lost packets cost: a FedAvg run over links that lose them, and one connection, by congestion control."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedrpc.emulation.tun import check_tun, name_congestion_control
from fedrpc.errors import ConfigError
from fedrpc.study.reading import read_run
from fedrpc.study.whatif import measure
from tests.bench.results import Figures
from tests.e2e.programs import Programs

pytestmark = [pytest.mark.timeout(600), pytest.mark.aside]

LOSSES = (0, 1, 3)  # percent
LINK = "down=10mbit,up=10mbit,rtt=60ms"


@pytest.fixture(autouse=True)
def tun() -> None:
    try:
        check_tun()
    except ConfigError as error:
        pytest.skip(str(error))


def test_lost_packets_in_a_run(small: bool, figures: Figures, tmp_path: Path, scripts: Programs) -> None:
    """Little computing, so that the time is the network's."""
    words = ["--clients", "4", "--rounds", "1" if small else "20"]
    words += ["--set", "train_size=400", "--set", "train.epochs=1", "--link"]
    models = set()
    for loss in LOSSES:
        out = tmp_path / str(loss)
        scripts.run(out, *words, f"{LINK},loss={loss}%", "--shaper", "tun").wait_for_success(300)
        run = read_run(out)
        models.add(run.summary["model_sha256"])
        resent = run.summary["time"]["tasks"]["resent"]
        said = {"resent_down": resent["down"], "resent_up": resent["up"], "tcp": name_congestion_control()}
        figures.add(f"seconds of all rounds at {loss} % loss", measure(run).seconds, link=LINK, **said)
    assert len(models) == 1


def test_lost_packets_of_one_connection(small: bool, figures: Figures, env: dict[str, str]) -> None:
    """Only root may choose another congestion control than the machine's."""
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    controls = [name for name in ("bbr", "cubic") if name in available] if os.geteuid() == 0 else []
    chosen: list[str] = [*controls] or [name_congestion_control()]
    for control in chosen:
        for loss in LOSSES:
            words = ["-m", "tests.e2e.packets", f"{LINK},loss={loss}%", "1000000" if small else "2500000"]
            words += [control] if controls else []
            done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout)
            figures.add(f"Mbit/s up at {loss} % loss, {control}", found["up"] / 1e6, down=found["down"] / 1e6)
