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
    """How to tell a format, and where its reader is.

    Parameters
    ----------
    module : that has the function ``index``.
    suffixes : of file names, as ``".h5"`` or ``".csv.gz"``.
    magic : first bytes of its files: where, and what.
    names : patterns of file names without a suffix that tells, as of ``pathlib.PurePath.match``.
    inside : stands in the head of its files, and tells it from a format of the same first bytes.
    beside : patterns of files that belong to others, and are not opened when a whole directory is.
    """

    module: str
    suffixes: tuple[str, ...]
    magic: tuple[tuple[int, bytes], ...] = ()
    names: tuple[str, ...] = ()
    inside: bytes = b""
    beside: tuple[str, ...] = ()

    def named(self, path: str) -> bool:
        """Whether the file has a name that this format's files have."""
        lower = Path(path.lower())
        return lower.name.endswith(self.suffixes) or any(lower.match(name) for name in self.names)

    def begins(self, head: bytes) -> bool:
        """Whether a file that starts with ``head`` carries this format's mark."""
        return any(head[at : at + len(mark)] == mark for at, mark in self.magic)


_HDF5_MARKS = tuple((at, b"\x89HDF\r\n\x1a\n") for at in (0, 512, 1024, 2048))
_CDF_MARKS = ((0, b"CDF\x01"), (0, b"CDF\x02"), (0, b"CDF\x05"))
_NETCDF_SUFFIXES = (".nc", ".nc1", ".nc2", ".nc3", ".nc4", ".nc4c", ".nc5", ".cdf", ".netcdf", ".nc.gz")
_PACKED = ("", ".gz", ".bz2", ".xz", ".zst")
_CSV_SUFFIXES = tuple(f".{kind}{end}" for kind in ("csv", "tsv", "tab", "psv", "txt", "dat", "asc") for end in _PACKED)

_IDX_NAMES = tuple(f"*[-.]idx[1-9]-*byte{end}" for end in ("", ".gz"))
_CIFAR_NAMES = ("data_batch_[1-5]", "test_batch", "cifar-100-*/train", "cifar-100-*/test")
_CIFAR_BINARY = tuple(f"{name}.bin" for name in _CIFAR_NAMES)

FORMATS: dict[str, Format] = {
    "hdf5": Format("matex_data.readers.hdf5", (".h5", ".hdf5", ".hdf", ".he5", ".nxs", ".mat"), _HDF5_MARKS),
    "netcdf": Format(
        "matex_data.readers.netcdf", _NETCDF_SUFFIXES, (*_CDF_MARKS, *_HDF5_MARKS), inside=b"_NCProperties"
    ),
    "csv": Format("matex_data.readers.csv", _CSV_SUFFIXES),
    "npy": Format("matex_data.readers.arrays", (".npy",), ((0, b"\x93NUMPY"),)),
    "npz": Format("matex_data.readers.arrays", (".npz",)),
    "raw": Format("matex_data.readers.arrays", (".raw",)),
    "idx": Format("matex_data.readers.idx", (".idx", ".idx.gz"), names=_IDX_NAMES, beside=("*labels[-.]idx1-*",)),
    "cifar": Format("matex_data.readers.cifar", (), names=_CIFAR_NAMES + _CIFAR_BINARY),
}


def recognised(path: str) -> bool:
    """Whether the name of a file tells its format, and the file does not belong to another one."""
    lower = Path(path.lower())
    belongs = any(lower.match(name) for format in FORMATS.values() for name in format.beside)
    return not belongs and any(format.named(path) for format in FORMATS.values())


def detect(path: str, head: bytes) -> str:
    """Name of the format of a file: by its first bytes, then by its suffix.

    Raises
    ------
    FormatError : neither tells.
    """
    named = [name for name, format in FORMATS.items() if format.named(path)]
    marked = [name for name, format in FORMATS.items() if format.begins(head)]
    marked.sort(key=lambda name: FORMATS[name].inside not in head or not FORMATS[name].inside)
    for name in [*(n for n in named if n in marked), *marked, *named]:
        return name
    if _is_text(head):
        return "csv"
    raise FormatError(
        "cannot tell the format of the file",
        file=path,
        expected=f"one of {sorted(FORMATS)}",
        found=f"a file that begins with {head[:16]!r}",
        remedy="name the format with format=",
    )


def _is_text(head: bytes) -> bool:
    """Whether these can be the first bytes of a text: no control characters but those between words and lines."""
    return bool(head) and not set(head) & {*range(9), *range(14, 32), 127}


def together(name: str) -> Reader | None:
    """The function by which all ranks index the files of a format together; None: each file is a matter of one rank.

    It is ``index_together(paths, names, ranks, **options) -> Index``, see ``matex_data.readers.ranks``. *Collective*.
    """
    return getattr(import_module(FORMATS[name].module), "index_together", None) if name in FORMATS else None


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
