"""Patches of libraries that open files in C, C++ or Rust, where those of Python's functions do not reach."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from matex_data.training.launcher.imports import after_import
from matex_data.training.launcher.openers import changing, kind_of, opening
from matex_data.training.launcher.overlay import Overlay
from matex_data.training.replacements import patch

Kind = Callable[..., str | None]
"""As for ``opening``."""


def _whole(*_: Any, filesystem: Any = None, **__: Any) -> str | None:
    return "replace" if filesystem is None else None


def _loaded(*_: Any, filesystem: Any = None, **__: Any) -> str | None:
    return "load" if filesystem is None else None


def _by_mode(at: int) -> Kind:
    """Return the kind of a function that gets a file, and then its mode."""

    def kind(*given: Any, mode: str = "r", **_: Any) -> str:
        mode = given[at + 1] if len(given) > at + 1 else mode
        return "change" if mode == "a" else kind_of(mode) or "load"

    return kind


def _of_duckdb(database: Any = "", read_only: bool = False, *_: Any, **__: Any) -> str | None:
    if ":" in os.fspath(database) or not database:  # in memory, or of a service
        return None
    return "load" if read_only else "change"


LOCKED = 3.0
"""Seconds for which a lock of DuckDB may be another rank's."""
POLARS = "parquet", "csv", "ipc", "ndjson"
"""Formats of its files."""
TABLE: dict[str, list[tuple[str, Kind, list[str]]]] = {
    "pyarrow": [("memory_map", _by_mode(0), ["path"])],
    "pyarrow.csv": [("write_csv", _whole, ["data", "output_file"]), ("read_csv", _loaded, ["input_file"])],
    "pyarrow.dataset": [("dataset", _loaded, ["source"])],
    "pyarrow.feather": [("write_feather", _whole, ["df", "dest"]), ("read_table", _loaded, ["source"])],
    "pyarrow.ipc": [("new_file", _whole, ["sink"]), ("new_stream", _whole, ["sink"])],
    "pyarrow.json": [("read_json", _loaded, ["input_file"])],
    "pyarrow.orc": [("write_table", _whole, ["table", "where"]), ("ORCFile.__init__", _loaded, ["self", "source"])],
    "pyarrow.parquet": [
        ("ParquetWriter.__init__", _whole, ["self", "where"]),
        ("read_table", _loaded, ["source"]),
        ("ParquetDataset.__init__", _loaded, ["self", "path_or_paths"]),
        ("ParquetFile.__init__", _loaded, ["self", "source"]),
    ],
    "polars": [
        *((f"DataFrame.write_{kind}", _whole, ["self", "file"]) for kind in POLARS),
        *((f"{how}_{kind}", _loaded, ["source"]) for kind in POLARS for how in ("read", "scan")),
    ],
    "tables": [("File.__init__", _by_mode(1), ["self", "filename"])],
    "torch": [("save", _whole, ["obj", "f"]), ("load", _loaded, ["f"])],
    **{
        f"safetensors.{kind}": [
            ("save_file", _whole, ["tensor_dict" if kind == "numpy" else "tensors", "filename"]),
            ("load_file", _loaded, ["filename"]),
        ]
        for kind in ("numpy", "tensorflow", "torch")
    },
    "duckdb": [("connect", _of_duckdb, ["database"])],
    "rasterio": [("open", _by_mode(0), ["fp"])],
    "cv2": [("imwrite", _whole, ["filename"]), ("imread", _loaded, ["filename"])],
}
"""Functions, by the module in which scripts find them: how they open a file, and their first parameters up to it."""


def patch_native_openers(files: Overlay) -> None:
    """Patch the functions of the table, once their libraries are imported."""
    for name in TABLE:
        after_import((name,), functools.partial(_patch, files, name))
    after_import(("ase.parallel",), _write_as_one_process)
    if files.rank > 0:
        after_import(("wandb",), functools.partial(_track_on_rank_0, files))


def _write_as_one_process() -> None:
    """Let ASE write files on all ranks: since mpi4py is imported, it would on rank 0 alone."""
    parallel = sys.modules["ase.parallel"]
    parallel.world.comm = parallel.DummyMPI()


def _track_on_rank_0(files: Overlay) -> None:
    """Let runs of Weights & Biases on this rank record nothing: they would be further runs, of other processes."""

    def begin(original: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **(kwargs | ({"mode": "disabled"} if files.root.is_shared() else {})))

    patch(sys.modules["wandb"], begin, "init")


def _patch(files: Overlay, name: str) -> None:
    module = sys.modules[name]
    if name == "duckdb":
        patch(module, _connect, "connect")
    for dotted, kind, parameters in TABLE[name]:
        owner, _, function = dotted.rpartition(".")
        holder = getattr(module, owner, None) if owner else module
        if hasattr(holder, function):  # not in all versions
            patch(holder, opening(files, kind, *parameters), function)
    if name == "pyarrow.dataset":
        patch(module, changing(files, "change", "data", "base_dir"), "write_dataset")
    if name == "pyarrow":
        module.OSFile = _os_file(files, module.OSFile)  # type: ignore[attr-defined]


def _connect(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Connect to a database of DuckDB, whose lock a rank may hold that has yet to see that rank 0 has gone on."""
    end = time.monotonic() + LOCKED
    while True:
        try:
            return original(*args, **kwargs)
        except sys.modules["duckdb"].IOException:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _os_file(files: Overlay, original: Any) -> Any:
    create = opening(files, _by_mode(1), "cls", "path")

    class OSFile(original):  # type: ignore[misc]  # a type of C, whose methods cannot be replaced
        """File of pyarrow that rank 0 alone writes."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return create(original.__new__, cls, *args, **kwargs)

    OSFile.__module__, OSFile.__qualname__ = original.__module__, original.__qualname__
    return OSFile
