"""Recognition of formats without a reader: which one a file is of, and the tool that converts it.

The formats are those of the table ``unsupported.toml`` beside this module, in which they are tried in order.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from matex_data.errors import FormatError

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
    """

    title: str
    remedy: str
    begin: str = ""
    suffixes: Sequence[str] = ()
    folder: Sequence[str] = ()
    decompresses: bool = False

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
        path : of the file.
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
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    return tuple(UnsupportedFormat(**format) for format in table["format"])
