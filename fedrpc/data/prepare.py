"""Makes a known data set's folder, from a download or from files that the user has."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from fedrpc.data.datasets import EMBEDDED, verify
from fedrpc.data.layout import Progress, replace_folder, write
from fedrpc.data.origins import DATASETS
from fedrpc.errors import DataError


def ignore_progress(step: str, done: int, total: int) -> None:
    """Does nothing with the progress."""


def prepare(name: str, out_dir: Path, source: Path | None = None, progress: Progress = ignore_progress) -> Path:
    """Makes `out_dir`/`name`, complete and verified or not at all, and returns its path.

    Args:
        name: A name that `fedrpc data list` shows.
        out_dir: The data folder.
        source: Where the raw files are; None downloads them, where that is allowed, into `out_dir`/.downloads, which
            is kept after a failure and removed after a success.
        progress: Called as progress(step, done, total).
    """
    if (EMBEDDED / name / "meta.json").is_file():
        return EMBEDDED / name
    origin = DATASETS[name]
    if source is not None and not source.exists():
        raise DataError(f"source of data set '{name}': expected {origin.needs}, got {source}, which does not exist")
    cache = out_dir / ".downloads" / name
    try:
        raw = origin.make(source, cache, progress)
        with replace_folder(out_dir / name) as folder:
            progress("write", 0, 1)
            write(folder, name, raw, licence=origin.licence, source=origin.source)
            verify(folder, name)
            progress("write", 1, 1)
    except OSError as error:
        raise DataError(
            f"cannot make data set '{name}' in {out_dir}: {error}; check free space and permissions"
        ) from error
    shutil.rmtree(cache, ignore_errors=True)
    with contextlib.suppress(OSError):  # other sets' downloads may be there
        cache.parent.rmdir()
    return out_dir / name
