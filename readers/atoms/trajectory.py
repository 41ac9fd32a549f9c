"""Index of ASE's trajectories (``.traj``): ASE reads each frame alone. https://ase-lib.org/ase/io/trajectory.html"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
from ase.io.trajectory import Trajectory

from matex_data.declared import declared
from matex_data.errors import FormatError
from matex_data.readers.atoms.frames import BLOCK_ROWS, FrameValues, LibraryFrames, frames_of, looked_at
from matex_data.readers.catalogue import Catalogue
from matex_data.storage.files import open_binary, undecodable

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
            frames = [FrameValues.of(trajectory[row]) for row in _examples(trajectory, rows)]
    except Exception as error:  # ASE raises errors of many kinds
        problem, expected = "the frames cannot be read", "a trajectory of ASE"
        raise undecodable(FormatError, problem, path, error, expected=expected, remedy=None) from error
    edges = np.append(np.arange(0, rows, BLOCK_ROWS), rows)
    return frames_of(
        path, frames, lambda fields: TrajectoryBlocks(path, edges, fields, 64 * len(frames[0].of_atoms["positions"]))
    )


def _examples(trajectory: Any, rows: int) -> list[int]:
    """Return the first and the last frame, and the first one of each list of properties and of the types of notes."""
    found: dict[Hashable, int] = {}
    for row in looked_at(rows):
        stored = trajectory.backend[row]
        results = stored.calculator.keys() if "calculator" in stored.keys() else ()  # noqa: SIM118 (no mapping)
        notes = frozenset((name, type(value)) for name, value in (stored.get("info") or {}).items())
        found.setdefault((frozenset(stored.keys()), frozenset(results), notes), row)
        if len(found) == EXAMPLES:
            break
    return list(dict.fromkeys((0, rows - 1, *found.values())))


@declared
@dataclass(frozen=True, eq=False)
class TrajectoryBlocks(LibraryFrames):
    """Fields of frames that ASE reads."""

    def frames(self, block: int) -> list[FrameValues]:
        with open_binary(self.path) as file, Trajectory(file) as trajectory:
            return [FrameValues.of(trajectory[row]) for row in range(*self.edges[block : block + 2].tolist())]
