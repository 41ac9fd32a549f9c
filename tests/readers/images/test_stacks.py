"""Stacks of pages in TIFF files: conformance suite, compression, tiles, hyperstacks; expected values by tifffile."""

from __future__ import annotations

import io
import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from mpi4py import MPI
from numpy.typing import NDArray
from PIL import Image

from matex_data import DecodeError, FormatError, open_dataset
from matex_data.index.model import FileIndex, Index
from matex_data.index.strided import Strided
from matex_data.readers.images.decoding import ImageOptions, decode_image
from matex_data.readers.images.stacks import pages as stack_pages
from matex_data.readers.images.stacks.alike import stack_layout
from matex_data.readers.images.stacks.pages import StackPages
from tests.support.corpus import CORPUS, needs_corpus
from tests.support.format_suite import Case, FormatSuite, same
from tests.support.ranks import Pool
from tests.support.serial import every_row, random_rows

NATIVE = ImageOptions()


def volume(shape: tuple[int, ...] = (7, 40, 33), dtype: str = "uint16") -> NDArray[Any]:
    ramp = np.arange(np.prod(shape)).reshape(shape) % 251
    noise = np.random.default_rng(0).integers(0, 5, shape)
    return (ramp * (3 if dtype != "uint8" else 1) + noise).astype(dtype)


def stack(path: Path | str, options: ImageOptions = NATIVE) -> Index:
    """Return the index of a stack. It is pickled, as it is for other ranks."""
    found = stack_layout(str(path), options)
    assert found is not None
    field, layout = pickle.loads(pickle.dumps(found))
    return Index({"image": field}, [FileIndex(str(path), layout.rows, {"image": layout})])


def layout_of(index: Index) -> Any:
    return index.files[0].layouts["image"]


STORED: list[dict[str, Any]] = [
    {},
    {"byteorder": ">"},
    {"bigtiff": True},
    {"rowsperstrip": 11},
    {"tile": (16, 16)},
    {"compression": "zlib", "rowsperstrip": 7},
    {"compression": "zlib", "tile": (32, 16), "predictor": True},
    {"compression": "lzw", "predictor": True, "byteorder": ">"},
    {"compression": "zstd", "tile": (16, 16)},
    {"compression": "packbits"},
    {"compression": "lzma", "byteorder": ">", "bigtiff": True},
]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize("options", STORED, ids=str)
def test_gray_pages(tmp_path: Path, options: dict[str, Any], dtype: str) -> None:
    path = tmp_path / "stack.tif"
    tifffile.imwrite(path, volume(dtype=dtype), photometric="minisblack", metadata=None, **options)
    wanted = tifffile.imread(path)
    found = stack(path)
    same(every_row(found, "image"), wanted)
    rows, numbers = random_rows(found, "image", np.random.default_rng(1))
    same(rows, wanted[numbers])
    assert layout_of(found).end() <= path.stat().st_size


@pytest.mark.parametrize("planar", ["contig", "separate"])
@pytest.mark.parametrize("options", STORED, ids=str)
def test_colour_pages(tmp_path: Path, options: dict[str, Any], planar: str) -> None:
    path, pixels = tmp_path / "stack.tif", volume((5, 40, 33, 3), "uint8")
    stored = pixels if planar == "contig" else np.moveaxis(pixels, -1, 1)
    tifffile.imwrite(path, stored, photometric="rgb", planarconfig=planar, metadata=None, **options)
    same(every_row(stack(path), "image"), pixels)


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint32", "int32", "float16", "float64"])
def test_other_numbers(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "stack.tif"
    for options in ({}, {"compression": "zlib", "byteorder": ">"}):
        tifffile.imwrite(path, volume(dtype=dtype) - 100, photometric="minisblack", **options)
        found = every_row(stack(path), "image")
        same(found, tifffile.imread(path))
        assert found.dtype == decode_image(path.read_bytes(), NATIVE).dtype


def test_raw_pages_are_read_in_place(tmp_path: Path) -> None:
    path = tmp_path / "stack.tif"
    tifffile.imwrite(path, volume(), photometric="minisblack")
    layout = layout_of(stack(path))
    assert isinstance(layout, Strided) and layout.convert is None
    with tifffile.TiffWriter(path) as writer:
        for number, page in enumerate(volume()):
            writer.write(page, photometric="minisblack", description="x" * number * 40, metadata=None, contiguous=False)
    found = stack(path)
    assert isinstance(layout_of(found), StackPages)
    same(every_row(found, "image"), volume())
    same(every_row(stack(path, ImageOptions(dtype=np.dtype("f4"))), "image"), volume(dtype="float32"))


def test_hyperstacks_of_imagej(tmp_path: Path) -> None:
    path, pixels = tmp_path / "stack.tif", volume((3, 4, 2, 20, 30))
    tifffile.imwrite(path, pixels, imagej=True, metadata={"axes": "TZCYX"})
    same(every_row(stack(path), "image"), pixels.reshape(-1, 20, 30))
    with tifffile.TiffFile(path) as file:
        first = file.pages.first
        link = first.offset + 2 + 12 * len(first.tags)
    content = bytearray(path.read_bytes())
    content[link : link + 4] = bytes(4)  # as ImageJ writes stacks of more than 4 GB: no page behind the first one
    path.write_bytes(content)
    with tifffile.TiffFile(path) as file:
        assert len(file.pages) == 1
    same(every_row(stack(path), "image"), pixels.reshape(-1, 20, 30))


def opened(path: Path, **options: Any) -> NDArray[Any]:
    """Return all images of a data set as one array."""
    return np.stack(list(open_dataset(str(path), **options).load()["image"]))


@pytest.mark.parametrize("photometric", ["miniswhite", "minisblack", "rgb"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_images_behind_the_only_page_are_read_in_every_layout(tmp_path: Path, dtype: str, photometric: str) -> None:
    shape = (6, 20, 30, 3) if photometric == "rgb" else (6, 20, 30)
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "stack.tif"
        tifffile.imwrite(path, volume(shape, dtype), photometric=photometric, truncate=True, byteorder=">")
    with tifffile.TiffFile(path) as file:
        assert len(file.pages) == 1
    wanted = tifffile.imread(path)
    same(opened(path), wanted)
    same(opened(path, ragged=True), wanted)
    same(opened(tmp_path), np.concatenate([wanted, wanted]))
    same(opened(path, ragged=True, pages="first"), wanted[:1])
    gray = opened(path, ragged=True, mode="gray")
    same(gray, np.stack([decode_image(tiff_of(page), ImageOptions(mode="gray")) for page in wanted]))


def tiff_of(page: NDArray[Any]) -> bytes:
    memory = io.BytesIO()
    tifffile.imwrite(memory, page, photometric="rgb" if page.ndim == 3 else "minisblack")
    return memory.getvalue()


VOLUMES: list[dict[str, Any]] = [{}, {"tile": (16, 16)}, {"tile": (4, 16, 16)}, {"compression": "zlib"}]


@pytest.mark.parametrize("options", VOLUMES, ids=str)
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_volumes_are_refused(tmp_path: Path, dtype: str, options: dict[str, Any]) -> None:
    for shape, kind in (((8, 40, 33), "minisblack"), ((8, 40, 33, 3), "rgb")):
        path = tmp_path / "volume.tif"
        tifffile.imwrite(path, volume(shape, dtype), volumetric=True, photometric=kind, **options)
        assert tifffile.imread(path).shape == shape
        for others in ({}, {"ragged": True}, {"pages": "first"}):
            with pytest.raises(FormatError, match="is a volume") as caught:
                open_dataset(str(path), **others)
            assert "tifffile.imwrite" in str(caught.value)
        with pytest.raises(FormatError, match="is a volume"):
            decode_image(path.read_bytes(), NATIVE)


def test_truncated_page_list_of_tifffile(tmp_path: Path) -> None:
    path, pixels = tmp_path / "stack.tif", volume((6, 20, 30), "uint8")
    tifffile.imwrite(path, pixels, photometric="minisblack", truncate=True)
    with tifffile.TiffFile(path) as file:
        assert len(file.pages) == 1
    same(every_row(stack(path), "image"), pixels)


def test_ome(tmp_path: Path) -> None:
    path, pixels = tmp_path / "stack.ome.tif", volume((3, 2, 40, 33))
    tifffile.imwrite(path, pixels, ome=True, photometric="minisblack", compression="zlib", metadata={"axes": "TCYX"})
    same(every_row(stack(path), "image"), pixels.reshape(-1, 40, 33))


@pytest.mark.parametrize("mode", ["rgb", "gray"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_mode_and_size_are_those_of_single_images(tmp_path: Path, mode: str, dtype: str) -> None:
    options = ImageOptions(mode=mode, size=(20, 50), dtype=np.dtype("f4"))
    for compression, shape in itertools.product((None, "zlib"), ((4, 40, 33), (4, 40, 33, 3))):
        pixels = volume(shape, dtype)
        if dtype == "uint16" and len(shape) == 4:
            continue
        kind = "rgb" if len(shape) == 4 else "minisblack"
        tifffile.imwrite(tmp_path / "stack.tif", pixels, photometric=kind, compression=compression)
        found = every_row(stack(tmp_path / "stack.tif", options), "image")
        for page, pixel in zip(found, pixels, strict=True):
            tifffile.imwrite(tmp_path / "page.tif", pixel, photometric=kind)
            same(page, decode_image((tmp_path / "page.tif").read_bytes(), options))


def test_segments_of_a_large_page_are_several_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_pages, "REQUEST_BYTES", 2000)
    for options in (NATIVE, ImageOptions(mode="rgb")):
        tifffile.imwrite(
            tmp_path / "a.tif", volume((2, 100, 90)), photometric="minisblack", compression="zlib", rowsperstrip=9
        )
        found = stack(tmp_path / "a.tif", options)
        wanted = volume((2, 100, 90))
        same(every_row(found, "image"), wanted if options is NATIVE else np.stack([wanted] * 3, axis=-1))


def test_pages_that_cannot_be_laid_out(tmp_path: Path) -> None:
    path = tmp_path / "stack.tif"
    for kinds in (
        [{"photometric": "minisblack"}, {"photometric": "minisblack", "compression": "zlib"}],
        [{"photometric": "minisblack", "extratags": [(274, 3, 1, 6, True)]}],
        [{"photometric": "minisblack", "subfiletype": 1}],
    ):
        with tifffile.TiffWriter(path) as writer:
            for options in kinds:
                writer.write(volume((40, 33), "uint8"), metadata=None, contiguous=False, **options)
        assert stack_layout(str(path), NATIVE) is None
    Image.fromarray(volume((40, 33), "uint8")).convert("1").save(path)
    assert stack_layout(str(path), NATIVE) is None
    for content in (b"", b"GIF89a" + bytes(40)):
        path.write_bytes(content)
        assert stack_layout(str(path), NATIVE) is None
    path.write_bytes(b"II*\0")
    with pytest.raises(FormatError, match="truncated"):
        stack_layout(str(path), NATIVE)


def test_the_first_page_of_a_file_whose_next_one_is_lost(tmp_path: Path) -> None:
    path, pixels = tmp_path / "a.tif", volume((40, 33), "uint8")
    tifffile.imwrite(path, pixels, photometric="minisblack", metadata=None)
    content = bytearray(path.read_bytes())
    link = 10 + 12 * int.from_bytes(content[8:10], "little")
    content[link : link + 4] = (10**6).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"truncated(.|\n)*pages='first'"):
        open_dataset(path, comm=MPI.COMM_SELF)
    same(open_dataset(path, pages="first", comm=MPI.COMM_SELF).load()["image"][0], pixels)


def test_too_many_pixels(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", volume(), photometric="minisblack")
    with pytest.raises(DecodeError, match="max_pixels"):
        stack_layout(str(tmp_path / "a.tif"), ImageOptions(max_pixels=1000))


def test_truncated_files(tmp_path: Path) -> None:
    path, cut = tmp_path / "stack.tif", tmp_path / "cut.tif"
    with tifffile.TiffWriter(path) as writer:
        for page in volume():
            writer.write(page, photometric="minisblack", metadata=None, contiguous=False)
    content = path.read_bytes()
    for length in range(8, len(content), 997):
        cut.write_bytes(content[:length])
        try:
            found = stack_layout(str(cut), NATIVE)
        except FormatError as error:
            assert error.file == str(cut) and error.byte is not None
        else:
            assert found is None


def test_damaged_segments(tmp_path: Path) -> None:
    path = tmp_path / "stack.tif"
    tifffile.imwrite(path, volume(), photometric="minisblack", compression="zlib")
    found = stack(path)
    offset, nbytes = (int(table[4, 0]) for table in (layout_of(found).offset, layout_of(found).nbytes))
    content = bytearray(path.read_bytes())
    content[offset + nbytes // 2 : offset + nbytes // 2 + 20] = bytes(20)
    path.write_bytes(content)
    with pytest.raises(DecodeError) as caught:
        every_row(stack(path), "image")
    assert caught.value.row == 4 and caught.value.byte == offset


def stacks(folder: Path) -> list[Path]:
    """Write stacks of 70, 1 and 41 pages: raw, deflated, and tiled."""
    kinds: list[dict[str, Any]] = [
        {"byteorder": ">"},
        {"compression": "zlib"},
        {"tile": (16, 16), "compression": "lzw"},
    ]
    paths, first = [folder / f"stack{number}.tif" for number in range(3)], 0
    for path, count, options in zip(paths, (70, 1, 41), kinds, strict=True):
        pages = np.array(
            [volume((12, 20), "int32") + 100 * number for number in range(first, first + count)], np.uint16
        )
        tifffile.imwrite(path, pages, photometric="minisblack", **options)
        first += count
    return paths


class TestStacks(FormatSuite):
    def write(self, folder: Path) -> Case:
        paths = stacks(folder)
        pages = [tifffile.imread(path).reshape(-1, 12, 20) for path in paths]
        names = [path.name.encode() for path, of_file in zip(paths, pages, strict=True) for _ in of_file]
        return Case(
            [str(path) for path in paths], {"image": np.concatenate(pages), "path": np.array(names, object)}, "image"
        )

    def damage(self, folder: Path) -> Case:
        path = stacks(folder)[2]
        content = bytearray(path.read_bytes())
        with tifffile.TiffFile(path) as file:
            begin = file.pages[30].dataoffsets[1]
        content[begin : begin + 12] = bytes([255]) * 12
        path.write_bytes(content)
        return Case(str(folder), {}, "image")


def test_folders_of_stacks_and_of_pages(tmp_path: Path) -> None:
    stacks(tmp_path)
    data = open_dataset(str(tmp_path), comm=MPI.COMM_SELF)
    assert len(data._source.index.files) == 3
    assert all(file.stamp is not None for file in data._source.index.files)
    assert len(open_dataset(str(tmp_path), comm=MPI.COMM_SELF, pages="first")) == 3
    for number in range(3):
        tifffile.imwrite(tmp_path / f"stack{number}.tif", volume((12, 20)), photometric="minisblack")
    data = open_dataset(str(tmp_path), comm=MPI.COMM_SELF)
    assert len(data) == 3 and len(data._source.index.files) == 1
    assert data.schema["image"].dtype == np.uint16


def test_a_large_single_page_is_read_by_ranges(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", volume((40, 33)), photometric="minisblack")
    data = open_dataset(str(tmp_path / "a.tif"), inputs="image", comm=MPI.COMM_SELF)
    assert isinstance(data._source.index.files[0].layouts["image"], Strided)
    same(data.load()["image"], volume((1, 40, 33)))


def corpus_files() -> list[Path]:
    folder = CORPUS / "images"
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".tif", ".tiff"))


@needs_corpus
def test_corpus() -> None:
    laid_out = 0
    for path in corpus_files():
        try:
            found = stack_layout(str(path), NATIVE)
        except FormatError:
            continue
        if found is None:
            continue
        index = stack(path)
        rows = every_row(index, "image")
        with tifffile.TiffFile(path) as file:
            pages = [page.asarray() for i, page in enumerate(file.pages) if not (i and page.is_reduced)]
        assert len(rows) == len(pages)
        for number, (row, page) in enumerate(zip(rows, pages, strict=True)):
            same(row, page if row.shape == page.shape else np.moveaxis(page, 0, -1))
            one = decode_image(path.read_bytes(), NATIVE, page=number)
            same(row, one.astype(one.dtype.newbyteorder("=")))
            assert row.dtype == one.dtype
        laid_out += 1
    assert laid_out >= 5


def _load(comm: MPI.Intracomm, path: str) -> NDArray[Any]:
    return open_dataset(path, comm=comm, inputs="image", io="collective").load()["image"]


@needs_corpus
def test_pages_of_the_corpus_on_ranks(pool: Pool) -> None:
    path = str(next(path for path in corpus_files() if path.name == "multipage_rgb.tif"))
    with tifffile.TiffFile(path) as file:
        wanted = np.moveaxis(np.array([page.asarray() for page in file.pages]), 1, -1)
    same(np.concatenate(pool.run(_load, path)), wanted)
