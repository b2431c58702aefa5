"""Imports people's own data: folders of images and sounds, tables, arrays, and data sets of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedrpc.data.datasets import find_data_dir
from fedrpc.data.importing.huggingface import open_dataset
from fedrpc.data.importing.importer import Imported, check_name, import_path, write_material
from fedrpc.data.importing.material import Options
from fedrpc.data.prepare import ignore_progress

if TYPE_CHECKING:
    import datasets as hf

__all__ = ["Imported", "Options", "import_dataset", "import_path"]


def import_dataset(
    data: hf.Dataset | hf.DatasetDict,
    name: str,
    data_dir: str | Path | None = None,
    *,
    force: bool = False,
    licence: str = "not stated",
    **options: Any,
) -> Imported:
    """Imports a data set of Hugging Face's `datasets`.

    Args:
        data: A Dataset, or a DatasetDict with the splits train and, if there is one, test.
        name: Of the new data set.
        data_dir: The folder of data sets; by default the one that FEDRPC_DATA names.
        force: Whether a data set of that name is replaced.
        options: Those of `Options`, such as label="species" or test=0.1.
    """
    folder, chosen = find_data_dir(data_dir), Options(**options)
    check_name(name, folder, force=force)
    material = open_dataset(data, chosen, f"data set '{name}'")
    return write_material(
        material, folder, name, chosen, licence, "imported from Hugging Face datasets", ignore_progress
    )
