"""Ragged fields whose samples have several axes: images of different sizes."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from matex_data import Dataset, FormatError
from matex_data.fields import ElementSpec, Field
from matex_data.index.library import LibraryRows
from matex_data.index.model import FileIndex, Index
from matex_data.index.united import concatenate
from matex_data.io.sessions import read_sessions
from matex_data.reading.source import ReadOptions, open_source
from matex_data.transforms.names import ragged_fields
from tests.support.ranks import Pools
from tests.support.sources import dataset_of

ROWS, BATCH = 23, 6
COLOUR = Field("colour", (), np.dtype("u1"), ragged=True, inner=(None, None, 3))
GRAY = Field("gray", (), np.dtype("f4"), ragged=True, inner=(None, None))


def image(name: str, row: int) -> np.ndarray[Any, Any]:
    """Return image ``row`` of a field."""
    height, width = 1 + row % 4, 1 + row % 3
    if name == "gray":
        return np.full((height, width), row, "f4")
    return (np.arange(height * width * 3) + row).astype("u1").reshape(height, width, 3)


@dataclass(frozen=True)
class Images(LibraryRows):
    """Images of one field, made when they are read."""

    name: str
    rows: int = ROWS
    block_rows: int = 4

    def read(self, start: int, stop: int) -> Any:
        images = np.empty(stop - start, object)
        for i in range(stop - start):
            images[i] = image(self.name, start + i)
        return images


def index(*fields: Field) -> Index:
    return Index({f.name: f for f in fields}, [FileIndex("images", ROWS, {f.name: Images(f.name) for f in fields})])


def opened(comm: MPI.Intracomm, cache: str | None = None) -> Dataset:
    options = ReadOptions("independent", window_bytes=1 << 20, cache=cache)
    source = open_source(read_sessions(comm), index(COLOUR, GRAY), options)
    return dataset_of(source, ElementSpec())


def _batches(comm: MPI.Intracomm, cache: str | None = None, **options: Any) -> list[Any]:
    return list(opened(comm, cache=cache).batches(BATCH, remainder="keep", **options))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("options", [{}, {"cache": "memory"}, {"shuffle": "global", "seed": 1}], ids=str)
def test_a_batch_is_an_array_of_images(ranks: Pools, size: int, options: dict[str, Any]) -> None:
    batches = [batch for of_rank in ranks(size).run(_batches, **options) for batch in of_rank]
    rows = [int(gray[0, 0]) for batch in batches for gray in batch["gray"]]
    assert sorted(rows) == list(range(ROWS))
    for name in ("colour", "gray"):
        found = [sample for batch in batches for sample in batch[name]]
        for sample, row in zip(found, rows, strict=True):
            assert sample.dtype == image(name, row).dtype and np.array_equal(sample, image(name, row))


@pytest.mark.parametrize("remainder", ["drop", "keep", "pad"])
def test_a_batch_is_a_ragged_tensor(remainder: str) -> None:
    tf = pytest.importorskip("tensorflow")
    tensors = opened(MPI.COMM_SELF).tf_dataset(BATCH, remainder=remainder)
    rows = None if remainder == "keep" else BATCH
    assert tensors.element_spec["colour"] == tf.RaggedTensorSpec([rows, None, None, 3], tf.uint8, ragged_rank=2)
    assert tensors.element_spec["gray"] == tf.RaggedTensorSpec([rows, None, None], tf.float32, ragged_rank=2)
    arrays = opened(MPI.COMM_SELF).batches(BATCH, remainder=remainder)
    count = 0
    for batch, expected in zip(tensors, arrays, strict=True):
        for name in ("colour", "gray"):
            assert tensors.element_spec[name].is_compatible_with(batch[name])
            assert batch[name].to_list() == [sample.tolist() for sample in expected[name]]
        count += batch["gray"].shape[0]
    assert count == {"drop": 18, "keep": 23, "pad": 24}[remainder]
    assert expected["colour"][-1].shape == ((0, 0, 3) if remainder == "pad" else expected["colour"][-1].shape)


def test_statistics_are_those_of_all_pixels() -> None:
    found = opened(MPI.COMM_SELF).statistics("colour", axis=-1)
    pixels = np.concatenate([image("colour", row).reshape(-1, 3) for row in range(ROWS)]).astype("f8")
    np.testing.assert_allclose(found.mean, pixels.mean(0))
    np.testing.assert_allclose(found.std, pixels.std(0))
    assert opened(MPI.COMM_SELF).statistics("gray").count == len(pixels)
    with pytest.raises(FormatError, match=r"no such axis(.*\n)*.*3 to 3"):
        opened(MPI.COMM_SELF).statistics("colour", axis=1)


def test_lists_alone_are_padded() -> None:
    with pytest.raises(FormatError, match=r"pad= is for fields whose samples are lists(.*\n)*.*\(None, None, 3\)"):
        ragged_fields({"colour": COLOUR}, ["colour"], "pad")


def test_fields_of_other_axes_differ() -> None:
    assert pickle.loads(pickle.dumps(COLOUR)) == COLOUR != replace(COLOUR, inner=(None, None))
    with pytest.raises(FormatError, match=r"found: uint8 of shape \(None, None, 3\) \(ragged\)"):
        concatenate([index(replace(COLOUR, inner=(None,))), index(COLOUR)])
