"""The registry of known data sets: licence, source, size, and the function that prepares each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedrpc.data import prepare_audio, prepare_esc, prepare_har, prepare_images
from fedrpc.data.layout import Progress, Raw
from fedrpc.registry import Registry


@dataclass(frozen=True)
class Origin:
    """Where a known data set comes from.

    A third party adds a data set by an entry point in the group `fedrpc.datasets` whose value is an Origin:

        [project.entry-points."fedrpc.datasets"]
        birdsong = "birdsong_fedrpc:ORIGIN"

    Attributes:
        licence: The terms under which the data may be used.
        source: One line for meta.json: what it is and whose.
        needs: How to get it, for `fedrpc data list`.
        size_bytes: The approximate size of the prepared folder.
        make: Called as make(source, cache, progress): reads `source` (what the user gave, or None), may download into
            the folder `cache`, calls progress(step, done, total), and returns the arrays.
    """

    licence: str
    source: str
    needs: str
    size_bytes: int
    make: Callable[[Path | None, Path, Progress], Raw]


DATASETS: Registry[Origin] = Registry("data set", "datasets")

DATASETS.register("mnist")(
    Origin("CC BY-SA 3.0", "MNIST, LeCun, Cortes and Burges", "downloads 12 MB", 55_500_000, prepare_images.make_mnist)
)
DATASETS.register("fmnist")(
    Origin("MIT", "Fashion-MNIST, Zalando SE", "downloads 31 MB", 55_500_000, prepare_images.make_fmnist)
)
DATASETS.register("cifar10")(
    Origin("none stated", "CIFAR-10, Krizhevsky 2009", "downloads 170 MB", 184_800_000, prepare_images.make_cifar10)
)
DATASETS.register("cifar100")(
    Origin("none stated", "CIFAR-100, Krizhevsky 2009", "downloads 169 MB", 184_800_000, prepare_images.make_cifar100)
)
DATASETS.register("uci-har")(
    Origin(
        "non-commercial use, cite Anguita et al. 2013",
        "UCI-HAR, Anguita et al. 2013; channels total acceleration xyz, body gyroscope xyz",
        "the UCI HAR archive (archive.ics.uci.edu, data set 240) as --source",
        31_800_000,
        prepare_har.make,
    )
)
DATASETS.register("urbansound8k")(
    Origin(
        "CC BY-NC 3.0",
        "UrbanSound8K, Salamon et al. 2014, log-mel in dB + 80; fold 10 is the test set",
        "the unpacked UrbanSound8K folder (urbansounddataset.weebly.com) as --source",
        71_800_000,
        prepare_audio.make,
    )
)
DATASETS.register("esc10")(
    Origin(
        "CC BY 3.0",
        "ESC-10, Piczak 2015, log-mel in dB + 80; fold 5 is the test set",
        "the unpacked ESC-50 folder (github.com/karolpiczak/ESC-50) as --source",
        3_300_000,
        prepare_esc.make,
    )
)
