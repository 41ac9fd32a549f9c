"""An index as bytes: for a file that later jobs read, and for memory that the ranks of a machine share.

The bytes are columns behind a description in JSON, see `columns`. So an index of a million files is in memory as soon
as its bytes are mapped, in one copy for all processes that map them.
"""

from __future__ import annotations

import mmap
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from matex_data.errors import FormatError
from matex_data.fields import Field
from matex_data.index.columns import FAMILY, MAGIC, ColumnWriter, member, unpacked
from matex_data.index.descriptors import Origin, Separated, damaged, join, pickled_class, separate
from matex_data.index.files import FileColumns, columns_of
from matex_data.index.model import Index


def to_bytes(index: Index, key: str = "", of_job: bool = False) -> bytes:
    """Return an index as bytes.

    Parameters
    ----------
    index : of files.
    key : text that `from_bytes` returns with it.
    of_job : the bytes are for ranks of this job, for which what has no descriptor is pickled.

    Raises
    ------
    FormatError : a layout has no descriptor, unless ``of_job``.

    Examples
    --------
    >>> from matex_data.abc import Field, FileIndex, MemoryRows
    >>> from matex_data.index.descriptors import OF_JOB
    >>> layouts = {"t": MemoryRows(np.array([1.5, 2.5]))}
    >>> index = Index({"t": Field("t", (), np.dtype("f8"))}, [FileIndex("a.bin", 2, layouts)])
    >>> key, found = from_bytes(to_bytes(index, "of a.bin"), OF_JOB)
    >>> key, found.fields == index.fields, found.files[0].layouts["t"].values
    ('of a.bin', True, array([1.5, 2.5]))
    """
    files = columns_of(index.files)
    columns = ColumnWriter()
    rest = separate({"fields": index.fields, "static": index.static, "facts": index.facts})
    undescribed = None if of_job else pickled_class(rest.described) or files.undescribed_class
    if undescribed is not None:
        raise _not_storable(undescribed, files.paths[0])
    description = {
        "key": key,
        "descriptor": rest.described,
        "numbers": columns.add(np.array(rest.numbers, np.int64)),
        "arrays": [columns.add(array, fold=False) for array in rest.arrays],
        "files": files.to_json(columns),
    }
    return columns.packed(description)


def from_bytes(data: bytes | memoryview, origin: Origin) -> tuple[str, Index]:
    """Return the key and the index of bytes. Its arrays are views of them, and keep them in memory.

    Parameters
    ----------
    data : as `to_bytes` returns them.
    origin : of the bytes. Those of a rank of this job are not checked, and what has no descriptor is unpickled.

    Raises
    ------
    FormatError : the bytes are damaged, of another release, or refer to anything that is not declared.
    """
    description, columns = unpacked(data, origin.of_job)
    key, descriptor, numbers, arrays, files = member(description, "key", "descriptor", "numbers", "arrays", "files")
    if not isinstance(key, str) or not isinstance(arrays, list):
        raise damaged(f"the key {key!r:.100}")
    table = FileColumns.from_json(files, columns, origin)
    values = Separated(
        descriptor,
        columns.column(numbers, most_folded=1).tolist(),
        [columns.column(array) for array in arrays],
    )
    rest = join(values, "", origin)
    fields, static, facts = member(rest, "fields", "static", "facts")
    if not origin.of_job:
        _check(fields, static, facts, table)
    return key, Index(fields, table, static, facts)


def _check(fields: object, static: object, facts: object, files: FileColumns) -> None:
    """Raise ``FormatError`` unless these are parts of one index."""
    of_types = ((fields, Field), (static, np.ndarray | np.generic), (facts, str))
    for values, kind in of_types:
        if not isinstance(values, dict) or not all(isinstance(value, kind) for value in values.values()):
            raise damaged(f"{values!r:.100} instead of values of {kind} by name")
    assert isinstance(fields, Mapping)
    if len(files) and set(fields) != set(files.facts):
        raise damaged(f"the fields {sorted(fields)!r:.100} of files with {sorted(files.facts)!r:.100}")


def _not_storable(name: str, path: str) -> FormatError:
    return FormatError(
        f"the index cannot be stored, since {name} has no descriptor",
        file=path,
        expected="layouts with the methods to_json and from_json, or what matex_data.abc.declared declares",
        found=f"an object of {name}, which is shared by the ranks of a job only",
        remedy="leave out index=, or add the methods to this class",
    )


def save(path: str, data: bytes | memoryview) -> None:
    """Write bytes to a file, which other processes see as a whole or not at all.

    Raises
    ------
    OSError : the file cannot be written.
    """
    folder, name = os.path.split(os.path.abspath(path))  # noqa: PTH100
    beside = Path(folder, f".{name}.{secrets.token_hex(8)}")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def mapped(path: str) -> memoryview | None:
    """Return the bytes of a file, whose pages all processes of a machine share; None if there is no such file.

    Raises
    ------
    FormatError : the file is none of an index, is one of an earlier version, or cannot be read.
    """
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise _no_index(path, "a folder or a device")
        with Path(path).open("rb") as file:
            begin = file.read(len(MAGIC))
            if begin != MAGIC:
                raise (
                    _of_earlier_version(path)
                    if begin.startswith(FAMILY)
                    else _no_index(path, f"a file that begins with {begin!r}")
                )
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        if path:
            return None
        raise _no_index(path, "an empty name") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        raise FormatError(
            "the stored index cannot be read", file=path, found=error, remedy="give index= another name"
        ) from error


def _no_index(path: str, found: str) -> FormatError:
    return FormatError(
        "the file is no stored index, and is not replaced by one",
        file=path,
        expected="a new file, or one that index= of open_dataset has written",
        found=found,
        remedy="give index= another name",
    )


def _of_earlier_version(path: str) -> FormatError:
    return FormatError(
        "the stored index was written by an earlier version of matex_data, whose indexes are not read any more, since "
        "they could run programs",
        file=path,
        remedy="delete it: it is then made anew",
    )
