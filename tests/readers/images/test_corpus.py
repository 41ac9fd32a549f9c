"""Folders and lists of real images on one and several ranks; expected pixels by Pillow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from PIL import Image, ImageOps

from matex_data import open_dataset
from tests.support.corpus import CORPUS, needs_corpus
from tests.support.ranks import Pool


def _decoded(path: Path) -> Any:
    try:
        with Image.open(path) as image:
            return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None


def _loaded(comm: MPI.Intracomm, paths: list[str]) -> list[Any]:
    data = open_dataset(paths, comm=comm, mode="rgb", ragged=True)
    return list(data.load()["image"])


@needs_corpus
def test_images_of_different_sizes(pool: Pool) -> None:
    suffixes = (".jpg", ".bmp")
    files = sorted(path for path in (CORPUS / "images").glob("*/*") if path.suffix in suffixes)
    expected = {path: pixels for path in files if (pixels := _decoded(path)) is not None}
    by_rank = pool.run(_loaded, [str(path) for path in expected], timeout=120)
    found = [image for images in by_rank for image in images]
    assert len(found) == len(expected) > 5
    for (path, pixels), image in zip(expected.items(), found, strict=True):
        assert image.shape == pixels.shape, path
        assert np.abs(image.astype(int) - pixels).max() <= 2, path


def _counted(comm: MPI.Intracomm, folder: str) -> tuple[int, list[str]]:
    data = open_dataset(folder, comm=comm, mode="rgb", size=(16, 16), dtype="float32", pages="first", on_error="skip")
    batches = data.batches(12, shuffle=True, seed=1, remainder="keep")
    return sum(len(batch["path"]) for batch in batches), [Path(sample.file).name for sample in data.skipped]


@needs_corpus
@pytest.mark.filterwarnings("ignore")
def test_damaged_files_of_a_folder_are_skipped(pool: Pool) -> None:
    by_rank = pool.run(_counted, f"{CORPUS}/images/pillow", timeout=120)
    skipped = by_rank[0][1]
    total = len(open_dataset(f"{CORPUS}/images/pillow", inputs="path", pages="first"))
    assert all(names == skipped for _, names in by_rank)
    assert {"truncated_jpeg.jpg", "bmp_b_reallybig.bmp", "broken_data_stream.png"} <= set(skipped)
    assert sum(count for count, _ in by_rank) == total - len(skipped)
