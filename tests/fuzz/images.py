"""Damaged images: decoded as Pillow decodes them, or refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import tifffile
from astropy.io import fits
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageOps

from matex_data import DataError
from matex_data.readers.images.decoding import ImageOptions, decode_image
from tests.fuzz.readings import (
    EQUAL,
    LIBRARY_REFUSES,
    RAW,
    WRONG,
    Verdict,
    attempt,
    compare,
    refusal,
    theirs,
)

KINDS = ("jpeg", "png", "tiff", "gif", "bmp", "webp", "fits")
JPEG_LEVELS = 2
"""Difference from Pillow that another JPEG decoder may make."""
OPTIONS = ImageOptions(max_pixels=20_000_000)

Image.MAX_IMAGE_PIXELS = OPTIONS.max_pixels // 2  # Pillow refuses what has twice as many


def check_image(kind: str, path: Path, stage: Callable[[str], None]) -> Verdict:
    """Decode the first page of a file by this package and by the libraries, and compare."""
    data = path.read_bytes()
    stage("library")
    expected = [theirs(lambda read=read: read(data)) for read in READERS[kind]]
    stage("ours")
    found = attempt(lambda: decode_image(data, OPTIONS, path.name))  # type: ignore[arg-type,return-value]
    if isinstance(found, Verdict):
        return found
    if isinstance(found, DataError):
        if found.file != path.name:
            return Verdict(RAW, f"the error does not name the file: {found}")
        return refusal(found, expected[0])
    verdicts = [compare(kind, found, other, True, _same(kind)) for other in expected]  # type: ignore[arg-type]
    if any(verdict.outcome == EQUAL for verdict in verdicts):
        return Verdict(EQUAL)
    wrong = [verdict for verdict in verdicts if verdict.outcome != LIBRARY_REFUSES] or verdicts
    return Verdict(WRONG, "\n".join(verdict.text for verdict in wrong))


def _same(kind: str) -> Callable[[Any, Any], bool]:
    levels = JPEG_LEVELS if kind == "jpeg" else 0

    def same(found: NDArray[Any], expected: NDArray[Any]) -> bool:
        if found.shape != expected.shape or found.dtype != expected.dtype.newbyteorder("="):
            return False
        if levels:
            return bool(np.abs(found.astype(int) - expected).max() <= levels)
        return bool(np.array_equal(found, expected, equal_nan=found.dtype.kind == "f"))

    return same


def _pillow(data: bytes) -> Any:
    image = Image.open(io.BytesIO(data))
    inverted = image.format == "TIFF" and image.mode in ("1", "L") and image.tag_v2.get(262) == 0
    image.load()
    try:
        image = ImageOps.exif_transpose(image)
    except Exception:  # damaged Exif data
        image = image.copy()
    return ~np.asarray(image) if inverted else np.asarray(image)  # Pillow inverts numbers of which the least is white


def _frame(mode: str) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        image = Image.open(io.BytesIO(data))
        if getattr(image, "n_frames", 1) < 2 or mode != _frame_mode(image):
            raise ValueError("one frame")
        image.seek(0)
        return np.asarray(ImageOps.exif_transpose(image.convert(mode)))

    return read


def _frame_mode(image: Image.Image) -> str:
    return "RGBA" if image.mode in ("RGBA", "LA") or "transparency" in image.info else "RGB"


def _deep_png(data: bytes) -> Any:
    """Return 16-bit colours, if their upper bytes are the colours of Pillow."""
    array, shown = imagecodecs.png_decode(data), np.asarray(Image.open(io.BytesIO(data)))
    if array.dtype != np.uint16:
        raise ValueError("8 bits")
    if array.shape[2] == 2:
        shown = shown[..., [0, -1]]
    else:
        array = array[..., : shown.shape[2]]
    np.testing.assert_array_equal(array >> 8, shown)
    return array


def _tiff(data: bytes) -> Any:
    page = tifffile.TiffFile(io.BytesIO(data)).pages[0]
    if page.imagewidth * page.imagelength > OPTIONS.max_pixels:
        raise ValueError("too large")
    array = page.asarray()
    if page.axes == "SYX":
        array = np.moveaxis(array, 0, 2)
    array = array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array
    orientation = page.tags.valueof(274, 1)
    turned = {2: (0, 1), 3: (2, 0), 4: (2, 1), 5: (3, 1), 6: (3, 0), 7: (1, 1), 8: (1, 0)}.get(orientation, (0, 0))
    array = np.rot90(array, turned[0])
    return np.fliplr(array) if turned[1] else array


def _fits(data: bytes) -> Any:
    for part in fits.open(io.BytesIO(data), memmap=False):
        if part.is_image and part.header.get("NAXIS") and np.prod(part.shape):
            if np.prod(part.shape) > OPTIONS.max_pixels:
                raise ValueError("too large")
            return np.asarray(part.data).reshape(part.shape[-2:])
    raise ValueError("no image")


READERS: dict[str, tuple[Callable[[bytes], Any], ...]] = {
    "jpeg": (_pillow,),
    "png": (_pillow, _deep_png, _frame("RGB"), _frame("RGBA")),
    "tiff": (_pillow, _tiff),
    "gif": (_pillow, _frame("RGB"), _frame("RGBA")),
    "bmp": (_pillow,),
    "webp": (_pillow, _frame("RGB"), _frame("RGBA")),
    "fits": (_fits,),
}


def picture(mode: str = "RGB", size: tuple[int, int] = (40, 29), number: int = 0) -> Image.Image:
    """Return a drawing with edges, slopes and noise."""
    width, height = size
    y, x = np.mgrid[:height, :width]
    noise = np.random.default_rng(number).integers(0, 20, (height, width, 3))
    colours = np.stack([x * 5, y * 7, (x + y + number * 30) * 3], axis=2) % 236 + noise
    image = Image.fromarray(colours.astype("u1"))
    ImageDraw.Draw(image).ellipse((5 + number, 4, 25 + number, 20), fill=(250, 40, 90), outline=(0, 0, 0))
    return image.convert(mode)


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    memory = io.BytesIO()
    image.save(memory, kind, **options)
    return memory.getvalue()


def _turned(number: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = number
    return exif


def _frames(mode: str = "RGB") -> dict[str, Any]:
    return {"save_all": True, "append_images": [picture(mode, number=i) for i in (1, 2)], "duration": 40}


def _jpegs() -> list[bytes]:
    return [
        _saved(picture(), "JPEG", quality=90),
        _saved(picture("L"), "JPEG"),
        _saved(picture("CMYK"), "JPEG"),
        _saved(picture(), "JPEG", progressive=True, optimize=True),
        _saved(picture(), "JPEG", restart_marker_blocks=2, subsampling=0),
        _saved(picture(), "JPEG", exif=_turned(6), comment=b"a comment"),
        _saved(picture(), "JPEG", keep_rgb=True),
    ]


def _pngs() -> list[bytes]:
    deep = (np.arange(20 * 30 * 4).reshape(20, 30, 4) * 977 % 65536).astype("u2")
    return [
        *(_saved(picture(mode), "PNG") for mode in ("RGB", "RGBA", "L", "LA", "P", "1")),
        _saved(Image.fromarray(deep[..., 0]), "PNG"),
        _saved(picture(), "PNG", exif=_turned(8)),
        _saved(picture("P"), "PNG", transparency=3),
        _saved(picture("RGBA"), "PNG", **_frames("RGBA")),
        bytes(imagecodecs.png_encode(deep)),
        bytes(imagecodecs.png_encode(deep[..., :3].copy())),
    ]


def _tiffs() -> list[bytes]:
    found = [
        _saved(picture(mode), "TIFF", compression=compression)
        for mode, compression in (
            ("RGB", None),
            ("RGB", "tiff_lzw"),
            ("RGB", "tiff_adobe_deflate"),
            ("RGB", "jpeg"),
            ("L", "packbits"),
            ("P", None),
            ("1", "group4"),
            ("CMYK", None),
            ("F", None),
        )
    ]
    numbers = (np.arange(24 * 31 * 3).reshape(24, 31, 3) * 977 % 65536).astype("u2")
    for array, options in (
        (numbers, {"photometric": "rgb"}),
        (numbers, {"photometric": "rgb", "compression": "zlib", "predictor": True, "byteorder": ">"}),
        (np.moveaxis(numbers, 2, 0), {"photometric": "rgb", "planarconfig": "separate", "compression": "lzw"}),
        (numbers[..., 0].astype("f8"), {"tile": (16, 16), "compression": "zlib"}),
        (numbers[..., 0], {"bigtiff": True, "extratags": [(274, "H", 1, 6, True)]}),
        (numbers[..., 0].astype("u4") << 15, {"rowsperstrip": 5}),
        (numbers[..., 0] > 9000, {}),
        (numbers[..., 0].astype("u1"), {"photometric": "miniswhite", "compression": "lzw"}),
    ):
        memory = io.BytesIO()
        tifffile.imwrite(memory, array, metadata=None, **options)
        found.append(memory.getvalue())
    return [*found, _saved(picture(), "TIFF", **_frames())]


def _fitses() -> list[bytes]:
    numbers = (np.arange(24 * 31).reshape(24, 31) * 977 % 65536).astype("u2")
    found = []
    for parts in (
        [fits.PrimaryHDU(numbers)],
        [fits.PrimaryHDU(numbers.astype("f4"))],
        [fits.PrimaryHDU(), fits.ImageHDU(numbers.astype("i2"))],
        [fits.PrimaryHDU(), fits.CompImageHDU(numbers.astype("i2"), compression_type="RICE_1")],
        [fits.PrimaryHDU(), fits.CompImageHDU(numbers.astype("i4"), compression_type="GZIP_1")],
    ):
        memory = io.BytesIO()
        fits.HDUList(parts).writeto(memory)
        found.append(memory.getvalue())
    return found


def seeds(kind: str) -> list[bytes]:
    """Return undamaged small files of a kind."""
    if kind == "gif":
        single = [_saved(picture(mode), "GIF") for mode in ("L", "P", "RGB")]
        return [*single, _saved(picture("P"), "GIF", transparency=5), _saved(picture(), "GIF", **_frames())]
    if kind == "bmp":
        return [_saved(picture(mode), "BMP") for mode in ("1", "L", "P", "RGB", "RGBA")]
    if kind == "webp":
        plain = [_saved(picture(mode), "WEBP", lossless=lossless) for mode in ("RGB", "RGBA") for lossless in (0, 1)]
        return [*plain, _saved(picture(), "WEBP", exif=_turned(3)), _saved(picture(), "WEBP", **_frames())]
    return {"jpeg": _jpegs, "png": _pngs, "tiff": _tiffs, "fits": _fitses}[kind]()
