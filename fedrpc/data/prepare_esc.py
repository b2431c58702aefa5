"""Turns the ESC-10 part of ESC-50's official folder into log-mel pictures, grouped by recording."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedrpc.data.layout import Progress, Raw
from fedrpc.data.prepare_audio import RANGE_DB, make_pictures, read_clips, split_arrays
from fedrpc.errors import DataError

SECONDS, TEST_FOLD = 5, 5
TABLE = Path("meta") / "esc50.csv"
COLUMNS = ("filename", "fold", "target", "category", "esc10", "src_file")


def make(source: Path | None, cache: Path, progress: Progress) -> Raw:
    """Log-mel of every clip; the fifth fold is the test set, and clips of one recording lie in one fold."""
    root = _find_root(source)
    clips = [clip for clip in read_clips(root / TABLE, COLUMNS) if clip["esc10"] == "True"]
    targets, recordings, folds = (
        np.array([int(clip[key]) for clip in clips]) for key in ("target", "src_file", "fold")
    )
    tested = folds == TEST_FOLD
    if tested.all() or not tested.any():
        raise DataError(f"esc10: expected clips in fold {TEST_FOLD} and outside, got only one of the two")
    pictures = make_pictures([root / "audio" / clip["filename"] for clip in clips], SECONDS, progress)
    names = {int(clip["target"]): clip["category"] for clip in clips}
    values = {"x": pictures, "y": np.searchsorted(sorted(names), targets), "group": recordings}
    return Raw(split_arrays(values, tested), tuple(names[target] for target in sorted(names)), float(RANGE_DB))


def _find_root(source: Path | None) -> Path:
    if source is None:
        raise DataError(
            "data set 'esc10' is not downloaded for you: expected --source with the unpacked ESC-50 folder "
            "(github.com/karolpiczak/ESC-50), got none"
        )
    for root in (source, source / "ESC-50-master"):
        if (root / TABLE).is_file():
            return root
    raise DataError(f"{source}: expected {TABLE} and audio/, got neither; unpack the archive")
