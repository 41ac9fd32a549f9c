"""Write the handwritten digits that come with scikit-learn to several HDF5 files: small, real, and the same each time.

The digits are those of the "Optical Recognition of Handwritten Digits" data set of the UCI repository (1,797 of them).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

HERE = Path(__file__).resolve().parent
LENGTHS = (700, 461, 333, 303)
"""Samples of each file: unequal, and no multiple of a chunk, as files of experiments are."""
CHUNK_ROWS = 16


def write_digits(out: Path) -> list[Path]:
    """Files ``digits-0.h5``, ... with ``image`` (uint8, 8 x 8 x 1, 0 to 16) and ``label`` (int64), in gzip chunks."""
    digits = load_digits()
    image = digits.images.astype(np.uint8)[..., np.newaxis]
    label = digits.target.astype(np.int64)
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    first = 0
    for number, length in enumerate(LENGTHS):
        paths.append(out / f"digits-{number}.h5")
        with h5py.File(paths[-1], "w") as file:
            _write(file, "image", image[first : first + length])
            _write(file, "label", label[first : first + length])
            file["image"].attrs["description"] = "handwritten digit, 0 is paper and 16 is ink"
        first += length
    return paths


def _write(file: h5py.File, name: str, values: NDArray[Any]) -> None:
    chunk = (CHUNK_ROWS, *values.shape[1:])
    # Without times the same call gives the same bytes.
    file.create_dataset(name, data=values, chunks=chunk, compression="gzip", shuffle=True, track_times=False)


def main() -> None:
    """Write the files and say where they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "digits", help="folder to write to (default: %(default)s)")
    for path in write_digits(parser.parse_args().out):
        print(f"   {path} ({path.stat().st_size:,} bytes)")


if __name__ == "__main__":
    main()
