"""Readers of images: folders with a folder for each class, tar shards, and stacks of pages."""

from __future__ import annotations

import io
import os
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import matex_data as md
from benchmarks.harness.counting import counting
from benchmarks.harness.data import SMALL, Task
from benchmarks.readers.ceiling import Pass
from benchmarks.readers.ours import SEED

CLASSES = 8  # two photographs, turned in four ways
SIDE, QUALITY = 256, 90  # of a JPEG: pixels
RESIZED = (224, 224)
SHARDS = 4
BATCH = 64

Size = tuple[int, int] | None
Array = np.ndarray[Any, Any]


def photographs(folder: Path, quick: bool = False) -> Task:
    """Write JPEGs of 256 x 256 pixels, sections of photographs, into a folder for each class: 4,000 files."""
    count = 4000 // (SMALL if quick else 1)
    path = _made(folder / f"photographs-{count}", lambda part: _write_folders(part, count, SIDE))
    return Task(path, "image", "label", BATCH, count, SIDE * SIDE * 3, count)


def thumbnails(folder: Path, quick: bool = False) -> Task:
    """Write JPEGs of 32 x 32 pixels: 10,000 files."""
    count = 10_000 // (SMALL if quick else 1)
    path = _made(folder / f"thumbnails-{count}", lambda part: _write_folders(part, count, 32))
    return Task(path, "image", "label", BATCH, count, 32 * 32 * 3, count)


def shards(folder: Path, quick: bool = False) -> Task:
    """Write the photographs as tar shards."""
    files = photographs(folder, quick)

    def write(part: Path) -> None:
        paths = np.array(sorted(Path(files.path).rglob("*.jpg")))
        shuffled = np.random.default_rng(0).permutation(paths)
        for shard in range(SHARDS):
            with tarfile.open(part / f"shard-{shard:03d}.tar", "w") as archive:
                for number, file in enumerate(shuffled[shard::SHARDS]):
                    _add(archive, f"{number:06d}.jpg", file.read_bytes())
                    _add(archive, f"{number:06d}.cls", file.parent.name[-1].encode())

    path = _made(folder / f"shards-{files.samples}", write)
    return Task(f"{path}/*.tar", "jpg", "cls", BATCH, files.samples, files.sample_bytes, files.samples)


def pages(folder: Path, quick: bool = False, single: bool = False) -> Task:
    """Write deflated uint16 pages of 512 x 512 pixels, as one file, or as a file for each page: 800 pages."""
    import tifffile

    count, options = 800 // (SMALL if quick else 1), {"photometric": "minisblack", "compression": "zlib"}

    def write(part: Path) -> None:
        rng = np.random.default_rng(0)
        images = (rng.normal(1000, 30, (512, 512)).astype(np.uint16) for _ in range(count))
        if single:
            for number, image in enumerate(images):
                tifffile.imwrite(part / f"{number:06d}.tif", image, **options)
        else:
            with tifffile.TiffWriter(part / "stack.tif") as writer:
                for image in images:
                    writer.write(image, contiguous=False, metadata=None, **options)

    path = _made(folder / f"{'pages' if single else 'stack'}-{count}", write)
    return Task(path if single else f"{path}/stack.tif", "image", "", BATCH, count, 512 * 512 * 2, count)


def _made(path: Path, write: Callable[[Path], None]) -> str:
    """Return a folder, after writing it under another name and renaming it."""
    if not path.exists():
        part = path.with_suffix(".part")
        part.mkdir(parents=True)
        write(part)
        part.rename(path)
    return str(path)


def _write_folders(folder: Path, count: int, side: int) -> None:
    from sklearn.datasets import load_sample_images

    rng, sources = np.random.default_rng(0), load_sample_images().images
    for number in range(CLASSES):
        (folder / f"class{number}").mkdir()
    for number in range(count):
        kind = number % CLASSES
        source = sources[kind // 4]
        top, left = (int(rng.integers(0, length - side)) for length in source.shape[:2])
        section = np.rot90(source[top : top + side, left : left + side], kind % 4)
        Image.fromarray(section).save(folder / f"class{kind}" / f"{number:06d}.jpg", quality=QUALITY)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def opened(task: Task, size: Size = None, **options: Any) -> md.Dataset:
    """Open the images as RGB."""
    return md.open_dataset(
        task.path, inputs=task.inputs, targets=task.targets or None, size=size and tuple(size), **options
    )


def ours(task: Task, size: Size = None, mode: str = "rgb", **options: Any) -> Pass:
    """Read shuffled batches from ``tf_dataset``."""
    return counting(opened(task, size, mode=mode, **options).tf_dataset(task.batch_size, shuffle=True, seed=SEED))


def tf_data(task: Task, size: Size = None) -> Pass:
    """Read with ``tf.io.read_file`` and ``tf.io.decode_jpeg`` in parallel, as the guide to tf.data recommends."""
    import tensorflow as tf

    files = sorted(str(path) for path in Path(task.path).rglob("*.jpg"))
    labels = [int(Path(file).parent.name[-1]) for file in files]

    def load(file: Any, label: Any) -> tuple[Any, Any]:
        image = tf.io.decode_jpeg(tf.io.read_file(file), channels=3)
        return (image if size is None else tf.image.resize(image, size)), label

    dataset = tf.data.Dataset.from_tensor_slices((files, labels)).shuffle(len(files), SEED)
    dataset = dataset.map(load, num_parallel_calls=tf.data.AUTOTUNE)
    return counting(dataset.batch(task.batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE))


def keras_directory(task: Task, size: Size = None) -> Pass:
    """Read with ``keras.utils.image_dataset_from_directory``, which always resizes."""
    import keras
    import tensorflow as tf

    dataset = keras.utils.image_dataset_from_directory(
        task.path, batch_size=task.batch_size, image_size=tuple(size or (SIDE, SIDE)), seed=SEED, verbose=False
    )
    return counting(dataset.prefetch(tf.data.AUTOTUNE))


class _Files:
    """Map-style dataset that decodes with Pillow."""

    def __init__(self, task: Task, size: Size) -> None:
        self.files = sorted(Path(task.path).rglob("*.jpg"))
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[Array, int]:
        file = self.files[number]
        with Image.open(file) as image:
            pixels = image.convert("RGB")
            if self.size is not None:
                pixels = pixels.resize(self.size[::-1], Image.Resampling.BILINEAR)
        return np.array(pixels), int(file.parent.name[-1])


def torch_loader(task: Task, size: Size = None, workers: int = 2) -> Pass:
    """Read with ``torch.utils.data.DataLoader``, Pillow and persistent workers."""
    import torch
    from torch.utils.data import DataLoader

    torch.manual_seed(0)
    samples: Any = _Files(task, size and (int(size[0]), int(size[1])))
    loader: DataLoader[Any] = DataLoader(
        samples, task.batch_size, shuffle=True, num_workers=workers, persistent_workers=workers > 0, drop_last=True
    )
    return lambda: sum(len(x) for x, _ in loader)


def tifffile_pages(task: Task) -> Pass:
    """Read page after page with tifffile through ``tf.data.Dataset.from_generator``, in order."""
    import tensorflow as tf
    import tifffile

    def read() -> Iterator[Array]:
        with tifffile.TiffFile(task.path) as file:
            for page in file.pages:
                yield page.asarray()

    dataset = tf.data.Dataset.from_generator(read, output_signature=tf.TensorSpec((512, 512), tf.uint16))
    return counting(dataset.batch(task.batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE))


def first_batch(task: Task) -> Callable[[], dict[str, float]]:
    """Measure the seconds to open a folder and to its first shuffled batch of ``tf_dataset``."""
    import tensorflow as tf

    def run() -> dict[str, float]:
        next(iter(tf.data.Dataset.range(3).batch(2)))
        begin = time.perf_counter()
        data = opened(task)
        ready = time.perf_counter()
        next(iter(data.tf_dataset(task.batch_size, shuffle=True, seed=SEED)))
        return {"seconds": time.perf_counter() - begin, "open": ready - begin}

    return run


def file_opens(task: Task) -> Callable[[], dict[str, float]]:
    """Count how often this rank opens files of the folder in an epoch, and the samples that it gets."""

    def run() -> dict[str, float]:
        data, names, counted = opened(task), [], [False]

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if counted[0] and event == "open" and isinstance(arguments[0], str | bytes):
                names.extend(name for name in [os.fsdecode(arguments[0])] if name.startswith(task.path))

        sys.addaudithook(hook)
        begin, counted[0] = time.perf_counter(), True
        batches = data.batches(task.batch_size, shuffle=True, seed=SEED, remainder="keep")
        samples = sum(len(x) for x, _ in batches)
        counted[0] = False
        return {
            "seconds": time.perf_counter() - begin,
            "samples": samples,
            "opens": len(names),
            "files": len(set(names)),
        }

    return run
