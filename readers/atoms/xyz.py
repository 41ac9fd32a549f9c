"""Index of (extended) XYZ: frames of atoms as text. Blocks of whole frames are byte ranges, which ASE parses.

A frame is a line with the number of atoms, a line of properties, and a line for each atom.
https://github.com/libAtoms/extxyz#extended-xyz-specification-and-parsing-tools
"""

from __future__ import annotations

import io
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import IO

import ase.io
from ase import Atoms

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.errors import DataError, DecodeError, FormatError
from matex_data.index.decoded import ByteRangeBlocks
from matex_data.readers.atoms.frames import FrameValues, columns_of, frames_of
from matex_data.readers.catalogue import Catalogue
from matex_data.readers.text.scan import Borders
from matex_data.readers.text.unpacked import content, of_content
from matex_data.storage.files import open_sequential, reading, undecodable

BLOCK_BYTES = 64 << 10  # of whole frames
MOST_COLUMNS = 10_000  # of frames without atoms
EXAMPLES = 64  # frames with other properties, which are looked at
_KEY = re.compile(rb"([A-Za-z_][\w-]*)\s*=\s*(\"?[-+]?\d+\"?(?!\S))?")  # and its value, if that is a whole number
_COLUMNS = re.compile(rb"Properties=\"?([^\"\s]+)")


def index(path: str) -> Catalogue:
    """Index a file of frames. One rank reads its lines.

    The first and the last block tell the fields, and the first frame of each list of properties, and of whole numbers
    among them. Fields that other frames lack are missing there: NaN, for each atom, or an empty text.

    "positions", "numbers" and other arrays of the atoms are ragged; "cell", "pbc", "energy" and other values are those
    of a frame.

    Raises
    ------
    FormatError : the file is truncated, or no XYZ.
    """
    try:
        with reading(path), open_sequential(path) as stored_file:
            file, stored = content(path, stored_file)
            examples: dict[Hashable, tuple[int, int]] = {}
            offset, nbytes, edges = _blocks(path, file, examples)
            frames = []
            ends = ((int(offset[block]), int(nbytes[block])) for block in (0, -1))
            for begin, count in dict.fromkeys((*ends, *examples.values())):
                file.seek(begin)
                frames += _parsed(file.read(count))
    except DataError:
        raise
    except Exception as error:
        problem, expected = "the frames cannot be read", "frames of extended XYZ"
        raise undecodable(FormatError, problem, path, error, expected=expected, remedy=None) from error
    return frames_of(
        path, frames, lambda fields: of_content(path, stored, FrameBlocks(path, edges, offset, nbytes, fields))
    )


def _blocks(
    path: str, file: IO[bytes], examples: dict[Hashable, tuple[int, int]]
) -> tuple[Integers, Integers, Integers]:
    """Return offset and length of the blocks of frames, and their first rows, with the number of rows. ``examples``:
    gets offset and length of the first frame of each list of properties, up to `EXAMPLES`.
    """
    borders, at = Borders(BLOCK_BYTES), 0
    while line := file.readline():
        if line.isspace() and borders.rows:  # behind the last frame
            at += len(line)
            continue
        try:
            atoms = int(line)
        except ValueError as error:
            raise _no_frame(path, at, "the number of atoms of a frame", repr(line[:40])) from error
        comment = file.readline()
        lengths = [len(other) for other in islice(file, max(0, atoms))]
        if atoms < 0 or not comment or len(lengths) < atoms:
            raise _no_frame(
                path, at, f"a line for each of {atoms} atoms", f"{len(lengths)} lines, and the end of the file"
            )
        if _columns(comment) > max(lengths, default=MOST_COLUMNS):  # ASE takes memory for all of them
            raise _no_frame(path, at, "no more columns than the lines have", f"Properties= of {_columns(comment)}")
        size = len(line) + len(comment) + sum(lengths)
        if len(examples) < EXAMPLES:
            examples.setdefault(_properties(comment), (at, size))
        at += size
        borders.add(at)
    if not borders.rows:
        raise _no_frame(path, 0, "a frame of atoms", "none")
    borders.close(at)
    return borders.blocks()


def _properties(comment: bytes) -> Hashable:
    """Return what is equal for frames with the same fields, of which the same have a whole number."""
    columns = _COLUMNS.search(comment)
    return frozenset((name, not whole) for name, whole in _KEY.findall(comment)), columns and columns[1]


def _columns(comment: bytes) -> int:
    """Return the number of columns of a frame, of which ``Properties=name:type:count:...`` tells."""
    found = _COLUMNS.search(comment)
    counts = found[1].split(b":")[2::3] if found else []
    return sum(int(count) for count in counts if count.isdigit())


def _no_frame(path: str, byte: int, expected: str, found: str) -> FormatError:
    return FormatError("the file is no XYZ, or truncated", file=path, byte=byte, expected=expected, found=found)


def _parsed(text: bytes) -> list[FrameValues]:
    # Otherwise ASE reads on one rank, and sends the frames to all others, which read others here.
    frames: list[Atoms] = ase.io.read(io.StringIO(text.decode()), index=":", format="extxyz", parallel=False)
    return [FrameValues.of(atoms) for atoms in frames]


@declared
@dataclass(frozen=True, eq=False)
class FrameBlocks(ByteRangeBlocks):
    """Fields of frames; a block is a range of whole frames."""

    def decode(self, block: int, names: Sequence[str], stored: Bytes) -> dict[str, Array]:
        row, rows = int(self.edges[block]), int(self.edges[block + 1] - self.edges[block])
        try:
            frames = _parsed(stored.tobytes())
            if len(frames) != rows:
                raise ValueError(f"{len(frames)} frames, not {rows}")
        except Exception as error:  # ASE raises errors of many kinds
            byte = int(self.offset[block])
            raise undecodable(DecodeError, "the frames do not parse", self.path, error, row=row, byte=byte) from error
        return columns_of(self.path, row, frames, {name: self.fields[name] for name in names})
