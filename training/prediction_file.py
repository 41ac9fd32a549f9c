"""Predictions in one file: each rank writes a part while it predicts, and rank 0 joins the parts in order of the ranks.

Memory is bounded by a window of samples, and nothing goes over the network.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from matex_data._types import Array
from matex_data.errors import DataError, PartitionError
from matex_data.mpi.activity import busy
from matex_data.mpi.communicator import Communicator, Equal
from matex_data.mpi.processes import remove_unfinished, unfinished_name

Columns = dict[str, Array]

SUFFIXES = (".csv", ".h5", ".parquet")
JOINED_BYTES = 1 << 26
"""Bytes that are written at once, about: row groups of Parquet have as many."""


def write_predictions(
    comm: Communicator,
    target: str | os.PathLike[str],
    ids: Columns,
    windows: Iterable[Any],
    check: Callable[[], None],
) -> None:
    """Write outputs, beside other fields of the same samples, to a file that replaces another one whole. *Collective*.

    Parameters
    ----------
    target : path that ends in ``.csv``, ``.h5`` or ``.parquet``, in a folder that all ranks see.
    ids : fields of this rank's samples.
    check : raises an error, on all ranks, if the outputs are not to be written.

    Raises
    ------
    PartitionError : on all ranks, if the path or the outputs do not fit a file.
    DataError : on all ranks, if the file cannot be written.
    """
    path = Path(target).resolve()
    equal = Equal({"to": str(path), "fields": list(ids)}, "the ranks write other files", "give all ranks the same to=")
    comm.agreed(lambda: _check_target(path, ids), equal)
    job = comm.on_root(lambda: _written(path, lambda: _job(path)))
    drafts = [path.with_name(f"{job}{name}") for name in ("whole", *range(comm.size))]
    own = drafts[1 + comm.rank]
    try:
        with comm.agreed(lambda: _written(path, lambda: own.open("wb"))) as stream:
            rows, texts, failure = _write_part(path, stream, ids, windows)
        check()
        comm.agree(failure)
        total = sum(comm.allgather(rows))
        with busy("joining the predictions of all ranks") if comm.rank == 0 else contextlib.nullcontext():
            comm.on_root(lambda: _written(path, lambda: _join(path, drafts, texts, total)))
    finally:
        for draft in {own, drafts[0] if comm.rank == 0 else own}:
            draft.unlink(missing_ok=True)


def _job(path: Path) -> str:
    """Return the begin of the names of the drafts of this job; remove those of killed ones."""
    remove_unfinished(path.parent, f".{path.name}.")
    return unfinished_name(f".{path.name}.")


def _check_target(path: Path, ids: Columns) -> None:
    """Raise ``PartitionError`` unless a file of this name, with these fields, can be written."""
    if path.suffix not in SUFFIXES:
        raise PartitionError(
            "predictions are not written to files of this kind",
            file=str(path),
            expected=f"a name that ends in {', '.join(SUFFIXES)}",
            remedy="take the outputs that predict returns without to=, and write them yourself",
        )
    if path.suffix != ".h5":
        _written(path, lambda: import_module("pyarrow"))
    for name, values in ids.items():
        if values.dtype == object and not all(isinstance(value, bytes) for value in values):
            raise _unfit(path, name, "values of variable length")


def _unfit(path: Path, name: str, found: str) -> PartitionError:
    return PartitionError(
        "predictions are written as columns of numbers and text",
        file=str(path),
        field=name,
        expected="numbers or text, in tables at most one axis beside that of the samples",
        found=found,
        remedy="write arrays of more axes to .h5; leave out fields of variable length; give outputs dtype float32",
    )


def _written(path: Path, write: Callable[[], Any]) -> Any:
    """Return what a function returns that writes; raise ``DataError`` in place of its errors."""
    try:
        return write()
    except Exception as error:
        raise _unwritten(path, error) from error


def _unwritten(path: Path, error: Exception) -> DataError:
    needs = "install pyarrow, or write .h5" if isinstance(error, ImportError) else "give another path, or write .h5"
    return DataError(
        "the predictions cannot be written",
        file=str(path),
        expected="a folder that all ranks see and can write to, with free space; in tables, text in UTF-8",
        found=f"{type(error).__name__}: {error}",
        remedy=needs,
    )


def _write_part(
    path: Path, stream: BufferedWriter, ids: Columns, windows: Iterable[Any]
) -> tuple[int, dict[str, bool], DataError | None]:
    """Write the columns of this rank; after an error, go on predicting, since other ranks may need its reads.

    Returns
    -------
    rows, texts, failure : number of rows, whether each column has text, and the error.
    """
    rows, texts, failure = 0, {}, None
    for outputs in windows:
        predicted = _predicted(outputs)
        begin, rows = rows, rows + len(next(iter(predicted.values())))
        columns = {**{name: values[begin:rows] for name, values in ids.items()}, **predicted}
        _check(path, columns, [*ids, *predicted])
        texts = {name: values.dtype == object for name, values in columns.items()}
        try:
            if failure is None:
                for values in columns.values():
                    _save(stream, values)
                stream.flush()
        except Exception as error:
            failure = _unwritten(path, error)
    if any(len(values) != rows for values in ids.values()):
        failure = failure or DataError("the fields have other samples than the predictions", file=str(path))
    return rows, texts, failure


def _predicted(outputs: Any) -> dict[str, Any]:
    """Return outputs by the names of their columns.

    Examples
    --------
    >>> list(_predicted(np.zeros(2))), list(_predicted([np.zeros(2), np.zeros(2)]))
    (['prediction'], ['prediction_0', 'prediction_1'])
    """
    if isinstance(outputs, dict):
        return outputs
    if isinstance(outputs, list | tuple):
        return {f"prediction_{i}": output for i, output in enumerate(outputs)}
    return {"prediction": outputs}


def _check(path: Path, columns: dict[str, Any], names: list[str]) -> None:
    """Raise ``PartitionError``, the same on all ranks, unless the columns fit a file."""
    most = None if path.suffix == ".h5" else 2
    for name, values in columns.items():
        if not isinstance(values, np.ndarray):
            raise _unfit(path, name, type(values).__name__)
        if values.dtype.kind not in "biufO" or (most and values.ndim > most):
            raise _unfit(path, name, f"{values.dtype} of shape {values.shape[1:]}")
    flat = names if most is None else [name for values in columns.items() for name in _numbered(*values)]
    twice = sorted({name for name in flat if flat.count(name) > 1} | {n for n in names if names.count(n) > 1})
    if twice:
        raise PartitionError(
            "two columns would have one name",
            file=str(path),
            found=", ".join(twice),
            remedy="leave the field out of fields=, or name the outputs of the model, which may be a dict",
        )


def _save(stream: BufferedWriter, values: Array) -> None:
    """Write an array; of text, lengths and bytes."""
    if values.dtype == object:
        np.save(stream, np.array([len(text) for text in values], np.int64))
        values = np.frombuffer(b"".join(values), np.uint8)
    np.save(stream, values, allow_pickle=False)


def _load(stream: BufferedReader, text: bool) -> Array:
    """Read what ``_save`` has written."""
    values: Array = np.load(stream, allow_pickle=False)
    if not text:
        return values
    content, ends = np.load(stream, allow_pickle=False).tobytes(), np.cumsum(values).tolist()
    texts = np.empty(len(values), object)
    texts[:] = [content[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    return texts


def _join(path: Path, drafts: list[Path], texts: dict[str, bool], rows: int) -> None:
    """Write the file from the parts of all ranks."""
    whole, *parts = drafts
    with (_hdf5 if path.suffix == ".h5" else _table)(whole, path.suffix, rows) as add:
        for columns in _chunks(parts, texts):
            add(columns)
    whole.replace(path)


def _chunks(parts: list[Path], texts: dict[str, bool]) -> Iterator[Columns]:
    """Yield the columns of all parts, many windows at a time."""
    held: list[Columns] = []
    nbytes = 0
    for part in parts:
        with part.open("rb") as stream:
            while stream.peek(1):
                begin = stream.tell()
                held.append({name: _load(stream, text) for name, text in texts.items()})
                nbytes += stream.tell() - begin
                if nbytes > JOINED_BYTES:
                    yield _concatenated(held)
                    held, nbytes = [], 0
    if held:
        yield _concatenated(held)


def _concatenated(held: list[Columns]) -> Columns:
    return {name: np.concatenate([columns[name] for columns in held]) for name in held[0]}


@contextlib.contextmanager
def _hdf5(path: Path, suffix: str, rows: int) -> Iterator[Callable[[Columns], None]]:
    """Context manager: function that writes rows to arrays of HDF5."""
    end = 0
    with h5py.File(path, "w") as file:

        def add(columns: Columns) -> None:
            nonlocal end
            begin, end = end, end + len(next(iter(columns.values())))
            for name, values in columns.items():
                if name not in file:
                    dtype = h5py.string_dtype() if values.dtype == object else values.dtype
                    file.create_dataset(name, (rows, *values.shape[1:]), dtype)
                file[name][begin:end] = values

        yield add


@contextlib.contextmanager
def _table(path: Path, suffix: str, rows: int) -> Iterator[Callable[[Columns], None]]:
    """Context manager: function that writes rows to Parquet or CSV."""
    import pyarrow
    from pyarrow import csv, parquet

    make = parquet.ParquetWriter if suffix == ".parquet" else csv.CSVWriter
    with contextlib.ExitStack() as stack:
        writer: Any = None

        def add(columns: Columns) -> None:
            nonlocal writer
            flat = {name: values for column in columns.items() for name, values in _numbered(*column).items()}
            types = {name: pyarrow.string() if values.dtype == object else None for name, values in flat.items()}
            table = pyarrow.table({name: pyarrow.array(values, types[name]) for name, values in flat.items()})
            writer = writer or stack.enter_context(make(str(path), table.schema))
            writer.write_table(table)

        yield add


def _numbered(name: str, values: Array) -> Columns:
    """Return the columns of a table: an array of more than one number for each sample has one for each of them.

    Examples
    --------
    >>> list(_numbered("p", np.zeros((2, 1)))), list(_numbered("p", np.zeros((2, 3))))
    (['p'], ['p_0', 'p_1', 'p_2'])
    """
    if values.ndim == 1 or values.shape[1] == 1:
        return {name: values.reshape(len(values))}
    return {f"{name}_{i}": values[:, i] for i in range(values.shape[1])}
