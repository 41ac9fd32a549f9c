"""Index of ASE's databases (``.db``), whose rows SQLite reads. https://ase-lib.org/ase/db/db.html

Nothing in a file runs: the connection reads the columns of plain tables, and no views, triggers, functions or virtual
tables. ASE itself would make objects of what the texts of a row name.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from matex_data._types import Array, Integers
from matex_data.declared import declared
from matex_data.errors import DataError, FormatError
from matex_data.readers.atoms.frames import BLOCK_ROWS, FrameValues, LibraryFrames, frames_of, looked_at
from matex_data.readers.catalogue import Catalogue
from matex_data.storage.files import reading, undecodable

VERSIONS = range(5, 10)
TABLES = ("systems", "information", "sqlite_master")
VECTORS = ("positions", "momenta", "forces")  # three numbers for each atom
SCALARS = ("numbers", "tags", "initial_magmoms", "initial_charges", "masses", "magmoms", "charges")  # one for each atom
OF_FRAME: dict[str, tuple[int, ...]] = {"cell": (3, 3), "stress": (6,), "dipole": (3,)}
NUMBERS = ("energy", "free_energy", "magmom")
INTEGERS = ("numbers", "tags")  # stored as int32
OTHERS = ("pbc", "key_value_pairs", "data")
NOTHING = (None, "{}", "null")


def index(path: str) -> Catalogue:
    """Index a database. Rows evenly over the file tell the fields; those that other rows lack are missing there.

    The fields are those of extended XYZ; key-value pairs have their own names, what lies in ``data`` is "data.forces",
    for each atom if its length is the number of atoms in all rows.

    Raises
    ------
    FormatError : the file is damaged, being written, no database of ASE, or of a version that ASE has to convert.
    """
    try:
        with _opened(path) as connection:
            _check(path, connection)
            names = _columns(path, connection)
            ids = _ids(connection, os.stat(path).st_size)  # noqa: PTH116
            looked = ids[looked_at(len(ids))]
            rows = [row for number in looked.tolist() for row in _rows(connection, names, number, 1)]
        of_atoms = _of_atoms(rows)
        frames = [_values(row, of_atoms) for row in rows]
    except DataError:
        raise
    except Exception as error:  # of SQLite, NumPy and JSON
        with reading(path):
            Path(path).open("rb").close()  # SQLite does not say why it cannot open a file
        problem, expected = "the frames cannot be read", "a database of ASE"
        raise undecodable(FormatError, problem, path, error, expected=expected, remedy=None) from error
    if not frames:
        raise FormatError("the database has no rows", file=path)
    edges = np.append(np.arange(0, len(ids), BLOCK_ROWS), len(ids))
    mean_bytes = sum(sum(value.nbytes for value in one.of_atoms.values()) for one in frames) // len(frames)
    return frames_of(
        path,
        frames,
        lambda fields: DatabaseBlocks(path, edges, fields, mean_bytes, names, ids[edges[:-1]], of_atoms),
    )


@contextmanager
def _opened(path: str) -> Iterator[sqlite3.Connection]:
    """Open a database for reading; a value is no longer than the file."""
    uri = f"{Path(path).resolve().as_uri()}?mode=ro&immutable=1"
    with closing(sqlite3.connect(uri, uri=True)) as connection:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, os.stat(path).st_size)  # noqa: PTH116
        connection.set_authorizer(_allowed)
        yield connection


def _allowed(action: int, table: str | None, column: str | None, database: str | None, view: str | None) -> int:
    reads = action == sqlite3.SQLITE_READ and table in TABLES
    describes = action == sqlite3.SQLITE_PRAGMA and table == "table_xinfo"
    allowed = view is None and (reads or describes or action == sqlite3.SQLITE_SELECT)
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _check(path: str, connection: sqlite3.Connection) -> None:
    for end in ("-journal", "-wal"):
        if Path(path + end).exists() and os.stat(path + end).st_size:  # noqa: PTH116
            problem, remedy = "the database is being written, or its writer died", f'sqlite3 "{path}" .tables'
            raise FormatError(problem, file=path, found=path + end, remedy=f"wait, or complete it: {remedy}")
    roots = dict(connection.execute("SELECT name, rootpage FROM sqlite_master"))
    if not roots.get("systems") or not roots.get("information"):  # views and virtual tables have no page
        raise FormatError("the database has no table of ASE", file=path, expected="systems, information")
    found = dict(connection.execute("SELECT name, value FROM information"))
    if int(found["version"]) not in VERSIONS:
        remedy = f"python -m ase.db.convert {path}"
        expected = f"{VERSIONS[0]} to {VERSIONS[-1]}"
        raise FormatError(
            "the version is not read", file=path, expected=expected, found=found["version"], remedy=remedy
        )


def _columns(path: str, connection: sqlite3.Connection) -> list[str]:
    """Return the columns of a row that are fields, as far as this version has them."""
    known = (*VECTORS, *SCALARS, *OF_FRAME, *NUMBERS, *OTHERS)
    described = list(connection.execute("PRAGMA table_xinfo(systems)"))
    computed = [name for _, name, *_, hidden in described if hidden]
    if computed:  # by expressions of the file
        raise FormatError("the database has computed columns", file=path, expected="a database of ASE", found=computed)
    return [name for _, name, *_ in described if name in known]


def _ids(connection: sqlite3.Connection, size: int) -> Integers:
    """Return the ids of all rows, ascending; raise ``ValueError`` for a tree of pages that refers to itself."""
    found, last, cursor = [np.empty(0, np.int64)], -(1 << 63), connection.execute("SELECT id FROM systems ORDER BY id")
    while rows := cursor.fetchmany(4096):
        ids = np.array([number for (number,) in rows], np.int64)
        if ids[0] <= last or (np.diff(ids) <= 0).any() or len(found) * 4096 > size:
            raise ValueError("rows whose ids do not ascend")
        last = int(ids[-1])
        found.append(ids)
    return np.concatenate(found)


def _rows(connection: sqlite3.Connection, names: Sequence[str], first: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield the columns of some rows, with those of ``data`` decoded, by name; without those that are missing."""
    query = f"SELECT {', '.join(names)} FROM systems WHERE id >= ? ORDER BY id LIMIT ?"
    for values in connection.execute(query, (first, count)):
        row = {name: value for name, value in zip(names, values, strict=True) if value not in NOTHING}
        row["data"] = _data(row.get("data"))
        yield row


def _data(stored: Any) -> dict[str, Any]:
    """Return what ``data`` holds; arrays as arrays."""
    text = stored[int.from_bytes(stored[:8], "little") :] if isinstance(stored, bytes) else stored or "{}"
    found = json.loads(text)
    return {name: _array(value, stored) for name, value in found.items()} if isinstance(found, dict) else {}


def _array(value: Any, stored: Any) -> Any:
    """Return an array that JSON describes: its numbers stand beside it, or begin at a byte of what is stored."""
    if not isinstance(value, dict) or "__ndarray__" not in value:
        return value
    shape, name, numbers = value["__ndarray__"]
    dtype = np.dtype(str(name)).newbyteorder("<")
    if dtype.kind not in "biuf":
        return None
    if isinstance(numbers, list):
        return np.array(numbers, dtype).reshape(shape)
    count = int(np.prod([int(length) for length in shape], dtype=object)) if shape else 1
    return np.frombuffer(stored, dtype, count, numbers).reshape(shape).astype(dtype.newbyteorder("="))


def _of_atoms(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names of what ``data`` holds for each atom: arrays as long as there are atoms, in all rows."""
    names = dict.fromkeys(name for row in rows for name in row["data"])
    return tuple(
        name
        for name in names
        if all(np.shape(row["data"][name])[:1] == (len(row["numbers"]) // 4,) for row in rows if name in row["data"])
    )


def _values(row: Mapping[str, Any], of_atoms: Sequence[str]) -> FrameValues:
    """Return the values of a row; raise ``ValueError`` if it has no atoms, or arrays of other lengths."""

    def numbers(name: str, shape: tuple[int, ...]) -> Array:
        stored = np.frombuffer(row[name], "<i4" if name in INTEGERS else "<f8")
        return stored.astype(np.int64 if name in INTEGERS else np.float64).reshape(shape)

    arrays = {name: numbers(name, (-1, 3)) for name in VECTORS if name in row}
    arrays |= {name: numbers(name, (-1,)) for name in SCALARS if name in row}
    whole = {name: numbers(name, shape) for name, shape in OF_FRAME.items() if name in row}
    whole["pbc"] = np.array([int(row.get("pbc", 0)) & bit for bit in (1, 2, 4)], bool)
    whole |= {name: np.array(float(row[name])) for name in NUMBERS if name in row}
    notes = json.loads(row.get("key_value_pairs", "{}"))
    notes |= {f"data.{name}": value for name, value in row["data"].items()}
    for name, value in notes.items():
        if isinstance(value, str):
            whole.setdefault(name, np.array(value.encode(), object))
        elif (array := _numbers(value)) is not None:
            (arrays if name.removeprefix("data.") in of_atoms and array.ndim else whole).setdefault(name, array)
    if not {"numbers", "positions"} <= arrays.keys() or len({len(array) for array in arrays.values()}) != 1:
        raise ValueError(f"arrays of { ({name: len(array) for name, array in arrays.items()}) } atoms")
    return FrameValues(arrays, whole)


def _numbers(value: Any) -> Array | None:
    """Return numbers of JSON, or of an array; None for anything else."""
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return None
    return array if array.dtype.kind in "biuf" else None


@declared
@dataclass(frozen=True, eq=False)
class DatabaseBlocks(LibraryFrames):
    """Fields of rows of a database.

    Parameters
    ----------
    first : int64[blocks], id of the first row of each block.
    of_atoms : names of what ``data`` holds for each atom.
    """

    columns: Sequence[str]
    first: Integers
    of_atoms: tuple[str, ...]

    def frames(self, block: int) -> list[FrameValues]:
        count = int(self.edges[block + 1] - self.edges[block])
        with _opened(self.path) as connection:
            rows = list(_rows(connection, self.columns, int(self.first[block]), count))
        return [_values(row, self.of_atoms) for row in rows]
