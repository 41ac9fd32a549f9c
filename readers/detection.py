"""Detection of the format of a file: by magic bytes, the begin of a text and the name, and then by the format itself.

Formats that contain others, such as HDF5, and those that nothing but their whole text tells, such as CSV, have a
function of their own for that: ``Format.kind``. Formats without a reader, and the tools that convert their files, are
those of the table ``unsupported.toml`` beside this module, in which they are tried in order.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from matex_data.errors import FormatError
from matex_data.readers.formats import all_formats, format_named, known_formats, load_function
from matex_data.readers.text import compression
from matex_data.storage.files import is_folder, open_binary, reading

PROBLEM = "there is no reader for files of this format"


@dataclass(frozen=True)
class UnsupportedFormat:
    """Recognition of a format without a reader.

    Parameters
    ----------
    title : description of its files.
    remedy : conversion of a file to a format that is read; ``{file}`` and ``{stem}`` stand for its name, with and
        without its suffix.
    begin : regular expression that the first bytes match, of any of which ``.`` is one; "": nothing but the name tells.
    suffixes : lower-case ends of file names, which decide where nothing else tells a format.
    folder : names in a directory, all of which a data set of this format has; such a data set is no single file.
    decompresses : the tool of ``remedy`` reads compressed files, too.
    preamble : ``begin`` lies behind bytes that the writer chooses, such as those at the begin of a TIFF file.
    """

    title: str
    remedy: str
    begin: str = ""
    suffixes: Sequence[str] = ()
    folder: Sequence[str] = ()
    decompresses: bool = False
    preamble: bool = False

    def matches_content(self, head: bytes) -> bool:
        """Return whether a file that starts with ``head`` is of this format."""
        return bool(self.begin) and re.match(self.begin.encode(), head, re.DOTALL) is not None

    def matches_name(self, path: str) -> bool:
        """Return whether the file has a suffix of this format."""
        return path.lower().endswith(tuple(self.suffixes))

    def matches_folder(self, names: Set[str]) -> bool:
        """Return whether a directory with files and directories of these names is a data set of this format."""
        return bool(self.folder) and names >= set(self.folder)

    def error(self, path: str, known: Iterable[str], packing: str = "") -> FormatError:
        """Return the error for a file of this format.

        Parameters
        ----------
        known : names of the formats that are read.
        packing : compression that was undone to recognize it, such as "gzip"; "" if there is none.
        """
        name = Path(path).name
        stem = name.split(".")[0] or name
        unpack = "decompress it, then " if packing and not self.decompresses else ""
        return FormatError(
            PROBLEM,
            file=path,
            expected=f"one of {list(known)}",
            found=f"{self.title}, compressed by {packing}" if packing else self.title,
            remedy=unpack + self.remedy.format(file=name, stem=stem),
        )


@cache
def unsupported_formats() -> tuple[UnsupportedFormat, ...]:
    """Return the formats without a reader, in the order in which they are tried."""
    table = tomllib.loads(Path(__file__).with_name("unsupported.toml").read_text("utf-8"))
    return tuple(UnsupportedFormat(**format) for format in table["format"])


HEAD_BYTES = 64 << 10
"""Bytes at the start of a file that `detect` examines."""


def has_known_name(path: str) -> bool:
    """Return whether the file name tells the format, and the file is not a sidecar of another file."""
    formats = all_formats().values()
    return any(format.matches_name(path) for format in formats) and not any(f.is_sidecar(path) for f in formats)


def files_of_folder(paths: Sequence[str]) -> list[str]:
    """Return the files of a directory that are data: those whose names tell a format, without sidecars; else all.

    Pictures beside files of other formats are left out: they illustrate these.
    """
    known = [path for path in paths if has_known_name(path)]
    single = [format for format in all_formats().values() if format.folder is None]
    data = [path for path in known if any(format.matches_name(path) for format in single)]
    return data or known or list(paths)


def folder_format(path: str, name: str | None = None, options: Mapping[str, Any] | None = None) -> str | None:
    """Return the format whose data sets are directories, if the directory is one; None for files and other directories.

    Parameters
    ----------
    name : of the format that the user asks for; None: any.
    options : of the reader; of those that choose another format for its files, the directory is none.
    """
    if not is_folder(path):
        return None
    if name is not None:
        return name if format_named(name).folder is not None else None
    for format, known in all_formats().items():
        if known.folder is not None and load_function(format, known.folder)(path):
            return format if not options or _kind(format, path, b"", options) == format else None
    return None


def data_folders(paths: Sequence[str]) -> list[str]:
    """Return the directories among the paths that are data sets as a whole, as their names tell, such as ``a.zarr``."""
    named = [format for format in all_formats().values() if format.folder is not None]
    likely = [path for path in paths if any(format.matches_name(path) for format in named)]
    return [path for path in likely if folder_format(path) is not None]


def detect(path: str, head: bytes, options: Mapping[str, Any] | None = None) -> str:
    """Return the name of the format of a file.

    Magic bytes decide first, also those of formats without a reader, then the begin of the text, then the name; then
    the format itself says which of its kinds the file is of, see ``Format.kind``. Text tables have neither bytes nor a
    name that tells them: all of ``head`` is parsed.

    Parameters
    ----------
    head : the first `HEAD_BYTES` of the file.
    options : of the reader, given by the user.

    Raises
    ------
    FormatError : neither the content nor the name tells the format, or there is no reader for it.
    """
    formats = all_formats()
    texts = {name: format for name, format in formats.items() if format.guessed}
    others = {name: format for name, format in formats.items() if not format.guessed}
    by_name = [name for name, format in formats.items() if format.matches_name(path)]
    by_magic = [name for name, format in others.items() if format.matches_magic(head)]
    by_both = [name for name in by_name if name in by_magic]
    by_magic.sort(key=lambda name: -formats[name].magic_offset(head))  # behind a preamble, which may look like any file
    if by_magic and not by_both and not formats[by_magic[0]].magic_offset(head):
        _refuse_content(path, head, head, by_name, [format for format in unsupported_formats() if format.preamble])
    text = b"" if by_magic else compression.plain_head(head)
    by_text = [name for name, format in others.items() if format.matches_text(text)]
    by_name_alone = [name for name in by_name if name in others and not formats[name].magic]
    for name in (*by_both, *by_magic, *by_text, *by_name_alone):
        return _kind(name, path, head, options) or name
    _refuse_content(path, head, text, by_name)
    for name in by_name:
        if name in others:
            return name
    for name in texts:
        kind = _kind(name, path, head, options)
        if kind is not None:
            return kind
    for unsupported in unsupported_formats():
        if unsupported.matches_name(path):
            raise unsupported.error(path, known_formats())
    raise _unknown_format(path, head)


def _kind(name: str, path: str, head: bytes, options: Mapping[str, Any] | None) -> str | None:
    """Return what a format says of a file that may be of it."""
    address = format_named(name).kind
    if address is None:
        return name
    kind: str | None = load_function(name, address)(path, head, options or {})
    return kind


def refuse_folder(path: str, names: Set[str]) -> None:
    """Raise ``FormatError`` for a directory that is a data set of a format without a reader.

    Parameters
    ----------
    names : of all files and directories in it.
    """
    for unsupported in unsupported_formats():
        if unsupported.matches_folder(names):
            raise unsupported.error(path, known_formats())


def _refuse_content(
    path: str, head: bytes, text: bytes, by_name: Sequence[str], among: Sequence[UnsupportedFormat] | None = None
) -> None:
    """Raise ``FormatError`` for a file of a format without a reader, or one that is compressed as a whole.

    Parameters
    ----------
    text : ``head`` after decompression.
    by_name : formats of its name; their readers decompress their files.
    among : the formats without a reader; None: all.
    """
    packing = compression.stored_as(head, "")
    for unsupported in unsupported_formats() if among is None else among:
        if unsupported.matches_content(text):
            raise unsupported.error(path, known_formats(), packing)
    for name, format in all_formats().items() if packing else ():
        if name not in by_name and format.matches_magic(text):
            raise FormatError(
                PROBLEM,
                file=path,
                expected=f"{name} files as they are",
                found=f"a file of the format {name!r}, compressed by {packing}",
                remedy="decompress it: of a compressed file, no rank can read its rows alone",
            )


def read_head(path: str) -> bytes:
    """Return the first `HEAD_BYTES` of a file; raise ``DataError`` if it cannot be read."""
    with reading(path), open_binary(path) as file:
        return file.read(HEAD_BYTES)


def _unknown_format(path: str, head: bytes) -> FormatError:
    return FormatError(
        "cannot tell the format of the file",
        file=path,
        expected=f"one of {known_formats()}; a text table has the same number of fields, two or more, in each record",
        found=f"a file that begins with {head[:16]!r}",
        remedy="name the format with format=",
    )
