"""Load scientific data for synchronous data-parallel training."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from matex_data.errors import DataError, DecodeError, FieldNotFound, FormatError, PartitionError
from matex_data.fields import Field, Schema
from matex_data.mpi import early_errors, processes

if TYPE_CHECKING:
    from matex_data import training
    from matex_data.combining import concat, merge, mix
    from matex_data.compat import DataSet
    from matex_data.dataset import Dataset
    from matex_data.opening.open import open_dataset
    from matex_data.samples import sample_data

processes.disable_mpi_in_child()
early_errors.notice()

__version__ = "0.2.0"

__all__ = [
    "DataError",
    "DataSet",
    "Dataset",
    "DecodeError",
    "Field",
    "FieldNotFound",
    "FormatError",
    "PartitionError",
    "Schema",
    "concat",
    "merge",
    "mix",
    "open_dataset",
    "sample_data",
    "training",
]

_LAZY = {
    "DataSet": "matex_data.compat",
    "Dataset": "matex_data.dataset",
    "open_dataset": "matex_data.opening.open",
    "sample_data": "matex_data.samples",
    **dict.fromkeys(("concat", "merge", "mix"), "matex_data.combining"),
}
_MODULES = ("abc", "readers", "torch", "training")


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: MPI starts with the first dataset, TensorFlow when it is needed."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name in _MODULES:
        return import_module(f"matex_data.{name}")
    raise AttributeError(f"module 'matex_data' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return all public names, also of what is not imported yet."""
    return sorted({*globals(), *__all__, *_MODULES})
