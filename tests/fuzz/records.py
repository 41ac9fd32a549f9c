"""MATLAB files, JSON Lines, TFRecord and frames of atoms to damage; tests of each format compare undamaged values.

They are written by a process of its own, ``python -m tests.fuzz.records FORMAT FOLDER``: TensorFlow and ASE, which
write them, must not be loaded where others fork.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROWS = 20


def _matlab(folder: Path) -> None:
    """Write files of versions 4 and 5, with numbers, texts, structures and cells."""
    import scipy.io

    plain = {"x": np.random.default_rng(0).normal(size=(ROWS, 3)), "n": np.arange(ROWS, dtype="i2")[:, None]}
    nested = {"s": {"a": np.arange(4.0), "b": "text"}, "c": np.array([np.arange(3), np.arange(5)], object)}
    scipy.io.savemat(folder / "own_4.mat", plain, format="4")
    scipy.io.savemat(folder / "own_5.mat", {**plain, **nested})
    scipy.io.savemat(folder / "own_5_packed.mat", {**plain, **nested}, do_compression=True)


def _lines(folder: Path) -> None:
    """Write JSON Lines with numbers, texts, lists, objects, times and missing values, compressed and not."""
    rows: list[dict[str, Any]] = []
    for i in range(ROWS):
        nested = {"l": [i] * (i % 4), "o": {"a": i, "b": [[1, i]]}}
        plain = {"n": i, "x": i / 7, "t": f"text {i}", "d": "2020-01-01T00:00:01", "m": i if i % 3 else None}
        rows.append({**plain, **nested})
    content = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    (folder / "own.jsonl").write_bytes(content)
    (folder / "own.jsonl.gz").write_bytes(gzip.compress(content, mtime=0))


def _records(folder: Path) -> None:
    """Write examples and sequences of TensorFlow."""
    from tests.readers import test_tfrecord

    test_tfrecord.write(folder / "own.tfrecord", ROWS)
    test_tfrecord.write_sequences(folder / "own_sequences.tfrecord", ROWS)


def _frames(suffix: str, folder: Path) -> None:
    """Write frames of atoms by ASE."""
    import ase.io

    from tests.readers import test_atoms

    if suffix == ".db":
        test_atoms.write_database(folder / "own.db", test_atoms.frames(4))
    else:
        ase.io.write(folder / f"own{suffix}", test_atoms.frames(ROWS))


KINDS: dict[str, Callable[[Path], None]] = {
    "matlab": _matlab,
    "jsonl": _lines,
    "tfrecord": _records,
    "xyz": partial(_frames, ".xyz"),
    "traj": partial(_frames, ".traj"),
    "asedb": partial(_frames, ".db"),
}


def _written(name: str, folder: Path) -> list[Path]:
    """Return the files of a format, which a process of its own writes."""
    subprocess.run([sys.executable, "-m", __name__, name, str(folder)], check=True, capture_output=True)
    return sorted(folder.iterdir())


WRITERS = {name: partial(_written, name) for name in KINDS}


def loaded(path: Path) -> dict[str, Any]:
    """Return nothing to compare."""
    return {}


if __name__ == "__main__":
    KINDS[sys.argv[1]](Path(sys.argv[2]))
