"""Decoded images equal those of Pillow, tifffile, imagecodecs and astropy, or are refused."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import imagecodecs
import numpy as np
import pytest
import tifffile
from astropy.io import fits
from numpy.typing import NDArray
from PIL import Image, ImageOps
from PIL.TiffImagePlugin import TiffImageFile

import matex_data as md
from matex_data import DataError, DecodeError, FormatError
from matex_data.readers.images.decoding import FrameFile, ImageOptions, decode_image, image_info, pillow
from matex_data.readers.images.decoding.resample import compile_loops, takes
from tests.fuzz.images import KINDS, picture, seeds
from tests.support.corpus import CORPUS, needs_corpus
from tests.support.launch import ROOT

NATIVE = ImageOptions()
RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
}


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    memory = io.BytesIO()
    image.save(memory, kind, **options)
    return memory.getvalue()


def written(array: NDArray[Any], **options: Any) -> bytes:
    memory = io.BytesIO()
    tifffile.imwrite(memory, array, metadata=None, **options)
    return memory.getvalue()


def shown(data: bytes) -> Image.Image:
    """Return the image as Pillow gives it, but with the numbers that are stored where white is the least one."""
    image = Image.open(io.BytesIO(data))
    if isinstance(image, TiffImageFile) and image.tag_v2.get(262) == 0 and image.mode in ("1", "L"):
        stored = Image.fromarray(tifffile.imread(io.BytesIO(data)))
        stored.getexif()[274] = image.tag_v2.get(274, 1)  # the orientation, of which tifffile makes nothing
        return ImageOps.exif_transpose(stored)
    image.load()
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # damaged Exif data
        return image.copy()


def check(data: bytes, options: ImageOptions, expected: NDArray[Any], levels: int = 0) -> None:
    """Compare pixels, and what the header tells, with the expected array."""
    found, info = decode_image(data, options, "file"), image_info(data, options, "file")
    assert (info.shape, info.dtype) == (found.shape, found.dtype)
    assert found.dtype == expected.dtype.newbyteorder("=")
    assert found.shape == expected.shape
    if levels:
        assert np.abs(found.astype(int) - expected).max() <= levels
    else:
        np.testing.assert_array_equal(found, expected)


# Files of other projects


def _corpus() -> Iterator[Any]:
    folder = CORPUS / "images"
    if not folder.is_dir():
        yield pytest.param(folder, marks=needs_corpus, id="none")
        return
    for entry in json.loads((folder / "MANIFEST.json").read_text()):
        yield pytest.param(folder / entry["file"], id=entry["file"])


@pytest.mark.parametrize("path", list(_corpus()))
def test_images_of_other_projects(path: Path) -> None:
    data = path.read_bytes()
    if data.startswith(b"SIMPLE"):
        _check_fits(data, path)
        return
    pages = image_info(data, NATIVE).pages if _is_image(data) else 1
    try:
        expected = np.asarray(shown(data))
    except Exception:
        expected = np.zeros(0)
    if b"float64" in path.name.encode() or path.name == "multipage_rgb.tif" or _is_deep(data):
        _check_deep(data)
    elif not expected.size:
        with pytest.raises(DataError, match=path.name):
            decode_image(data, NATIVE, str(path))
    else:
        if not data.startswith(b"GIF") or pages == 1:
            check(data, NATIVE, expected, 2 if path.suffix == ".jpg" else 0)
        _check_modes(data)


def _is_image(data: bytes) -> bool:
    try:
        return bool(image_info(data, NATIVE).shape)
    except DataError:
        return False


def _is_deep(data: bytes) -> bool:
    if data.startswith(b"\x89PNG"):
        return data[24] == 16 and data[25] in (2, 4, 6) and b"acTL" not in data
    if data[:2] in (b"II", b"MM"):
        try:
            page = tifffile.TiffFile(io.BytesIO(data)).pages[0]
        except Exception:
            return False
        return page.bitspersample > 8 and page.samplesperpixel > 1
    return False


def _check_deep(data: bytes) -> None:
    if data.startswith(b"\x89PNG"):
        expected = imagecodecs.png_decode(data)
        if data[25] == 2:
            expected = expected[..., :3]  # a transparent colour is no channel
        check(data, NATIVE, expected)
        assert expected.dtype == np.uint16
        return
    file = tifffile.TiffFile(io.BytesIO(data))
    for number, page in enumerate(file.pages):
        expected = page.asarray()
        expected = np.moveaxis(expected, 0, 2) if page.axes == "SYX" else expected
        np.testing.assert_array_equal(decode_image(data, NATIVE, page=number), expected)
        assert decode_image(data, NATIVE, page=number).dtype == expected.dtype.newbyteorder("=")


def _check_fits(data: bytes, path: Path) -> None:
    try:
        arrays = [part.data for part in fits.open(io.BytesIO(data)) if part.is_image and part.data is not None]
    except OSError:
        arrays = []
    if arrays:
        check(data, NATIVE, arrays[0])
    else:
        with pytest.raises(DataError, match=path.name):
            decode_image(data, NATIVE, str(path))


def _check_modes(data: bytes) -> None:
    image = shown(data)
    if image.mode in ("LAB", "I", "F") or image.mode.startswith("I;16"):
        return
    for mode, name in (("rgb", "RGB"), ("gray", "L")):
        expected = np.asarray(image.convert(name))
        expected = expected[..., None] if mode == "gray" else expected
        check(data, ImageOptions(mode=mode), expected, 2)


# Kinds


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "fits"])
def test_generated_images_equal_those_of_pillow(kind: str) -> None:
    for data in seeds(kind):
        if _is_deep(data) or (kind == "tiff" and image_info(data, NATIVE).dtype in ("f8", "u4")):
            continue
        image = shown(data)
        if getattr(Image.open(io.BytesIO(data)), "n_frames", 1) == 1:
            check(data, NATIVE, np.asarray(image), 2 if kind == "jpeg" else 0)
        if image.mode not in ("I;16", "F"):
            _check_modes(data)


@pytest.mark.parametrize("data", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, "u1")])
def test_any_buffer(data: Any) -> None:
    for kind in KINDS:
        for file in seeds(kind)[:2]:
            np.testing.assert_array_equal(decode_image(data(file), NATIVE), decode_image(file, NATIVE))
            assert image_info(data(file), NATIVE) == image_info(file, NATIVE)


def _jpeg_variants() -> dict[str, bytes]:
    image, gray = picture(size=(61, 43)), picture("L", (61, 43))
    exif = Image.Exif()
    exif[0x0112] = 1
    return {
        "baseline": saved(image, "JPEG", quality=90),
        "4:4:4": saved(image, "JPEG", subsampling=0),
        "4:2:2": saved(image, "JPEG", subsampling=1),
        "progressive": saved(image, "JPEG", progressive=True),
        "restart markers": saved(image, "JPEG", restart_marker_blocks=1),
        "gray": saved(gray, "JPEG"),
        "gray progressive": saved(gray, "JPEG", progressive=True),
        "cmyk": saved(picture("CMYK"), "JPEG"),
        "colours as they are": saved(image, "JPEG", keep_rgb=True),
        "comment, exif": saved(image, "JPEG", comment=b"\xff\xd9\xff\xda", exif=exif),
        "one pixel": saved(image.crop((0, 0, 1, 1)), "JPEG"),
        "bytes after the end": saved(image, "JPEG") + b"junk",
        "twice": saved(image, "JPEG") + saved(gray, "JPEG"),
    }


@pytest.mark.parametrize("name", list(_jpeg_variants()))
def test_jpeg_variants(name: str) -> None:
    data = _jpeg_variants()[name]
    check(data, NATIVE, np.asarray(shown(data)), 2)
    _check_modes(data)


@pytest.mark.parametrize("progressive", [False, True])
def test_a_cut_jpeg_is_refused_wherever_it_is_cut(progressive: bool) -> None:
    data = saved(picture(), "JPEG", progressive=progressive)
    for end in range(2, len(data) - 2, 7):
        with pytest.raises(DataError, match=r"cut\.jpg"):
            decode_image(data[:end], NATIVE, "cut.jpg")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.02, 0.3, 0.7])
def test_cut_files_are_refused_as_pillow_refuses_them(kind: str, share: float) -> None:
    for data in seeds(kind):
        cut = data[: int(len(data) * share)]
        try:
            read = _fits_image(cut) if kind == "fits" else np.asarray(shown(cut))
        except Exception:
            read = None
        if read is None:
            with pytest.raises(DataError, match=r"cut\.img"):
                decode_image(cut, NATIVE, "cut.img")


def _fits_image(data: bytes) -> NDArray[Any]:
    return np.asarray(next(p.data for p in fits.open(io.BytesIO(data)) if p.is_image and p.data is not None))


ARRAYS = {
    "uint16 colours": (np.arange(24 * 31 * 3).reshape(24, 31, 3) * 977 % 65536).astype("u2"),
    "uint16": (np.arange(24 * 31).reshape(24, 31) * 977 % 65536).astype("u2"),
    "float32": np.linspace(-3, 1e6, 24 * 31, dtype="f4").reshape(24, 31),
    "float64": np.linspace(-3, 1e9, 24 * 31).reshape(24, 31),
    "uint32": (np.arange(24 * 31, dtype="u4").reshape(24, 31) << 22) + 1,
    "int8": np.arange(24 * 31).reshape(24, 31).astype("i1"),
    "int64": np.arange(24 * 31).reshape(24, 31) << 40,
    "float32 colours": np.linspace(-3, 1e6, 24 * 31 * 3, dtype="f4").reshape(24, 31, 3),
    "five channels": (np.arange(24 * 31 * 5).reshape(24, 31, 5) % 251).astype("u1"),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "big-endian": {"byteorder": ">"},
    "bigtiff, deflate, predictor": {"bigtiff": True, "compression": "zlib", "predictor": True},
    "tiles, lzw": {"tile": (16, 16), "compression": "lzw"},
    "strips, zstd, big-endian": {"rowsperstrip": 5, "compression": "zstd", "byteorder": ">"},
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("name", list(ARRAYS))
def test_tiff_numbers_are_never_cut(name: str, layout: str) -> None:
    array = ARRAYS[name]
    photometric = "rgb" if array.shape[2:] == (3,) else "minisblack"
    options = dict(LAYOUTS[layout], photometric=photometric)
    if array.dtype == np.int64:
        options.pop("predictor", None)  # tifffile has none for integers of 64 bits
    if name == "five channels":
        options["planarconfig"] = "contig"
    data = written(array, **options)
    np.testing.assert_array_equal(tifffile.imread(io.BytesIO(data)), array)
    check(data, NATIVE, array)


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("dtype", ["bool", "uint8", "uint16", "int16", "float32"])
def test_the_numbers_of_white_zero_are_those_that_are_stored(dtype: str, layout: str) -> None:
    options = dict(LAYOUTS[layout])
    pixels = np.random.default_rng(1).integers(0, 200, (40, 33))
    array = pixels > 100 if dtype == "bool" else pixels.astype(dtype)
    if dtype == "bool":
        options.pop("predictor", None)
        data = written(array, **options)  # tifffile takes white as zero for masks, if nothing else is said
    else:
        data = written(array, photometric="miniswhite", **options)
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        assert file.pages.first.photometric == 0
    wanted = tifffile.imread(io.BytesIO(data))
    np.testing.assert_array_equal(wanted, array)
    check(data, NATIVE, wanted)
    if array.dtype in (bool, np.uint8):
        gray = np.where(array, 255, 0) if dtype == "bool" else array
        check(data, ImageOptions(mode="gray"), gray.astype("u1")[..., None])


@pytest.mark.parametrize("format", ["png", "tiff", "bmp"])
@pytest.mark.parametrize("size", [None, (5, 4)])
def test_images_of_one_bit_are_zeros_and_ones(format: str, size: tuple[int, int] | None) -> None:
    data = io.BytesIO()
    Image.fromarray(np.tri(16, 32) > 0).save(data, format)
    decoded = decode_image(data.getvalue(), ImageOptions(size=size))
    assert decoded.dtype == bool
    assert set(decoded.view("u1").ravel().tolist()) == {0, 1}


@pytest.mark.parametrize("bits", [2, 4])
def test_few_bits_of_white_zero(bits: int) -> None:
    array = np.random.default_rng(2).integers(0, 2**bits, (16, 32)).astype("u1")
    data = written(array, photometric="miniswhite", bitspersample=bits)
    np.testing.assert_array_equal(tifffile.imread(io.BytesIO(data)), array)
    check(data, NATIVE, array)


COLOURS = np.random.default_rng(4).integers(0, 256, (3, 256))
NO_DATA = 42113  # tag of GDAL


def _sparse(data: bytes, segments: str) -> bytes:
    """Return a TIFF without its first strip or tile, as GDAL leaves out those without data."""
    file = io.BytesIO(data)
    with tifffile.TiffFile(file, mode="r+b") as tiff:
        for name in ("Offsets", "ByteCounts"):
            tag = tiff.pages[0].tags[segments + name]
            tag.overwrite([0, *tag.value[1:]])
    return file.getvalue()


@pytest.mark.parametrize("options", [{"extrasamples": ["assocalpha"]}, {"compression": "jpeg"}], ids=["alpha", "jpeg"])
def test_what_is_there_of_a_sparse_page_is_like_that_of_a_whole_one(options: dict[str, Any]) -> None:
    array = np.random.default_rng(6).integers(0, 256, (32, 32, 4 if "extrasamples" in options else 3)).astype("u1")
    whole = written(array, photometric="rgb", tile=(16, 16), **options)
    for mode in ("native", "rgb", "gray"):
        found, expected = (decode_image(data, ImageOptions(mode=mode)) for data in (_sparse(whole, "Tile"), whole))
        np.testing.assert_allclose(found[16:].astype(int), expected[16:], atol=2)


@pytest.mark.parametrize("tile", [(16, 16), None])
@pytest.mark.parametrize("compression", ["zlib", None])
@pytest.mark.parametrize(
    ("dtype", "channels", "options"),
    [
        ("uint8", 1, {"photometric": "minisblack"}),
        ("uint8", 1, {"photometric": "minisblack", "extratags": [(NO_DATA, 2, 0, "7", True)]}),
        ("uint8", 1, {"photometric": "minisblack", "bitspersample": 4}),
        ("uint8", 1, {"photometric": "palette", "colormap": (COLOURS * 257).astype("u2")}),
        ("bool", 1, {"photometric": "minisblack"}),
        ("uint16", 1, {"photometric": "minisblack"}),
        ("float32", 1, {"photometric": "minisblack"}),
        ("uint8", 3, {"photometric": "rgb"}),
        ("float32", 3, {"photometric": "rgb"}),
    ],
)
def test_strips_and_tiles_that_were_never_written(
    dtype: str, channels: int, options: dict[str, Any], compression: str | None, tile: tuple[int, int] | None
) -> None:
    shape = (32, 32) if channels == 1 else (32, 32, channels)
    array = np.random.default_rng(5).integers(0, 16 if dtype != "bool" else 2, shape).astype(dtype)
    segments: dict[str, Any] = {"tile": tile} if tile else {"rowsperstrip": 16}
    packed = None if "bitspersample" in options else compression
    data = _sparse(written(array, compression=packed, **segments, **options), "Tile" if tile else "Strip")
    array[:16, : 16 if tile else 32] = 7 if "extratags" in options else 0
    check(data, NATIVE, array * np.uint8(17) if "bitspersample" in options else array)  # scaled as by Pillow
    if "colormap" in options:
        check(data, ImageOptions(mode="rgb"), COLOURS.T[array].astype("u1"))
    if dtype == "bool":
        check(data, ImageOptions(mode="gray"), np.where(array, 255, 0).astype("u1")[..., None])


@pytest.mark.parametrize("compression", ["group3", "group4", "tiff_lzw", None])
def test_faxes(compression: str | None) -> None:
    mask = np.random.default_rng(3).random((40, 48)) > 0.5
    data = saved(Image.fromarray(mask), "TIFF", compression=compression, tiffinfo={262: 0})
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        assert file.pages.first.photometric == 0
        check(data, NATIVE, file.asarray())


@pytest.mark.parametrize("compression", [None, "deflate"])  # Pillow gives the first plane of compressed ones
@pytest.mark.parametrize("dtype", ["u1", "u2"])
@pytest.mark.parametrize("planes", [2, 3, 5])
def test_planes_of_gray_are_channels(planes: int, dtype: str, compression: str | None) -> None:
    array = np.random.default_rng(4).integers(0, 200, (40, 33, planes)).astype(dtype)
    options: dict[str, Any] = {"photometric": "minisblack", "planarconfig": "separate", "compression": compression}
    check(written(np.moveaxis(array, 2, 0), **options), NATIVE, array)


@pytest.mark.parametrize("compression", [None, "deflate"])
@pytest.mark.parametrize("dtype", ["u1", "u2"])
@pytest.mark.parametrize(
    ("photometric", "extra"), [("rgb", ["unspecified"]), ("rgb", ["unassalpha", "unspecified"]), ("separated", [0])]
)
def test_channels_beside_colours_are_kept(
    photometric: str, extra: Sequence[Any], dtype: str, compression: str | None
) -> None:
    """Pillow leaves out those without a meaning, such as near infrared in pictures of the earth."""
    colours = 3 if photometric == "rgb" else 4
    array = np.random.default_rng(4).integers(0, 200, (40, 33, colours + len(extra))).astype(dtype)
    data = written(array, photometric=photometric, extrasamples=extra, compression=compression)
    check(data, NATIVE, array)
    if photometric == "rgb":
        check(data, ImageOptions(mode="rgb"), array[..., :3])


@pytest.mark.parametrize("kind", ["DIB", "PPM", "ICO"])
def test_further_formats_of_pillow(kind: str) -> None:
    data = saved(picture("RGB").resize((32, 32)), kind)
    check(data, NATIVE, np.asarray(Image.open(io.BytesIO(data))))


def test_tiff_with_webp_of_which_pillow_knows_nothing() -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (2, 20, 30, 3), np.uint8)
    data = written(pixels, photometric="rgb", compression="webp", compressionargs={"level": 100})
    expected = tifffile.imread(io.BytesIO(data))
    for page in (0, 1):
        assert np.array_equal(decode_image(data, ImageOptions(), page=page), expected[page])


def test_tiff_planes() -> None:
    array = ARRAYS["uint16 colours"]
    data = written(np.moveaxis(array, 2, 0), photometric="rgb", planarconfig="separate")
    check(data, NATIVE, array)


def test_16_bits_keep_their_dtype_in_all_modes() -> None:
    colours = ARRAYS["uint16 colours"]
    data = bytes(imagecodecs.png_encode(colours))
    check(data, ImageOptions(mode="rgb"), colours)
    gray = np.rint(colours @ np.array([0.299, 0.587, 0.114]))[..., None].astype("u2")
    check(data, ImageOptions(mode="gray"), gray)
    deep = saved(Image.fromarray(ARRAYS["uint16"]), "PNG")
    check(deep, ImageOptions(mode="gray"), ARRAYS["uint16"][..., None])
    check(deep, ImageOptions(mode="rgb"), np.repeat(ARRAYS["uint16"][..., None], 3, axis=2))


@pytest.mark.parametrize("order", ["behind each", "in front", "at the end"])  # in files of Zeiss, of cameras, pyramids
@pytest.mark.parametrize("options", [{}, {"compression": "zlib"}, {"photometric": "rgb"}], ids=str)
def test_smaller_versions_are_no_pages(tmp_path: Path, options: dict[str, Any], order: str) -> None:
    """Pillow reads gray pages, tifffile colours of 16 bits."""
    shape = (3, 64, 64, 3) if options.get("photometric") else (3, 64, 64)
    pixels = np.random.default_rng(1).integers(0, 60_000, shape).astype("u2")
    smaller = [(page, {"subfiletype": 1}) for step in (2, 4) for page in pixels[:, ::step, ::step]]
    pages: list[tuple[Any, dict[str, Any]]] = [(page, {}) for page in pixels]
    images = {
        "behind each": [pages[i // 3] if i % 3 == 0 else smaller[i // 3 + 3 * (i % 3 - 1)] for i in range(9)],
        "in front": smaller + pages,
        "at the end": pages + smaller,
    }
    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path) as file:
        for page, kind in images[order]:
            file.write(page, contiguous=False, metadata=None, **{"photometric": "minisblack", **options, **kind})
    data = path.read_bytes()
    assert image_info(data, NATIVE).pages == 3
    for number, page in enumerate(pixels):
        np.testing.assert_array_equal(decode_image(data, NATIVE, page=number), page)
    np.testing.assert_array_equal(md.open_dataset(path, inputs="image").load()["image"], pixels)
    np.testing.assert_array_equal(md.open_dataset(path, inputs="image", pages="first").load()["image"], pixels[:1])


def test_pages_of_a_tiff() -> None:
    images = [picture(size=(20 + 3 * i, 17), number=i) for i in range(5)]
    data = saved(images[0], "TIFF", save_all=True, append_images=images[1:])
    assert image_info(data, NATIVE).pages == 5
    assert image_info(data, NATIVE, count_pages=False).pages == 1
    for number, image in enumerate(images):
        np.testing.assert_array_equal(decode_image(data, NATIVE, page=number), np.asarray(image))
    with pytest.raises(DataError, match=r"no such page.*a\.tif"):
        decode_image(data, NATIVE, "a.tif", page=5)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_frames_have_one_shape(kind: str, mode: str) -> None:
    images = [picture(mode, number=i) for i in range(4)]
    if mode == "RGBA":
        for image in images:
            image.putalpha(Image.fromarray((np.asarray(image)[..., 0] > 90).astype("u1") * 255))
    options = {"lossless": True} if kind == "WEBP" else {}
    data = saved(images[0], kind, save_all=True, append_images=images[1:], duration=30, **options)
    reference = Image.open(io.BytesIO(data))
    shared = "RGBA" if reference.mode == "RGBA" or "transparency" in reference.info else "RGB"
    assert shared == mode or kind == "WEBP"  # whose header announces alpha in any case
    assert image_info(data, NATIVE).pages == reference.n_frames == 4
    for number in range(4):
        reference.seek(number)
        expected = np.asarray(reference.convert(shared))
        np.testing.assert_array_equal(decode_image(data, NATIVE, page=number), expected)
    with mock.patch.object(pillow, "open_image", wraps=pillow.open_image) as opened:
        frames = FrameFile()
        for number in (0, 1, 3, 2, 2, 0):
            found = decode_image(data, NATIVE, page=number, frames=frames)
            np.testing.assert_array_equal(found, decode_image(bytes(bytearray(data)), NATIVE, page=number))
        assert opened.call_count == (12 if kind == "PNG" else 1 + 6)  # the file itself once


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(10))
def test_orientation(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(picture(), kind, exif=exif)
    check(data, NATIVE, np.asarray(shown(data)))
    check(data, ImageOptions(mode="rgb", size=(29, 40)), _resized(shown(data), (29, 40), "bilinear"))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_of_numbers_that_pillow_would_cut(orientation: int) -> None:
    colours = ARRAYS["uint16 colours"]
    exif = Image.Exif()
    exif[0x0112] = orientation
    eight = saved(Image.fromarray((colours >> 8).astype("u1")), "PNG", exif=exif)
    data = written(colours, photometric="rgb", extratags=[(0x0112, "H", 1, orientation, True)])
    assert np.array_equal(decode_image(data, NATIVE) >> 8, np.asarray(shown(eight)))
    assert image_info(data, NATIVE).shape == decode_image(data, NATIVE).shape


# Options


def _resized(image: Image.Image, size: tuple[int, int], method: str) -> NDArray[Any]:
    return np.asarray(image.resize(size[::-1], RESAMPLING[method]))


@pytest.fixture(scope="module")
def compiled() -> None:
    """Compile the loops beforehand; without it the first images are resized by Pillow."""
    compile_loops()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("method", list(RESAMPLING))
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "1", "LA"])
def test_sizes(mode: str, method: str) -> None:
    image = picture(mode, (101, 83))
    data = saved(image, "PNG")
    image = shown(data)
    for size in ((83, 101), (40, 51), (200, 150), (83, 7), (7, 101), (20, 300), (166, 30), (1, 1)):
        check(data, ImageOptions(size=size, resample=method), _resized(image, size, method))


def test_the_first_images_do_not_wait_for_the_compiler() -> None:
    code = (
        "import sys, threading\n"
        "import numpy as np\n"
        "from matex_data.readers.images.decoding.resample import takes\n"
        "pixels = np.zeros((9, 9, 3), 'u1')\n"
        "assert not takes(pixels, (5, 5), 'bilinear')\n"
        "[thread.join() for thread in threading.enumerate() if thread is not threading.current_thread()]\n"
        "assert takes(pixels, (5, 5), 'bilinear')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("compiled")
def test_compiled_loops_serve_gray_and_colours() -> None:
    for shape in ((9, 9), (9, 9, 3)):
        assert takes(np.zeros(shape, "u1"), (5, 5), "bilinear")
        assert not takes(np.zeros(shape, "u1"), (1, 9), "bilinear")  # the vertical pass comes first in Pillow
        assert not takes(np.zeros(shape, "u2"), (5, 5), "bilinear")


@pytest.mark.parametrize("method", list(RESAMPLING))
@pytest.mark.parametrize("name", ["uint16", "float32", "uint16 colours"])
def test_sizes_of_other_dtypes(name: str, method: str) -> None:
    array = ARRAYS[name]
    data = written(array, photometric="rgb" if array.ndim == 3 else "minisblack")
    size = (10, 40)
    planes = [array] if array.ndim == 2 else [array[..., i] for i in range(3)]
    resized = [_resized(Image.fromarray(plane.astype("f4")), size, method) for plane in planes]
    expected = resized[0] if array.ndim == 2 else np.stack(resized, axis=2)
    if array.dtype == np.uint16:
        expected = np.clip(np.rint(expected), 0, 65535).astype("u2")
    check(data, ImageOptions(size=size, resample=method), expected)


def test_large_jpegs_are_scaled_down_while_they_are_decoded() -> None:
    image = picture(size=(640, 480)).resize((1280, 960), Image.Resampling.BICUBIC)
    data = saved(image, "JPEG", quality=90)
    found = decode_image(data, ImageOptions(size=(120, 100)))
    expected = _resized(shown(data), (120, 100), "bilinear")
    assert found.shape == expected.shape
    assert 0 < np.abs(found.astype(int) - expected).mean() < 1.5
    exact = decode_image(data, ImageOptions(size=(120, 100), resample="nearest"))
    np.testing.assert_array_equal(exact, _resized(shown(data), (120, 100), "nearest"))


def test_dtype_casts_and_never_scales() -> None:
    data = seeds("png")[0]
    check(data, ImageOptions(dtype=np.dtype("f4")), np.asarray(shown(data)).astype("f4"))
    assert image_info(data, ImageOptions(dtype=np.dtype("f4"))).attributes == {"mode": "RGB", "value_range": "0 to 255"}
    assert image_info(seeds("png")[5], NATIVE).attributes["value_range"] == "0 to 1"
    assert "value_range" not in image_info(written(ARRAYS["float32"]), NATIVE).attributes


def test_options_are_checked() -> None:
    wrong: list[dict[str, Any]] = [
        {"mode": "RGB"},
        {"size": (0, 4)},
        {"size": 224},
        {"size": (2.5, 4)},
        {"resample": "cubic"},
        {"dtype": "S4"},
        {"max_pixels": 0},
    ]
    for options in wrong:
        with pytest.raises(FormatError, match=r"expected: (.|\n)*found: "):
            ImageOptions(**options)
    options = ImageOptions(mode="rgb", size=[8, 9], dtype="float32")  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(options)) == options
    assert hash(options) == hash(ImageOptions(mode="rgb", size=(8, 9), dtype=np.dtype("f4")))


# Errors


@pytest.mark.parametrize("kind", KINDS)
def test_bombs_are_refused_before_they_are_decoded(kind: str) -> None:
    limited = ImageOptions(max_pixels=500)
    for data in seeds(kind):
        for call in (decode_image, image_info):
            with pytest.raises(DecodeError, match="max_pixels=500"):
                call(data, limited, "bomb")


def test_the_limit_may_be_above_that_of_pillow_where_pillow_lets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DecodeError, match="MAX_IMAGE_PIXELS=100 "):
        decode_image(seeds("tiff")[0], NATIVE)
    for kind in ("jpeg", "png", "bmp", "fits"):
        data = seeds(kind)[0]
        assert decode_image(data, NATIVE).shape == image_info(data, NATIVE).shape


def test_a_tiff_with_many_samples_is_a_bomb() -> None:
    data = written(np.zeros((20, 30, 40), "u2"), photometric="minisblack", planarconfig="contig", compression="zlib")
    with pytest.raises(DecodeError, match="max_pixels=700"):
        decode_image(data, ImageOptions(max_pixels=700), "many.tif")


@pytest.mark.parametrize("data", [b"", b"a", b"no image", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"II*\0", b"BM" * 99])
def test_what_is_no_image_is_refused(data: bytes) -> None:
    for call in (decode_image, image_info):
        with pytest.raises(DataError, match=r"x\.jpg") as caught:
            call(data, NATIVE, "x.jpg")
        assert caught.value.file == "x.jpg"
    with pytest.raises(FormatError):
        image_info(data, NATIVE)


def test_a_jpeg_of_more_lines_than_libjpeg_decodes_is_refused() -> None:
    """Its data end early; other builds of the library would fill the rest with gray."""
    stream = io.BytesIO()
    Image.new("L", (40, 40), 9).save(stream, "jpeg")
    data = bytearray(stream.getvalue())
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 7] = b"\xff\xff"
    with pytest.raises(OSError, match="broken data stream"):
        Image.open(io.BytesIO(data)).load()
    with pytest.raises(DataError, match="tall"):
        decode_image(bytes(data), NATIVE, "tall.jpg")


def test_lack_of_memory_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(imagecodecs, "jpeg8_decode", fail)
    with pytest.raises(MemoryError):
        decode_image(seeds("jpeg")[0], NATIVE)


def test_no_warnings_and_no_output() -> None:
    """A file with damaged Exif data, of which Pillow warns, and one of which tifffile logs errors."""
    code = (
        "import numpy as np\n"
        "from matex_data.readers.images.decoding import *\n"
        "from tests.fuzz.images import seeds\n"
        "for kind in ('jpeg', 'png', 'tiff', 'gif', 'webp', 'fits'):\n"
        "    for data in seeds(kind):\n"
        "        data = bytearray(data)\n"
        "        data[40:60] = bytes(20)\n"
        "        try: decode_image(data, ImageOptions())\n"
        "        except Exception as error: assert 'Error' in type(error).__name__\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


def test_many_threads() -> None:
    files = [data for kind in KINDS for data in seeds(kind)] * 4
    options = ImageOptions(mode="rgb", size=(20, 20))
    alone = [decode_image(data, options) for data in files]
    with ThreadPoolExecutor(8) as pool:
        for found, expected in zip(pool.map(lambda data: decode_image(data, options), files), alone, strict=True):
            np.testing.assert_array_equal(found, expected)
