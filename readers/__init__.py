"""One module a format: a file becomes an ``Index``. No bulk reads, no MPI, no TensorFlow here.

A reader is a function ``index(path, names, **options) -> Index`` in a module of its own. ``names`` are the fields
that are wanted, or None for all. It raises ``FormatError`` where the file is not what it says it is, and
``FieldNotFound`` where a name is not there; both name the file. Other packages add formats through the entry point
group ``matex_data.readers``, whose entries are such functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

from matex_data.errors import FormatError, near_matches
from matex_data.index import Index

if __name__ != "matex_data.readers":
    raise ImportError("import this package as matex_data.readers: two copies of a class would be two classes")

Reader = Callable[..., Index]
HEAD = 4096  # bytes of a file that are looked at to tell its format


@dataclass(frozen=True)
class Format:
    """How to tell a format, and where its reader is."""

    module: str
    suffixes: tuple[str, ...]
    magic: tuple[tuple[int, bytes], ...] = ()

    def begins(self, head: bytes) -> bool:
        """Whether a file that starts with ``head`` carries this format's mark."""
        return any(head[at : at + len(mark)] == mark for at, mark in self.magic)


_HDF5_MARKS = tuple((at, b"\x89HDF\r\n\x1a\n") for at in (0, 512, 1024, 2048))

FORMATS: dict[str, Format] = {
    "hdf5": Format("matex_data.readers.hdf5", (".h5", ".hdf5", ".hdf", ".he5", ".nxs", ".mat"), _HDF5_MARKS),
}

SUFFIXES = frozenset(suffix for format in FORMATS.values() for suffix in format.suffixes)


def detect(path: str, head: bytes) -> str:
    """Name of the format of a file: by its first bytes, then by its suffix.

    Raises
    ------
    FormatError : neither tells.
    """
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    named = [name for name, format in FORMATS.items() if suffixes and suffixes[-1] in format.suffixes]
    marked = [name for name, format in FORMATS.items() if format.begins(head)]
    for name in [*(n for n in named if n in marked), *marked, *named]:
        return name
    raise FormatError(
        "cannot tell the format of the file",
        file=path,
        expected=f"one of {sorted(FORMATS)}",
        found=f"a file that begins with {head[:16]!r}",
        remedy="name the format with format=",
    )


def reader(name: str) -> Reader:
    """The function that indexes files of a format.

    Raises
    ------
    FormatError : no such format.
    """
    if name in FORMATS:
        function: Reader = import_module(FORMATS[name].module).index
        return function
    for entry in entry_points(group="matex_data.readers", name=name):
        plugged: Reader = entry.load()
        return plugged
    known = [*FORMATS, *(entry.name for entry in entry_points(group="matex_data.readers"))]
    raise FormatError(
        "there is no reader of that format", expected=f"one of {near_matches(name, known)}", found=repr(name)
    )
