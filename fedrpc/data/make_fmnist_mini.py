"""Makes the data set that comes with the package from a prepared, full Fashion-MNIST folder.

    python -m fedrpc.data.make_fmnist_mini FASHION_MNIST_DATA_DIR OUT

FASHION_MNIST_DATA_DIR holds fmnist/ as `fedrpc data prepare fmnist` makes it; OUT/fmnist-mini/ is written. The same
input gives the same bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from fedrpc.data.datasets import Split, open_folder, verify
from fedrpc.data.layout import Raw, replace_folder, write
from fedrpc.seeds import derive

NAME = "fmnist-mini"
PER_CLASS = {"train": 600, "test": 100}
NOTICE = """The MIT License (MIT)

Copyright (c) 2017 Zalando SE, https://tech.zalando.com

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
persons to whom the Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""


def make(data_dir: Path, out: Path) -> Path:
    """Writes `out`/fmnist-mini from `data_dir`/fmnist and returns it."""
    full = open_folder(data_dir / "fmnist")
    arrays: dict[str, np.ndarray] = {}
    for name, half in (("train", full.train), ("test", full.test)):
        rows = choose(half, PER_CLASS[name], name)
        arrays |= {f"x_{name}": half.x[rows], f"y_{name}": half.y[rows]}
    source = "Fashion-MNIST, Zalando SE: 600 training and 100 test images of each class"
    with replace_folder(out / NAME) as folder:
        write(folder, NAME, Raw(arrays, full.classes, full.scale), licence=full.licence, source=source)
        (folder / "LICENSE").write_text(NOTICE, encoding="utf-8")
        verify(folder, NAME)
    return out / NAME


def choose(half: Split, per_class: int, name: str) -> np.ndarray:
    """Rows of `per_class` samples of each class, chosen at random, in the order of the file."""
    rng = derive(0, NAME, name)
    labels = range(int(half.y.max()) + 1)
    return np.sort(np.concatenate([rng.choice(np.flatnonzero(half.y == c), per_class, replace=False) for c in labels]))


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Make the embedded data set fmnist-mini.")
    parser.add_argument("data_dir", type=Path, help="folder that holds fmnist/")
    parser.add_argument("out", type=Path, help="folder in which fmnist-mini/ is written")
    arguments = parser.parse_args()
    print(make(arguments.data_dir, arguments.out))


if __name__ == "__main__":
    main()
