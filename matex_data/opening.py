"""``open_dataset``: find the files, let each be indexed by one rank, and tell all ranks."""

from __future__ import annotations

import glob
import inspect
import os
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matex_data.dataset import Dataset
from matex_data.errors import DataError, FormatError, PartitionError, near_matches
from matex_data.fields import ElementSpec, Names, as_list
from matex_data.index.model import Index, concatenate
from matex_data.io.ranks import MpiRanks
from matex_data.io.sessions import read_sessions
from matex_data.mpi.communicator import Communicator, pickle_error
from matex_data.pipeline.source import Source
from matex_data.readers import HEAD_BYTES, collective_reader, detect, has_known_name, reader
from matex_data.transforms.missing import Missing, check, complete_samples, read_names, treated
from matex_data.transforms.stack import stack_fields
from matex_data.transforms.windows import sliding_windows

if TYPE_CHECKING:
    from mpi4py import MPI

WINDOW_BYTES = 128 << 20
STACKED = "inputs"  # name of the field that stack=True makes

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def open_dataset(
    paths: Paths,
    *,
    format: str | None = None,
    inputs: Names = None,
    targets: Names = None,
    comm: MPI.Intracomm | None = None,
    stack: bool = False,
    window: int | None = None,
    stride: int = 1,
    horizon: int | None = None,
    io: str = "auto",
    window_bytes: int = WINDOW_BYTES,
    block_bytes: int | None = None,
    global_reads: str = "memory",
    cache: str | None = None,
    missing: Missing = "nan",
    **options: Any,
) -> Dataset:
    """Open files of one schema as one data set. *Collective*.

    Each file is looked at by one rank; every rank gets the result, or the error.

    Parameters
    ----------
    paths : a path, a glob, a directory, or a list of these. The order is that of the sorted names, file2
        before file10.
    format : "hdf5", ...; None: told by the first bytes of the files, then by their suffix.
    inputs, targets : a field name or a list of names. Neither: elements are dicts of all fields. Only inputs: x.
        Both: (x, y). A list gives a dict by name.
    comm : whose ranks share the data; None: all.
    stack : ``inputs`` is a list of numeric fields of one shape, and x is one array of them side by side,
        (samples, fields, ...), the field "inputs".
    window : each sample is that many consecutive samples of one file, (window, ...); the next one begins ``stride``
        further on. With ``horizon`` or ``targets`` the target is the ``horizon`` (default: 1) samples behind the
        window, (horizon, ...), of the inputs themselves unless ``targets`` says otherwise.
    io : "collective": all ranks enter every read together; "independent": each reads on its own; "auto": the
        former, unless there are many files or a single rank.
    window_bytes : what is shuffled together at most, in bytes over all ranks. Part of the shuffled order.
    block_bytes : neighbours that are read and shuffled as one, in bytes, where rows can be read one by one or chunks
        are smaller: larger blocks for file systems that read them better, at the cost of a worse shuffle. Part of the
        shuffled order. None: 64 to 256 KiB, as many as the batch size asks for; less in small files.
    global_reads : how samples come with ``shuffle="global"``. "memory": each rank reads its share of the samples once
        and keeps it, and the ranks exchange them. "rows": each rank reads its samples one by one in every epoch, for
        rows of fixed size that do not fit into the memory.
    cache : "memory": each rank reads its share once and keeps it; the share stays the same in all epochs and is
        shuffled as a whole. None: read again in every epoch.
    missing : what becomes of missing numbers, which are not-a-number. "nan": they stay. A number: it takes their
        places. "mask": 0 does, and the field ``<name>_mask`` is True there. "drop": samples with any are left out,
        which takes a pass over the data now.
    options : of the format's reader.

    Raises
    ------
    FieldNotFound : a field is not there.
    FormatError : a file is not what it should be, or the files do not fit together.
    DataError : there is no such file, or it cannot be read.
    PartitionError : another rank does not come within ``MATEX_TIMEOUT`` seconds.
    """
    check(missing)
    elements = ElementSpec(inputs, targets)
    opened = read_sessions(comm)
    files = _found(
        opened.comm,
        paths,
        f"{inputs=}, {targets=}, {format=}, {stack=}, {window=}, {stride=}, "
        f"{horizon=}, {io=}, {window_bytes=}, {block_bytes=}, {global_reads=}, {cache=}, {missing=}, {options=}",
    )
    made = [STACKED] if stack else []
    index = _indexed(opened.comm, files, format, read_names(elements.names, missing, *made), options)
    if stack:
        index = stack_fields(index, as_list(inputs), STACKED, read_names(as_list(targets), missing, *made) or [])
        elements = ElementSpec(STACKED, targets)
    if window is not None:
        index, ahead = sliding_windows(index, elements.inputs, targets, window, stride, horizon)
        elements = ElementSpec(elements.inputs, ahead)
    treated_index = treated(index, missing, elements.names)
    source = Source(opened, treated_index, io, window_bytes, cache, block_bytes, global_reads)
    return Dataset(source, elements, complete_samples(source) if missing == "drop" else None)


def _found(comm: Communicator, paths: Paths, asked: str) -> list[str]:
    """Return the files that are meant; rank 0 looks, so that a thousand ranks do not. *Collective*.

    Parameters
    ----------
    asked : all other arguments, which have to be the same on all ranks.

    Raises
    ------
    DataError : there are no such files.
    PartitionError : the ranks do not ask for the same.
    """
    files: list[str] = []
    error: DataError | None = None
    if comm.rank == 0:
        try:
            files = expand(paths)
        except DataError as missing:
            error = missing
    comm.agree(error)
    found, of_rank_0 = comm.broadcast((files, asked))
    unlike: PartitionError | None = None
    if asked != of_rank_0:
        unlike = PartitionError(
            "the ranks do not open the same data set",
            expected=f"as on rank 0: {of_rank_0}",
            found=f"on rank {comm.rank}: {asked}",
            remedy="call open_dataset with the same arguments on every rank",
        )
    comm.agree(unlike)
    return list(found)


def expand(paths: Paths) -> list[str]:
    """The files that a path, a glob, a directory or a list of these stands for, sorted within each.

    Raises
    ------
    DataError : there are none.
    """
    if isinstance(paths, str | os.PathLike):
        return _expand_one(os.fspath(paths))
    files = [file for path in paths for file in _expand_one(os.fspath(path))]
    if not files:
        raise DataError("no files were named", expected="at least one path", found=paths)
    return files


def _expand_one(path: str) -> list[str]:
    place = Path(path)
    if place.is_file():
        return [path]
    if place.is_dir():
        files = [str(file) for file in place.iterdir() if file.is_file() and not file.name.startswith(".")]
        files = [file for file in files if has_known_name(file)] or files
    else:
        files = [file for file in glob.glob(path, recursive=True) if Path(file).is_file()]  # noqa: PTH207 (absolute too)
    if files:
        return sorted(files, key=_natural)
    beside = [p.name for p in place.parent.iterdir()] if place.parent.is_dir() else []
    raise DataError(
        "there is no such file" if not place.is_dir() else "the directory holds no files",
        file=path,
        found=f"beside it: {near_matches(place.name, beside)}" if beside else f"no directory {str(place.parent)!r}",
        remedy="check the path; relative ones begin at the working directory",
    )


def _natural(path: str) -> tuple[list[tuple[int, str]], str]:
    """Sorts by name with numbers by their value: file2 before file10. The path itself decides where that is equal."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", path)], path


def _indexed(
    comm: Communicator, files: list[str], format: str | None, names: list[str] | None, options: dict[str, Any]
) -> Index:
    """The index of all files: they are dealt out, and the results gathered. *Collective*."""
    told = _format_of(comm, files[0], format)
    function = collective_reader(told)
    if function is not None:
        ranks = MpiRanks(comm)
        try:
            return function(files, names, ranks, **options)
        finally:
            ranks.close()
    own: list[tuple[int, Index | bytes | None]] = []
    for number in range(comm.rank, len(files), comm.size):
        try:
            kind = format if number else told
            own.append((number, _index_of(files[number], kind, names, options, static=number == 0)))
        except Exception as error:  # whatever it is, every rank has to raise it
            if comm.size == 1:
                raise
            own.append((number, pickle_error(error)))
            break
    gathered = comm.allgather(own)
    indexes: list[Index] = []
    for _, result in sorted((entry for part in gathered for entry in part), key=lambda entry: entry[0]):
        if not isinstance(result, Index):
            raise pickle.loads(result or b"")
        indexes.append(result)
    return concatenate(indexes)


def _format_of(comm: Communicator, path: str, format: str | None) -> str:
    """The format that is meant, or that rank 0 finds. *Collective*."""
    if format is not None:
        return format
    found, error = "", None
    if comm.rank == 0:
        try:
            found = detect(path, _head(path))
        except DataError as failure:
            error = failure
    comm.agree(error)
    return str(comm.broadcast(found))


def _head(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError as error:
        raise DataError("the file cannot be read", file=path, found=error) from error


def _index_of(path: str, format: str | None, names: list[str] | None, options: dict[str, Any], static: bool) -> Index:
    """Index one file; ``static``: with its data that belongs to no sample, as the first file of a data set."""
    chosen = reader(format or detect(path, _head(path)))
    if not static and "static" in inspect.signature(chosen).parameters:
        options = {**options, "static": False}
    index = chosen(path, names, **options)
    if not static:
        index.static = {}
    size = Path(path).stat().st_size
    for name in index.fields:
        for file_index in index.files:
            end = file_index.layouts[name].end()
            if file_index.path == path and end > size:
                raise FormatError(
                    "the file is truncated",
                    file=path,
                    field=name,
                    byte=size,
                    expected=f"{end} bytes",
                    found=f"{size} bytes",
                    remedy="copy it again from its source",
                )
    return index
