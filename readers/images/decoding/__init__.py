"""Decoding of images: the bytes of a file to an array, by Pillow or by a decoder that gives the same pixels."""

from __future__ import annotations

from matex_data.readers.images.decoding.decode import decode_image, image_info
from matex_data.readers.images.decoding.options import MAX_PIXELS, ImageInfo, ImageOptions
from matex_data.readers.images.decoding.pillow import FrameFile

__all__ = ["MAX_PIXELS", "FrameFile", "ImageInfo", "ImageOptions", "decode_image", "image_info"]
