"""Registry of file formats: the built-in ones, and those that other packages register.

Another package registers a format under the entry point group ``matex_data.readers``. The entry is a `Format`, which
takes part in the detection by content and by name, or a reader function, which ``format=`` selects.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from matex_data.errors import DataError, FormatError, install_command, near_matches
from matex_data.warning import warn

GROUP = "matex_data.readers"

Located = TypeVar("Located", bound=DataError)
Reader = Callable[..., Any]
"""Function ``index(path, **options)``, or ``index(path, names, **options) -> Index``; see `matex_data.abc`."""


@dataclass(frozen=True)
class Format:
    """Recognition of a file format, and the functions that index its files.

    Parameters
    ----------
    reader : function ``index(path, **options)`` that returns what it finds, or ``index(path, names=None, **options)``
        that returns the `Index` of the named fields; or its address ``"package.module:function"``, which is imported
        when the first file of the format is opened.
    suffixes : lower-case ends of file names, for example ``(".h5", ".csv.gz")``.
    magic : pairs of a byte offset and the bytes that files of the format have there.
    text : regular expression that the begin of a text of this format matches, decompressed if need be.
    names : patterns of file names without a telling suffix, as of ``pathlib.PurePath.match``, in lower case.
    sidecars : patterns of files that belong to other files, or describe them. A directory is opened without them.
    collective_reader : function ``index_collectively(paths, names, ranks, **options) -> Index``, or its address, for a
        format whose files all ranks index collectively; None: one rank indexes each file. Its index has all files on
        rank 0, and on the others all or their own; see ``IndexingRanks.gather_files``.
    extra : pip requirement that brings the packages that the reader imports, for example ``"matex_data[csv]"``.
        The error for a missing package shows it.
    folder : function ``is_folder(path) -> bool``, or its address, that tells whether a directory is a data set as a
        whole, which the reader then gets as its path. None: the files of a directory are opened one by one.
    verified : the reader raises ``FormatError`` for every file without the magic bytes, unless options say otherwise.
        More files of this suffix then need no look at their first bytes before the reader opens them.
    concurrent : threads may index several files at the same time, and do not wait for a lock of the format's library.
    takes_trust : the reader has the parameter ``trust``, a `matex_data.abc.Trust`, which it asks before it looks at
        another file that its file names. Users give ``trusted=`` to `open_dataset`; ``trust`` is no option.
    kind : function ``(path, head, options) -> str | None``, or its address, which says of a file that may be of this
        format by its first bytes or its name which format it is of: this one, or a more special one. Without magic
        bytes and a text, it is asked of each file that no other format knows, and returns None for one that it knows
        neither. None: a file that may be of this format is.
    samples : values of its option ``sample``, of readers that have one: what a sample is, such as ("particle",
        "iteration"). Of any format, ``sample="file"`` makes a file a sample; a reader that has "file" among these does
        so itself, as for files whose arrays differ in length.
    remote : the reader opens files by `matex_data.abc.open_binary` and its relatives alone, so that their paths may be
        URLs of object stores. Built-in readers do so without it.

    Examples
    --------
    >>> points = Format("my_package:index", suffixes=(".points",), magic=((0, b"POINTS"),))
    >>> points.matches_name("run1.points"), points.matches_magic(b"POINTS 17")
    (True, True)
    """

    reader: str | Reader
    suffixes: tuple[str, ...] = ()
    magic: tuple[tuple[int, bytes], ...] = ()
    text: bytes | None = None
    names: tuple[str, ...] = ()
    sidecars: tuple[str, ...] = ()
    collective_reader: str | Reader | None = None
    extra: str | None = None
    folder: str | Callable[[str], bool] | None = None
    verified: bool = False
    concurrent: bool = False
    takes_trust: bool = False
    kind: str | Callable[..., str | None] | None = None
    samples: tuple[str, ...] = ()
    remote: bool = False

    @property
    def guessed(self) -> bool:
        """Return whether nothing tells a file of this format but its ``kind``.

        Examples
        --------
        >>> Format("my_package:index", (".dat",), kind=lambda path: None).guessed
        True
        """
        return self.kind is not None and not self.magic and self.text is None

    def matches_name(self, path: str) -> bool:
        """Return whether the file has a name of this format.

        Examples
        --------
        >>> format = Format("my_package:index", (".pts",), magic=((0, b"PTS"),), text=rb"#points", sidecars=("*.log",))
        >>> format.matches_name("data/run1.PTS"), format.matches_name("folder.pts/"), format.matches_name("run1.csv")
        (True, True, False)
        """
        lower = path.lower()
        return lower.rstrip("/").endswith(self.suffixes) or _matches(lower, self.names)

    def magic_offset(self, head: bytes) -> int:
        """Return the position of the magic bytes that the file has; 0 without any.

        Examples
        --------
        >>> Format("my_package:index", (".pts",), magic=((4, b"PTS"),)).magic_offset(b"\\0\\0\\0\\0PTS 1.0")
        4
        """
        return max((at for at, magic in self.magic if head[at : at + len(magic)] == magic), default=0)

    def matches_magic(self, head: bytes) -> bool:
        """Return whether a file that starts with ``head`` has the magic bytes of this format.

        Examples
        --------
        >>> format = Format("my_package:index", (".pts",), magic=((0, b"PTS"),), text=rb"#points", sidecars=("*.log",))
        >>> format.matches_magic(b"PTS 1.0"), format.matches_magic(b"PNG")
        (True, False)
        """
        return any(head[offset : offset + len(magic)] == magic for offset, magic in self.magic)

    def matches_text(self, text: bytes) -> bool:
        """Return whether a text that begins with ``text`` is of this format.

        Examples
        --------
        >>> format = Format("my_package:index", (".pts",), magic=((0, b"PTS"),), text=rb"#points", sidecars=("*.log",))
        >>> format.matches_text(b"#points of run 1"), format.matches_text(b"x,y")
        (True, False)
        """
        return self.text is not None and re.match(self.text, text) is not None

    def is_sidecar(self, path: str) -> bool:
        """Return whether the file belongs to another file of this format.

        Examples
        --------
        >>> format = Format("my_package:index", (".pts",), magic=((0, b"PTS"),), text=rb"#points", sidecars=("*.log",))
        >>> format.is_sidecar("data/run1.log"), format.is_sidecar("run1.pts")
        (True, False)
        """
        return _matches(path.lower(), self.sidecars)


def _last_part(path: str) -> str:
    """Return the name of a file or folder; of a million paths, pathlib makes objects for 10 s."""
    return path.rstrip("/").rpartition("/")[2]


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a path matches one of the patterns of ``pathlib.PurePath.match``."""
    if not patterns:
        return False
    name = _last_part(path)
    likely = [one for one in patterns if fnmatchcase(name, _last_part(one))]
    return any("/" not in one or Path(path).match(one) for one in likely)


@dataclass(frozen=True)
class KnownFormat(Format):
    """Format with what concerns the engine alone, as formats of this package have it.

    Parameters
    ----------
    partitioned : folders of the form ``name=value``, below what the user names, are fields of their files.
    takes_static : the reader has the option ``static=False``, which leaves out the arrays that belong to no sample. It
        is given for all files of a data set but the first one.
    """

    partitioned: bool = False
    takes_static: bool = False
    remote: bool = True


HDF5_MAGIC = tuple((offset, b"\x89HDF\r\n\x1a\n") for offset in (0, 512, 1024, 2048))
CDF_MAGIC = ((0, b"CDF\x01"), (0, b"CDF\x02"), (0, b"CDF\x05"))
NETCDF_SUFFIXES = (".nc", ".nc1", ".nc2", ".nc3", ".nc4", ".nc4c", ".nc5", ".cdf", ".netcdf", ".nc.gz")
COMPRESSED = ("", ".gz", ".bz2", ".xz", ".zst")
TABLE_SUFFIXES = tuple(f".{kind}{end}" for kind in ("csv", "tsv", "tab", "psv", "ecsv") for end in COMPRESSED)
TEXT_SUFFIXES = tuple(f".{kind}{end}" for kind in ("txt", "dat", "asc") for end in COMPRESSED)
JSON_LINES_SUFFIXES = tuple(f".{kind}{end}" for kind in ("jsonl", "ndjson", "jsonlines") for end in COMPRESSED)
RECORD_KINDS = ("tfrecord", "tfrecords", "tfrec")
RECORD_PARTS = (
    *(f"{begin}-*-of-*[0-9]" for begin in ("train", "validation", "test")),
    *(f"*[._]{kind}-*-of-*[0-9]{end}" for kind in RECORD_KINDS for end in ("", ".gz")),
)
JSON_SUFFIXES = tuple(f".json{end}" for end in COMPRESSED)
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".tif", ".tiff", ".gif", ".bmp", ".dib", ".webp"),
    *(".fits", ".fit", ".fts", ".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".avif", ".qoi"),
)
IMAGE_MAGIC = (
    *((0, magic) for magic in (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"SIMPLE  =")),
    *((0, magic) for magic in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")),
    (8, b"WEBP"),
)
BMP_BEGIN = rb"(?s:BM.{4}\0\0\0\0.{4}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0)"  # "BM" alone begins texts, too
COCO_BEGIN = rb"\s*\{(?s:.*?)\"images\"\s*:\s*\[\s*\{[^}]*\"file_name\"\s*:"  # annotations of images
ZARR_BEGIN = (  # of a zip file by its first member that is no folder, or of references by their first entry
    rb"(?s)PK\x03\x04.{26}(?:[^\0]{1,200}?/.{0,64}?PK\x03\x04.{26}){0,3}(?:[^\0]{0,200}/)?(?:\.zgroup|\.zattrs|\.zarray|\.zmetadata|zarr\.json)"
    rb"|\s*\{\s*\"(?:version\"\s*:\s*1\s*,\s*\"(?:templates|gen|refs)\"|refs\"|\.zgroup\"|\.zattrs\"|\.zarray\"|\.zmetadata\")"
)
IDX_NAMES = tuple(f"*[-.]idx[1-9]-*byte{end}" for end in ("", ".gz"))
CIFAR_NAMES = ("data_batch_[1-5]", "test_batch", "cifar-100-*/train", "cifar-100-*/test")

FORMATS: dict[str, KnownFormat] = {
    "matlab": KnownFormat(
        "matex_data.readers.matlab.reader:index",
        suffixes=(".mat",),
        magic=((0, b"MATLAB 5.0 MAT-file"),),  # version 4 has none, version 7.3 is HDF5
        extra="matex_data[matlab]",
        samples=("file",),
    ),
    "hdf5": KnownFormat(
        "matex_data.readers.hdf5.reader:index",
        suffixes=(".h5", ".hdf5", ".hdf", ".he5", ".nxs", ".mat"),
        magic=HDF5_MAGIC,
        kind="matex_data.readers.hdf5.kinds:kind_of",
        takes_trust=True,
        samples=("file", "group"),
    ),
    "netcdf": KnownFormat(
        "matex_data.readers.netcdf.reader:index",
        suffixes=NETCDF_SUFFIXES,
        magic=(*CDF_MAGIC, *HDF5_MAGIC),
        verified=True,
        takes_static=True,
        takes_trust=True,
    ),
    "openpmd": KnownFormat(  # HDF5 files with a mark
        "matex_data.readers.openpmd.reader:index", takes_trust=True, samples=("particle", "iteration")
    ),
    "csv": KnownFormat(
        "matex_data.readers.csv.reader:index",
        suffixes=(*TABLE_SUFFIXES, *TEXT_SUFFIXES),
        kind="matex_data.readers.csv.kinds:kind_of",
        collective_reader="matex_data.readers.csv.reader:index_collectively",
        sidecars=("readme.txt", "license.txt", "licence.txt", "requirements.txt"),
        extra="matex_data[csv]",
    ),
    "parquet": KnownFormat(
        "matex_data.readers.parquet.reader:index",
        suffixes=(".parquet", ".parq", ".pq"),
        magic=((0, b"PAR1"),),
        sidecars=("_metadata", "_common_metadata", "_success"),
        extra="matex_data[csv]",
        verified=True,
        partitioned=True,
    ),
    "arrow": KnownFormat(
        "matex_data.readers.arrow.reader:index",
        suffixes=(".arrow", ".feather", ".ipc", ".arrows"),
        magic=((0, b"ARROW1\0\0"),),
        text=rb"(?s)\xff{4}..\0\0[\x04-\x40]\0\0\0",  # a stream: length and begin of its schema
        extra="matex_data[csv]",
        verified=True,
        partitioned=True,
    ),
    "jsonl": KnownFormat(
        "matex_data.readers.json_lines:index",
        suffixes=JSON_LINES_SUFFIXES,
        text=rb"\{[^\n]*\}\r?\n\{",  # two lines with an object each
        kind="matex_data.readers.images.folders.manifest:kind_of_lines",
        extra="matex_data[csv]",
        concurrent=True,
        partitioned=True,
    ),
    "tfrecord": KnownFormat(
        "matex_data.readers.tfrecord:index",
        suffixes=tuple(f".{kind}{end}" for kind in RECORD_KINDS for end in COMPRESSED),
        names=RECORD_PARTS,
        extra="matex_data[tfrecord]",
        concurrent=True,
    ),
    "zarr": KnownFormat(
        "matex_data.readers.zarr.reader:index",
        suffixes=(".zarr", ".zarr.zip"),
        text=ZARR_BEGIN,
        extra="matex_data[zarr]",
        folder="matex_data.readers.zarr.stores:is_store",
        takes_static=True,
        takes_trust=True,
    ),
    "xyz": KnownFormat(
        "matex_data.readers.atoms.xyz:index",
        suffixes=tuple(f".{kind}{end}" for kind in ("xyz", "extxyz") for end in COMPRESSED),
        extra="matex_data[atoms]",
    ),
    "traj": KnownFormat(
        "matex_data.readers.atoms.trajectory:index",
        suffixes=(".traj",),
        magic=((0, b"- of UlmASE-Trajectory"),),
        extra="matex_data[atoms]",
    ),
    "asedb": KnownFormat(
        "matex_data.readers.atoms.database:index",
        text=rb"SQLite format 3\0(?s:.*?)CREATE TABLE systems \(",  # other databases are not read
        extra="matex_data[atoms]",
        concurrent=True,
        remote=False,  # SQLite opens files
    ),
    "root": KnownFormat(
        "matex_data.readers.root.reader:index",
        suffixes=(".root",),
        magic=((0, b"root\0"),),  # the version follows, less than 2**24
        verified=True,
        extra="matex_data[particles]",
    ),
    "lhe": KnownFormat(
        "matex_data.readers.lhe.reader:index",
        suffixes=tuple(f".lhe{end}" for end in COMPRESSED),
        text=rb"(?:\xef\xbb\xbf)?\s*<(?s:.*?)(?<=<)LesHouchesEvents[\s>]",
        collective_reader="matex_data.readers.lhe.reader:index_collectively",
        extra="matex_data[particles]",
    ),
    "hepmc": KnownFormat(
        "matex_data.readers.hepmc.reader:index",
        suffixes=tuple(f".{kind}{end}" for kind in ("hepmc", "hepmc2", "hepmc3") for end in COMPRESSED),
        text=rb"\s*HepMC::",
        collective_reader="matex_data.readers.hepmc.reader:index_collectively",
        extra="matex_data[particles]",
    ),
    "tar": KnownFormat(
        "matex_data.readers.tar.reader:index",
        suffixes=(*(f".tar{end}" for end in COMPRESSED), ".tgz", ".tbz2", ".txz", ".tzst"),
        magic=((257, b"ustar"),),
        text=rb"(?s).{257}ustar",  # of what is compressed
        concurrent=True,
    ),
    "npy": KnownFormat(
        "matex_data.readers.arrays:index",
        suffixes=(".npy",),
        magic=((0, b"\x93NUMPY"),),
        verified=True,
        concurrent=True,
        samples=("file",),
    ),
    "npz": KnownFormat("matex_data.readers.arrays:index", suffixes=(".npz",), concurrent=True, samples=("file",)),
    "raw": KnownFormat("matex_data.readers.arrays:index", suffixes=(".raw",), concurrent=True, samples=("file",)),
    "idx": KnownFormat(
        "matex_data.readers.idx:index",
        suffixes=(".idx", ".idx.gz"),
        names=IDX_NAMES,
        sidecars=("*labels[-.]idx1-*",),
        concurrent=True,
    ),
    "images": KnownFormat(
        "matex_data.readers.images.reader:index",
        suffixes=IMAGE_SUFFIXES,
        magic=IMAGE_MAGIC,
        text=BMP_BEGIN + rb"|" + COCO_BEGIN,
        kind="matex_data.readers.fits.kinds:kind_of",
        collective_reader="matex_data.readers.images.reader:index_collectively",
        extra="matex_data[images]",
        folder="matex_data.readers.images.folders.probing:is_image_folder",
        takes_trust=True,
        samples=("file",),
    ),
    "fits": KnownFormat(  # FITS files that begin with a table, a spectrum or a cube, and those that are compressed
        "matex_data.readers.fits.reader:index",
        suffixes=tuple(f"{kind}{end}" for kind in (".fits", ".fit", ".fts") for end in (".gz", ".fz")),
        text=rb"SIMPLE  = {20}T",
        concurrent=True,
        samples=("file",),
    ),
    "cifar": KnownFormat(
        "matex_data.readers.cifar:index", names=(*CIFAR_NAMES, *(f"{name}.bin" for name in CIFAR_NAMES))
    ),
}
"""Built-in formats by name. They take precedence over those of other packages."""


def known_formats() -> list[str]:
    """Return the names of all formats, built-in and registered by other packages."""
    return sorted({*FORMATS, *(entry.name for entry in entry_points(group=GROUP))})


def all_formats() -> Mapping[str, Format]:
    """Return all formats by name, the built-in ones first."""
    return {**FORMATS, **_plugin_formats()}


@cache
def _plugin_formats() -> Mapping[str, Format]:
    """Load the formats of other packages. A broken one is left out with a warning: files of other formats open."""
    found: dict[str, Format] = {}
    for entry in entry_points(group=GROUP):
        if entry.name not in FORMATS:
            try:
                found[entry.name] = _load(entry)
            except FormatError as error:
                warn(str(error))
    return found


def format_named(name: str) -> KnownFormat:
    """Return the format of that name.

    Raises
    ------
    FormatError : no package registers the format, or its entry point does not load.
    """
    if name in FORMATS:
        return FORMATS[name]
    for entry in entry_points(group=GROUP, name=name):
        return KnownFormat(**vars(_load(entry)))
    raise FormatError(
        "there is no reader of that format",
        expected=f"one of {near_matches(name, known_formats())}",
        found=repr(name),
        remedy="correct the name, or leave out format=: the content tells it",
    )


def _load(entry: EntryPoint) -> Format:
    problem, expected = f"the format {entry.name!r} does not load", "a matex_data.abc.Format or a reader function"
    try:
        value = entry.load()
    except Exception as error:  # a module of another package may raise anything
        remedy = f"repair or uninstall the package that registers {entry.value!r} in the group {GROUP!r}"
        raise FormatError(problem, expected=expected, found=repr(error), remedy=remedy) from error
    if isinstance(value, Format):
        return value
    if callable(value):
        return Format(value)
    raise FormatError(problem, expected=expected, found=f"{value!r} at {entry.value!r}")


def no_text(path: str, error: UnicodeDecodeError) -> FormatError:
    """Return the error for a name in a file that is no text; what fields hold is decoded later."""
    return FormatError(
        "a name in the file is no text",
        file=path,
        expected="names of fields, members and weights in UTF-8",
        found=error,
        remedy="write the file again with other names; if it was copied, copy it again",
    )


def located(error: DataError, kind: type[Located], remedy: str, problem: str = "", **where: Any) -> Located:
    """Return the error of a decoder with what it does not know: where its bytes lie, and what may help.

    Parameters
    ----------
    remedy : unless the decoder has one.
    problem : in place of that of the decoder; "": the same.
    where : ``file``, ``field``, ``row`` and ``byte``.

    Examples
    --------
    >>> located(DataError("no digits", found="x"), FormatError, "write it again", file="a.tar", row=7).remedy
    'write it again'
    """
    found = kind(
        problem or error.problem,
        expected=error.expected,
        found=error.found,
        remedy=error.remedy or remedy,
        **where,
    )
    found.__cause__ = error
    return found


def load_function(name: str, function: str | Callable[..., Any]) -> Callable[..., Any]:
    """Import a function of a format.

    Parameters
    ----------
    name : name of the format, for the error.
    function : address ``"package.module:function"``, or the function itself.

    Raises
    ------
    FormatError : a package that the reader imports is not installed.
    """
    if callable(function):
        return function
    module, _, attribute = function.partition(":")
    try:
        loaded: Callable[..., Any] = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise missing_package(name, error) from error
    return loaded


def missing_package(name: str, error: ModuleNotFoundError, path: str | None = None) -> FormatError:
    """Return the error for a reader whose imports fail, with the install command."""
    extra: Any = format_named(name).extra
    return FormatError(
        f"the reader of {name!r} files needs a package that is not installed",
        file=path,
        expected=f"the package {error.name!r}",
        found=error,
        remedy=install_command(extra or (error.name or "").partition(".")[0]),
    )
