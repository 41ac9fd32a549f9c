"""Index of ASE's trajectories (``.traj``): ASE reads each frame alone. https://ase-lib.org/ase/io/trajectory.html"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from ase.io.trajectory import Trajectory

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.errors import DecodeError
from matex_data.fields import Field
from matex_data.index.decoded import DecodedBlocks, SelectedBlocks
from matex_data.index.model import EMPTY, ReadRequest
from matex_data.index.scatter import RowIndices
from matex_data.index.table import Outputs
from matex_data.readers.atoms.frames import assign, columns_of, frames_of, unreadable
from matex_data.readers.catalogue import Catalogue
from matex_data.storage.files import is_of_system, open_binary

BLOCK_ROWS = 16
LOOKED_AT = 4096  # frames whose properties are compared
EXAMPLES = 64  # frames with other properties


def index(path: str) -> Catalogue:
    """Index a trajectory. Frames evenly over the file tell the fields; those that other frames lack are missing there.

    Raises
    ------
    FormatError : the file is damaged, or has no frames.
    """
    try:
        with open_binary(path) as file, Trajectory(file) as trajectory:
            rows = len(trajectory)
            frames = [trajectory[row] for row in _examples(trajectory, rows)]
    except Exception as error:  # ASE raises errors of many kinds
        if is_of_system(error):
            raise
        raise unreadable(path, error, expected="a trajectory of ASE") from error
    edges = np.append(np.arange(0, rows, BLOCK_ROWS), rows)
    return frames_of(path, frames, lambda fields: TrajectoryBlocks(path, edges, fields, 64 * len(frames[0])))


def _examples(trajectory: Any, rows: int) -> list[int]:
    """Return the first and the last frame, and the first one of each list of properties."""
    found: dict[Hashable, int] = {}
    for row in np.unique(np.linspace(0, rows - 1, LOOKED_AT, dtype=np.int64)).tolist():
        stored = trajectory.backend[row]
        results = stored.calculator.keys() if "calculator" in stored.keys() else ()  # noqa: SIM118 (no mapping)
        found.setdefault((frozenset(stored.keys()), frozenset(results), frozenset(stored.get("info") or ())), row)
        if len(found) == EXAMPLES:
            break
    return list(dict.fromkeys((0, rows - 1, *found.values())))


@declared
@dataclass(frozen=True, eq=False)
class TrajectoryBlocks(DecodedBlocks):
    """Fields of frames that ASE reads.

    Parameters
    ----------
    fields : by name.
    frame_bytes : size of a frame in memory, about.
    """

    fields: Mapping[str, Field]
    frame_bytes: int

    @property
    def width(self) -> int:  # type: ignore[override]
        return len(self.fields)

    def inner_bytes(self, name: str) -> int:
        return self.frame_bytes * self.rows if self.fields[name].ragged else 0

    def decoded_bytes(self, block: int, outs: Outputs) -> int:
        return self.frame_bytes * BLOCK_ROWS

    def key(self, block: int, outs: Outputs) -> tuple[Any, ...]:
        return self, block, tuple(name for name, _ in outs)

    def block_requests(self, selection: SelectedBlocks, positions: Integers) -> Iterator[ReadRequest]:
        for i in positions.tolist():
            yield ReadRequest(EMPTY, EMPTY, on_complete=partial(self._decode, selection, i))

    def copy_rows(self, name: str, block: Any, rows: RowIndices, out: Array, destination: RowIndices) -> None:
        assign(block[name], rows, out, destination)

    def _decode(self, selection: SelectedBlocks, i: int, _: Bytes) -> None:
        self.decode_block(selection, i, self._read)

    def _read(self, block: int, names: Sequence[str]) -> dict[str, Array]:
        """Read the fields of the frames of a block."""
        start, stop = self.edges[block : block + 2].tolist()
        try:
            with open_binary(self.path) as file, Trajectory(file) as trajectory:
                frames = [trajectory[row] for row in range(start, stop)]
        except Exception as error:  # ASE raises errors of many kinds
            raise DecodeError("the frames cannot be read", file=self.path, row=start, found=error) from error
        return columns_of(self.path, start, frames, {name: self.fields[name] for name in names})
