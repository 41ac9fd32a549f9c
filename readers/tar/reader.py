"""Tar shards in the layout of WebDataset: the members of one key are one sample, a field for each extension.

Format: ustar and pax, POSIX.1-2001, https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html, named as
WebDataset does, https://github.com/webdataset/webdataset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np

from matex_data.errors import DataError, FormatError
from matex_data.index.model import Index
from matex_data.readers.catalogue import Catalogue, file_of_table
from matex_data.readers.decoding import narrow
from matex_data.readers.formats import located
from matex_data.readers.images.decoding import MAX_PIXELS, ImageInfo, ImageOptions, image_info
from matex_data.readers.images.folders.headers import Headers, differ
from matex_data.readers.tar.compressed import CompressedTarRows
from matex_data.readers.tar.fields import (
    ARRAYS,
    IMAGES,
    INTEGERS,
    ArrayMember,
    BytesMember,
    ImageMember,
    IntegerMember,
    MemberDecoder,
    kind_of,
)
from matex_data.readers.tar.headers import Archive, ByteRange, Shard, open_archive, read_shard
from matex_data.readers.tar.rows import TarRows
from matex_data.storage.files import size_of_open

HEAD_BYTES = 16 << 10  # of a member, which hold the header of most images
WHOLE_HEADERS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"BM")  # JPEG, PNG, BMP: facts about the image come first
MASKS = frozenset(("mask", "masks", "seg", "segmentation"))


def index(
    path: str,
    names: Sequence[str] | None = None,
    *,
    mode: str = "native",
    size: tuple[int, int] | None = None,
    resample: str = "bilinear",
    dtype: Any = None,
    max_pixels: int = MAX_PIXELS,
    crop_to_aspect_ratio: bool = False,
    pad_to_aspect_ratio: bool = False,
    ragged: bool = False,
    masks: Sequence[str] | None = None,
    raw: Sequence[str] = (),
) -> Index:
    """Index a tar shard. One field for each extension: "jpg", "cls", "json", "input.png", ...

    Images are arrays; "cls", "id", "index" and the like int64; "npy" arrays of one shape; all others bytes. Without
    ``size``, or with ``mode="native"``, the headers of all images are read, about 16 KiB each.

    Parameters
    ----------
    names : selected fields; None: all.
    mode, size, resample, dtype, max_pixels, crop_to_aspect_ratio, pad_to_aspect_ratio : of the images, see
        `ImageOptions`.
    ragged : images of different sizes are delivered as they are.
    masks : fields whose images hold numbers of classes: these are delivered as stored, and resized with "nearest".
        None: those with the word "mask" or "seg" in their extension, such as "seg.png".
    raw : fields that are delivered as bytes, whatever their extension.

    Raises
    ------
    FieldNotFound : there is no such field.
    FormatError : the shard is damaged or truncated, a sample lacks a field, or images differ in size.
    DecodeError : the shard is compressed, and does not decompress.
    """
    options = ImageOptions(mode, size, resample, dtype, max_pixels, crop_to_aspect_ratio, pad_to_aspect_ratio)
    if ragged and size is not None:
        raise FormatError(
            "images of one size are not ragged",
            expected="size= or ragged=True",
            found="both",
            remedy="leave out one of them",
        )
    with open_archive(path) as archive:
        shard = read_shard(path, archive.file)
        source = _Source(path, archive.file, list(shard.rows))

        def decoder(name: str, ranges: Sequence[ByteRange]) -> MemberDecoder:
            if name in raw:
                return BytesMember()
            if kind_of(name) not in IMAGES:
                return source.decoder(name, ranges)
            is_mask = name in masks if masks is not None else not MASKS.isdisjoint(name.split("."))
            chosen = replace(options, mode="native", resample="nearest", dtype=None) if is_mask else options
            return source.images(name, ranges, chosen, ragged)

        def make(names: Sequence[str]) -> Index:
            columns = {name: _column(path, shard, name) for name in names}
            decoders = {name: decoder(name, ranges) for name, ranges in columns.items()}
            return _index(path, archive, decoders, columns)

        found = Catalogue(path, shard.members, make)
        found.chosen([*(masks or ()), *raw])
        return found.index(names)


def _column(path: str, shard: Shard, name: str) -> list[ByteRange]:
    """Return the byte range of the field's member of each sample; raise ``FormatError`` if one has none."""
    members = shard.members[name]
    if len(members) < len(shard.rows):
        key, row = next((key, row) for key, row in shard.rows.items() if row not in members)
        raise FormatError(
            "a sample of the shard lacks a member that others have",
            file=path,
            field=name,
            row=row,
            expected=f"'{key}.{name}', as each of {len(members)} other samples has one",
            found=", ".join(f"'{key}.{other}'" for other, rows in shard.members.items() if row in rows),
            remedy="select fields that all samples have with inputs= and targets=, or write the shard again",
        )
    return [members[row] for row in range(len(shard.rows))]


def _index(
    path: str, archive: Archive, decoders: dict[str, MemberDecoder], columns: dict[str, list[ByteRange]]
) -> Index:
    ranges = np.array(list(columns.values()), np.int64).reshape(len(columns), -1, 2)
    offset, nbytes = (narrow(ranges[:, :, i].T) for i in range(2))
    inner = {name: decoder.nbytes or 0 for name, decoder in decoders.items() if isinstance(decoder, ImageMember)}
    fields = {name: decoder.field(name) for name, decoder in decoders.items()}
    if not archive.packing:
        rows = TarRows(path, decoders, offset, nbytes, inner)
    else:
        unpacked = size_of_open(archive.file)
        rows = CompressedTarRows(path, decoders, offset, nbytes, inner, archive.packing, archive.stored, unpacked)
        # A window has a limit on its bytes, so that no more shards than that are in memory for its samples.
        share = unpacked // rows.rows
        fields = {name: replace(of, scratch_bytes=max(0, share - of.row_bytes)) for name, of in fields.items()}
    return file_of_table(path, fields, rows)


@dataclass(frozen=True)
class _Source:
    """An open shard, and the keys of its samples."""

    path: str
    file: IO[bytes]
    keys: list[str]

    def read(self, where: ByteRange, most: int | None = None) -> bytes:
        """Return the bytes of a member, at most ``most`` of them."""
        self.file.seek(where.offset)
        return self.file.read(where.nbytes if most is None else min(most, where.nbytes))

    def decoder(self, name: str, ranges: Sequence[ByteRange]) -> MemberDecoder:
        """Return the decoder of a field that is no image."""
        if kind_of(name) in INTEGERS:
            return IntegerMember()
        return ArrayMember.like(self.read(ranges[0]), self.path, name) if kind_of(name) in ARRAYS else BytesMember()

    def images(self, name: str, ranges: Sequence[ByteRange], options: ImageOptions, ragged: bool) -> MemberDecoder:
        """Return the decoder of images, after reading as many headers as it takes to know their shape.

        A damaged image is left to the decoding, which names it.

        Raises
        ------
        FormatError : images differ in size or kind.
        DataError : no image can be read.
        """
        known = Headers()
        for row, where in enumerate(ranges):
            try:
                info = self.info(where, options)
            except DataError as error:
                at: dict[str, Any] = {"file": self.path, "field": name, "row": row, "byte": where.offset}
                problem = f"{error.problem}, in the member '{self.keys[row]}.{name}'"
                remedy = f"deliver the field as bytes: raw=[{name!r}]"
                known.error = known.error or located(error, FormatError, remedy, problem, **at)
                continue
            known.add(row, info, info.shape[2:] if ragged else info.shape)
            if len(known.kinds) > 1:
                (first, one), (_, other) = known.kinds.values()
                names = f"{self.keys[first]}.{name}", f"{self.keys[row]}.{name}"
                raise differ(self.path, names, one, other, ragged).at_row(row)
            if options.size is not None and options.mode != "native" and not ragged:
                break
        if not known.kinds:
            raise known.error or FormatError("the shard has no images", file=self.path, field=name)
        ((_, info),) = known.kinds.values()
        return ImageMember(options, info, known.nbytes if ragged else None)

    def info(self, where: ByteRange, options: ImageOptions) -> ImageInfo:
        """Return what the header of an image says; the whole image is read where its first bytes do not suffice."""
        head = self.read(where, HEAD_BYTES)
        if len(head) < where.nbytes and head.startswith(WHOLE_HEADERS):
            try:
                return image_info(head, options, count_pages=False)
            except DataError:
                pass
        return image_info(self.read(where), options, count_pages=False)
