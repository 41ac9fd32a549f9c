"""Fields of frames of atoms: those of each atom are ragged, those of a frame are dense.

Names and units are those of ASE, https://ase-lib.org/ase/units.html: positions in Angstrom, energies in eV.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
from ase import Atoms
from ase.io.extxyz import per_atom_properties

from matex_data._types import Array, Bytes
from matex_data.errors import DecodeError
from matex_data.fields import PARTLY_MISSING, Field
from matex_data.index.combined import exact, in_row, missing_value
from matex_data.index.decoded import SingleBlocks
from matex_data.index.model import Index
from matex_data.index.table import Outputs, Table
from matex_data.index.united import united
from matex_data.readers.catalogue import Catalogue, file_of_table
from matex_data.storage.files import undecodable

UNITS = {
    **dict.fromkeys(("positions", "cell"), "Angstrom"),
    **dict.fromkeys(("energy", "free_energy", "energies"), "eV"),
    "forces": "eV/Angstrom",
    "stress": "eV/Angstrom^3",
    "masses": "u",
    "dipole": "e Angstrom",
}


@dataclass(frozen=True)
class FrameValues:
    """Values of one frame.

    Parameters
    ----------
    of_atoms : [atoms, ...], by name.
    of_frame : of the frame as a whole; texts in UTF-8.
    """

    of_atoms: Mapping[str, Array]
    of_frame: Mapping[str, Array]

    @classmethod
    def of(cls, atoms: Atoms) -> FrameValues:
        """Return the arrays, the notes and the results of a frame that are numbers, and notes that are texts."""
        results = {} if atoms.calc is None else dict(atoms.calc.results)
        own = {name: np.asarray(value) for name, value in results.items() if name in per_atom_properties}
        arrays = {**atoms.arrays, **own}
        whole = {"cell": np.asarray(atoms.cell), "pbc": np.asarray(atoms.pbc)}
        notes = {**atoms.info, **{name: value for name, value in results.items() if name not in own}}
        whole |= {name: _plain(value) for name, value in notes.items() if value is not None and name not in arrays}
        return cls(
            {name: value for name, value in arrays.items() if value.dtype.kind in "biuf"},
            {name: value for name, value in whole.items() if value.dtype.kind in "biuf" or _is_text(value)},
        )


def _plain(value: Any) -> Array:
    if isinstance(value, str | bytes):
        return np.array(value.encode() if isinstance(value, str) else value, object)
    return np.asarray(value)


def _is_text(value: Array) -> bool:
    return not value.ndim and isinstance(value[()], bytes)


def frames_of(path: str, frames: Sequence[FrameValues], table: Callable[[Mapping[str, Field]], Table]) -> Catalogue:
    """Return the catalogue of the fields that any of some frames have; those that others lack are marked.

    Parameters
    ----------
    table : returns the table of the frames with chosen fields.
    """
    every = [_schema(values) for values in frames]
    known: dict[str, Field] = {}
    unread: dict[str, str] = {}
    for name in dict.fromkeys(name for schema in every for name in schema):
        having = {schema[name]: None for schema in every if name in schema}
        first: Field | None = next(iter(having))
        field = reduce(_united, having, first)
        if field is None:
            unread[name] = "frames differ in its type or shape: " + ", ".join(one.description for one in having)
        elif all(name in schema for schema in every):
            known[name] = field
        else:
            kind = np.dtype(np.float64) if field.dtype.kind in "biu" else field.dtype
            known[name] = replace(field, dtype=kind, attributes={**field.attributes, PARTLY_MISSING: True})

    def make(names: Sequence[str]) -> Index:
        fields = {name: known[name] for name in names}
        return file_of_table(path, fields, table(fields))

    return Catalogue(path, known, make, unread)


def _schema(values: FrameValues) -> dict[str, Field]:
    lists = {
        name: Field(name, (), array.dtype, True, _units(name), (None, *array.shape[1:]))
        for name, array in values.of_atoms.items()
    }
    arrays = {
        name: Field(name, value.shape, value.dtype, attributes=_units(name)) for name, value in values.of_frame.items()
    }
    return {**lists, **arrays}


def _united(first: Field | None, other: Field) -> Field | None:
    return None if first is None or first.ragged != other.ragged else united(first, other)


def _units(name: str) -> dict[str, Any]:
    return {"units": UNITS[name]} if name in UNITS else {}


def columns_of(path: str, row: int, frames: Sequence[FrameValues], fields: Mapping[str, Field]) -> dict[str, Array]:
    """Return the values of frames by field: [frames, ...], those of atoms as objects.

    Parameters
    ----------
    row : number of the first frame.

    Raises
    ------
    DecodeError : a frame lacks a field, has another kind of it, or an integer that its dtype does not hold.
    """
    return {name: _column(path, row, frames, field) for name, field in fields.items()}


def _column(path: str, row: int, every: Sequence[FrameValues], field: Field) -> Array:
    out = np.empty((len(every), *field.shape), object if field.ragged else field.dtype)
    for i, values in enumerate(every):
        value = (values.of_atoms if field.ragged else values.of_frame).get(field.name)
        value = _missing(values, field) if value is None else value
        shape = None if value is None else value.shape[1:] if field.ragged else value.shape
        expected = (field.inner or ())[1:] if field.ragged else field.shape
        if value is None or shape != expected or not np.can_cast(value.dtype, field.dtype, "safe"):
            raise DecodeError(
                "the frame lacks a field that others have, or has another kind of it",
                file=path,
                field=field.name,
                row=row + i,
                expected=field.description,
                found="nothing" if value is None else f"{value.dtype} of shape {value.shape}",
                remedy="leave it out of inputs= and targets=, or write it for all frames with one type and shape",
            )
        if value.dtype != field.dtype:
            kind = "integers up to 2**53, beside which others are missing or have fractions"
            flat = exact(value.ravel(), field, kind, in_row(row + i))
            value = flat.reshape(value.shape)
        out[i] = value[()]
    return out


def _missing(values: FrameValues, field: Field) -> Array | None:
    """Return missing values of a field for a frame that lacks it; None: its dtype has none."""
    if field.dtype.kind not in "fcO":
        return None
    shape = (len(values.of_atoms["positions"]), *field.element_shape) if field.ragged else field.shape
    return np.full(shape, missing_value(field.dtype), field.dtype)


BLOCK_ROWS = 16  # of files of which a library reads each frame alone
LOOKED_AT = 4096  # frames of such a file, evenly over it, whose properties are compared


def looked_at(rows: int) -> list[int]:
    """Return the numbers of the frames that tell the fields of a file."""
    return np.unique(np.linspace(0, rows - 1, LOOKED_AT, dtype=np.int64)).tolist() if rows else []


@dataclass(frozen=True, eq=False)
class LibraryFrames(SingleBlocks):
    """Fields of frames that a library reads, `BLOCK_ROWS` at a time. A subclass implements ``frames``.

    Parameters
    ----------
    frame_bytes : size of a frame in memory, about.
    """

    fields: Mapping[str, Field]
    frame_bytes: int

    @abstractmethod
    def frames(self, block: int) -> list[FrameValues]:
        """Read the frames of a block; whatever it raises says that they are damaged."""

    @property
    def width(self) -> int:  # type: ignore[override]
        return len(self.fields)

    def inner_bytes(self, name: str) -> int:
        return self.frame_bytes * self.rows if self.fields[name].ragged else 0

    def decoded_bytes(self, block: int, outs: Outputs) -> int:
        return self.frame_bytes * BLOCK_ROWS

    def decode(self, block: int, names: Sequence[str], _: Bytes) -> dict[str, Array]:
        start, stop = self.edges[block : block + 2].tolist()
        try:
            frames = self.frames(block)
            if len(frames) != stop - start:
                raise ValueError(f"{len(frames)} frames, not {stop - start}")
        except Exception as error:  # libraries raise errors of many kinds
            problem = "the frames cannot be read"  # of damage, or by a label that ASE does not know
            raise undecodable(DecodeError, problem, self.path, error, row=start, remedy=None) from error
        return columns_of(self.path, start, frames, {name: self.fields[name] for name in names})
