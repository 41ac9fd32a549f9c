"""One module a format: a file becomes an ``Index``. No bulk reads, no MPI, no TensorFlow here.

A reader is a function ``index(path, names, **options) -> Index`` in a module of its own. ``names`` are the fields
that are wanted, or None for all. It raises ``FormatError`` where the file is not what it says it is, and
``FieldNotFound`` where a name is not there; both name the file. Other packages add formats through the entry point
group ``matex_data.readers``, whose entries are such functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from matex_data.errors import FormatError, near_matches
from matex_data.index.model import Index
from matex_data.index.stamps import Stamp
from matex_data.readers.collective import IndexingRanks
from matex_data.readers.options import check_options

if __name__ != "matex_data.readers":
    raise ImportError("import this package as matex_data.readers: two copies of a class would be two classes")

Reader = Callable[..., Index]
HEAD_BYTES = 64 << 10  # bytes of a file that are looked at to tell its format


@dataclass(frozen=True)
class Format:
    """How to tell a format, and where its reader is.

    Parameters
    ----------
    module : that has the function ``index``.
    suffixes : of file names, as ``".h5"`` or ``".csv.gz"``.
    magic : first bytes of its files: where, and what.
    names : patterns of file names without a suffix that tells, as of ``pathlib.PurePath.match``.
    sidecars : patterns of files that belong to others, and are not opened when a whole directory is.
    """

    module: str
    suffixes: tuple[str, ...]
    magic: tuple[tuple[int, bytes], ...] = ()
    names: tuple[str, ...] = ()
    sidecars: tuple[str, ...] = ()

    def matches_name(self, path: str) -> bool:
        """Whether the file has a name that this format's files have."""
        lower = Path(path.lower())
        return lower.name.endswith(self.suffixes) or any(lower.match(name) for name in self.names)

    def matches_magic(self, head: bytes) -> bool:
        """Whether a file that starts with ``head`` carries this format's mark."""
        return any(head[at : at + len(mark)] == mark for at, mark in self.magic)


_HDF5_MARKS = tuple((at, b"\x89HDF\r\n\x1a\n") for at in (0, 512, 1024, 2048))
_CDF_MARKS = ((0, b"CDF\x01"), (0, b"CDF\x02"), (0, b"CDF\x05"))
_NETCDF_SUFFIXES = (".nc", ".nc1", ".nc2", ".nc3", ".nc4", ".nc4c", ".nc5", ".cdf", ".netcdf", ".nc.gz")
_PACKED = ("", ".gz", ".bz2", ".xz", ".zst")
_TABLE_SUFFIXES = tuple(f".{kind}{end}" for kind in ("csv", "tsv", "tab", "psv") for end in _PACKED)
_CSV_SUFFIXES = (*_TABLE_SUFFIXES, *(f".{kind}{end}" for kind in ("txt", "dat", "asc") for end in _PACKED))

_IDX_NAMES = tuple(f"*[-.]idx[1-9]-*byte{end}" for end in ("", ".gz"))
_CIFAR_NAMES = ("data_batch_[1-5]", "test_batch", "cifar-100-*/train", "cifar-100-*/test")
_CIFAR_BINARY = tuple(f"{name}.bin" for name in _CIFAR_NAMES)

FORMATS: dict[str, Format] = {
    "hdf5": Format("matex_data.readers.hdf5.reader", (".h5", ".hdf5", ".hdf", ".he5", ".nxs", ".mat"), _HDF5_MARKS),
    "netcdf": Format("matex_data.readers.netcdf.reader", _NETCDF_SUFFIXES, (*_CDF_MARKS, *_HDF5_MARKS)),
    "csv": Format("matex_data.readers.csv.reader", _CSV_SUFFIXES),
    "npy": Format("matex_data.readers.arrays", (".npy",), ((0, b"\x93NUMPY"),)),
    "npz": Format("matex_data.readers.arrays", (".npz",)),
    "raw": Format("matex_data.readers.arrays", (".raw",)),
    "idx": Format("matex_data.readers.idx", (".idx", ".idx.gz"), names=_IDX_NAMES, sidecars=("*labels[-.]idx1-*",)),
    "cifar": Format("matex_data.readers.cifar", (), names=_CIFAR_NAMES + _CIFAR_BINARY),
}


@dataclass(frozen=True)
class Unread:
    """How to tell a format that no reader is here for, so that its files are not taken for others.

    Parameters
    ----------
    title : what its files are, and the library that reads them.
    magic : its first bytes, unpacked: where, and what; in a text, behind blanks and empty lines.
    inside : stands in the head of its files.
    """

    title: str
    magic: tuple[int, bytes]
    inside: bytes = b""

    def begins(self, head: bytes) -> bool:
        """Whether a file that starts with ``head`` is of this format."""
        at, mark = self.magic
        return (head if at else head.lstrip())[at:].startswith(mark) and self.inside in head


PARTICLES: dict[str, Unread] = {
    "root": Unread("a ROOT file (uproot)", (0, b"root")),
    "lhe": Unread("a Les Houches event file (pylhe)", (0, b"<"), b"<LesHouchesEvents"),
    "hepmc": Unread("a HepMC event file (pyhepmc)", (0, b"HepMC::")),
    "lcio": Unread("an LCIO file (pylcio)", (4, b"\xab\xad\xca\xfe")),
}


def has_known_name(path: str) -> bool:
    """Whether the name of a file tells its format, and the file does not belong to another one."""
    lower = Path(path.lower())
    belongs = any(lower.match(name) for format in FORMATS.values() for name in format.sidecars)
    return not belongs and any(format.matches_name(path) for format in FORMATS.values())


def detect(path: str, head: bytes) -> str:
    """Name of the format of a file: by its first bytes, then by its name, and of a text table by all of ``head``.

    netCDF-4 is told by what is in the HDF5 file.

    Raises
    ------
    FormatError : none of them tells, or the format is one that cannot be read.
    """
    named = [name for name, format in FORMATS.items() if format.matches_name(path)]
    marked = [name for name, format in FORMATS.items() if format.matches_magic(head)]
    if (
        "hdf5" in marked
        and "netcdf" not in named
        and import_module("matex_data.readers.netcdf.netcdf4").is_netcdf4(path)
    ):
        return "netcdf"
    for name in [*(n for n in named if n in marked), *marked, *(n for n in named if n != "csv")]:
        return name
    # Imports Arrow, which files of other formats do without.
    from matex_data.readers.csv import compression, dialect

    text = compression.plain_head(head)
    for unread in PARTICLES.values():
        if unread.begins(text):
            raise FormatError(
                "there is no reader for particle files of this format yet",
                file=path,
                expected=f"one of {known_formats()}",
                found=unread.title,
                remedy="convert what you need to HDF5, or register a reader in the group 'matex_data.readers'",
            )
    if "csv" in named:
        sure = path.lower().endswith(_TABLE_SUFFIXES)
        if not dialect.is_markup_or_script(text) and (sure or not dialect.is_binary(text)):
            return "csv"
    elif dialect.is_table(text, whole=text is head and len(head) < HEAD_BYTES):
        return "csv"
    raise FormatError(
        "cannot tell the format of the file",
        file=path,
        expected=f"one of {known_formats()}; a text is one if each record has as many fields, two or more",
        found=f"a file that begins with {head[:16]!r}",
        remedy="name the format with format=",
    )


def known_formats() -> list[str]:
    """Names of all formats that there are readers for, also in other packages."""
    return sorted({*FORMATS, *(entry.name for entry in entry_points(group="matex_data.readers"))})


def collective_reader(name: str) -> Reader | None:
    """The function by which all ranks index the files of a format together; None: each file is a matter of one rank.

    It has the signature ``index_collectively(paths, names, ranks, **options) -> Index``.
    *Collective*.
    """
    function = getattr(import_module(FORMATS[name].module), "index_collectively", None) if name in FORMATS else None
    return None if function is None else _collective(name, function)


def reader(name: str) -> Reader:
    """The function that indexes files of a format.

    Raises
    ------
    FormatError : no such format.
    """
    if name in FORMATS:
        return _alone(name, import_module(FORMATS[name].module).index)
    for entry in entry_points(group="matex_data.readers", name=name):
        return _alone(name, entry.load())
    raise FormatError(
        "there is no reader of that format", expected=f"one of {near_matches(name, known_formats())}", found=repr(name)
    )


def _alone(format: str, function: Reader) -> Reader:
    """A reader that looks at its options first, and notes the state of the file."""

    @wraps(function)
    def index(path: str, names: Sequence[str] | None = None, /, **options: Any) -> Index:
        check_options(format, function, options, leading=2)
        stamp = _stamp(path)  # a change while the file is indexed has to show
        return function(path, names, **options).with_stamps({path: stamp})

    return index


def _collective(format: str, function: Reader) -> Reader:
    """The same for a reader that all ranks call; file ``number`` is a matter of rank ``number % size``."""

    @wraps(function)
    def index_collectively(
        paths: Sequence[str], names: Sequence[str] | None, ranks: IndexingRanks, /, **options: Any
    ) -> Index:
        check_options(format, function, options, leading=3)
        own = {path: _stamp(path) for path in paths[ranks.rank :: ranks.size]}
        index: Index = function(paths, names, ranks, **options)
        return index.with_stamps({path: stamp for part in ranks.allgather(own) for path, stamp in part.items()})

    return index_collectively


def _stamp(path: str) -> Stamp | None:
    try:
        return Stamp.of(path)
    except OSError:  # the reader says it better
        return None
