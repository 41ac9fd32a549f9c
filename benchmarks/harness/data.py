"""Files to read: written once to a folder, and reused where they exist."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

Array = np.ndarray[Any, Any]

SPARSE_BYTES = 1 << 40
GRATING_SIDE, GRATING_CLASSES = 64, 10  # pixels; directions
SMALL = 4  # --quick: files are so many times smaller


@dataclass(frozen=True)
class Task:
    """Data to read.

    Parameters
    ----------
    path : of an HDF5 file.
    inputs, targets : names of its datasets.
    batch_size : samples of a batch.
    samples : in the file.
    sample_bytes : of one sample in memory, without its target.
    limit : samples that slow readers take in one pass, drawn at random from all of the file.
    """

    path: str
    inputs: str
    targets: str
    batch_size: int
    samples: int
    sample_bytes: int
    limit: int


def contiguous(folder: Path, quick: bool = False) -> Task:
    """Write contiguous float32 images of 48 KB: 786 MB."""
    count = 16_000 // (SMALL if quick else 1)

    def write(file: h5py.File) -> None:
        images = file.create_dataset("image", (count, 3, 64, 64), "f4")
        rng = np.random.default_rng(0)
        for start in range(0, count, 1000):
            images[start : start + 1000] = rng.random((1000, 3, 64, 64), np.float32)
        file["label"] = np.arange(count)

    path = _made(folder / f"contiguous-{count}.h5", write)
    return Task(path, "image", "label", 64, count, 3 * 64 * 64 * 4, min(count, 3200))


def chunks(folder: Path, quick: bool = False) -> Task:
    """Write int16 images of 24 KB in shuffled and deflated chunks of 16: 1.6 GB decoded."""
    count = 64_000 // (SMALL if quick else 1)

    def write(file: h5py.File) -> None:
        images = file.create_dataset(
            "image", (count, 96, 128), "i2", chunks=(16, 96, 128), compression="gzip", compression_opts=1, shuffle=True
        )
        rng = np.random.default_rng(0)
        for start in range(0, count, 16):
            images[start : start + 16] = rng.normal(1000, 30, (16, 96, 128)).astype(np.int16)
        file["label"] = np.arange(count)

    path = _made(folder / f"chunks-{count}.h5", write)
    return Task(path, "image", "label", 64, count, 96 * 128 * 2, 640)


def large_chunks(folder: Path, quick: bool = False) -> Task:
    """Write int16 images of 24 KB in deflated chunks of 250, of which a batch has too few for many ranks."""
    count = 16_000 // (SMALL if quick else 1)

    def write(file: h5py.File) -> None:
        images = file.create_dataset(
            "image", (count, 96, 128), "i2", chunks=(250, 96, 128), compression="gzip", compression_opts=1
        )
        rng = np.random.default_rng(0)
        for start in range(0, count, 250):
            images[start : start + 250] = rng.normal(1000, 30, (250, 96, 128)).astype(np.int16)
        file["label"] = np.arange(count)

    path = _made(folder / f"large-chunks-{count}.h5", write)
    return Task(path, "image", "label", 64, count, 96 * 128 * 2, 640)


def rows(folder: Path, quick: bool = False) -> Task:
    """Write contiguous rows of 28 float32: 560 MB."""
    count = 5_000_000 // (SMALL if quick else 1)

    def write(file: h5py.File) -> None:
        file["x"] = np.random.default_rng(0).random((count, 28), np.float32)
        file["y"] = (np.arange(count) % 2).astype(np.uint8)

    path = _made(folder / f"rows-{count}.h5", write)
    return Task(path, "x", "y", 1024, count, 28 * 4, 8 * 1024)


def many_files(folder: Path, quick: bool = False) -> Task:
    """Write 100,000 npy files of a row of 16 float32 each, a thousand in a folder."""
    count = 100_000 // (10 if quick else 1)
    root = folder / f"many-{count}"
    if not root.exists():
        stream = io.BytesIO()
        np.save(stream, np.zeros((1, 16), np.float32))
        partial = root.with_suffix(".partial")
        for number in range(count):
            inner = partial / f"{number // 1000}"
            if number % 1000 == 0:
                inner.mkdir(parents=True, exist_ok=True)
            (inner / f"{number:06}.npy").write_bytes(stream.getvalue())
        partial.rename(root)
    return Task(str(root), "", "", 64, count, 64, count)


def sparse(folder: Path) -> Task:
    """Write a sparse file of contiguous float32 images of 48 KB: 1 TiB, almost nothing of it on disk."""
    count = SPARSE_BYTES // (3 * 64 * 64 * 4)

    def write(file: h5py.File) -> None:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        space = h5py.h5s.create_simple((count, 3, 64, 64))
        h5py.h5d.create(file.id, b"image", h5py.h5t.IEEE_F32LE, space, plist)
        labels = h5py.h5s.create_simple((count,))
        h5py.h5d.create(file.id, b"label", h5py.h5t.STD_U8LE, labels, plist)
        file["image"][count - 1] = 1  # allots the space
        file["label"][count - 1] = 1

    return Task(_made(folder / "sparse.h5", write), "image", "label", 64, count, 3 * 64 * 64 * 4, 6400)


def gratings(folder: Path, samples: int, quick: bool = False) -> Task:
    """Write float32 gratings of 16 KB, one class after the other, in gzip chunks of 16 with the shuffle filter."""
    count = samples // (SMALL if quick else 1)

    def write(file: h5py.File) -> None:
        labels = np.arange(count) * GRATING_CLASSES // count
        shape = (GRATING_SIDE, GRATING_SIDE)
        images = file.create_dataset(
            "image", (count, *shape), "f4", chunks=(16, *shape), compression="gzip", shuffle=True
        )
        for start in range(0, count, 1024):
            images[start : start + 1024] = grating_images(labels[start : start + 1024], seed=start)
        file["label"] = labels

    path = _made(folder / f"gratings-{count}.h5", write)
    return Task(path, "image", "label", 256, count, GRATING_SIDE**2 * 4, count)


def grating_images(labels: Array, seed: int) -> Array:
    """Return noisy gratings whose direction is the class, of random phase and wavelength: float32[n, side, side].

    Values have 12 bits, as those of a detector. Directions scatter so far that some images look like the next class.
    """
    rng, count = np.random.default_rng(seed), len(labels)
    direction = (labels + rng.normal(0, 0.25, count)) * np.pi / GRATING_CLASSES
    frequency = rng.uniform(2, 5, count) * 2 * np.pi / GRATING_SIDE
    across, down = (frequency * f(direction) for f in (np.cos, np.sin))
    pixel = np.arange(GRATING_SIDE)
    phase = rng.uniform(0, 2 * np.pi, (count, 1, 1))
    waves = np.sin(across[:, None, None] * pixel + down[:, None, None] * pixel[:, None] + phase)
    values = 0.5 * waves + rng.normal(0, 0.5, waves.shape)
    return (np.round(values.clip(-4, 4 - 2**-9) * 512) / 512).astype(np.float32)


def small(folder: Path) -> Task:
    """Write 2,000 rows of 10 float64 in deflated chunks of 100."""

    def write(file: h5py.File) -> None:
        file.create_dataset("x", data=np.random.default_rng(0).random((2000, 10)), chunks=(100, 10), compression="gzip")
        file["y"] = np.arange(2000)

    return Task(_made(folder / "small.h5", write), "x", "y", 32, 2000, 80, 2000)


def _made(path: Path, write: Callable[[h5py.File], None]) -> str:
    """Return the path of a file, after writing it under another name and renaming it."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with h5py.File(part, "w") as file:
            write(file)
        part.rename(path)
    return str(path)
