"""Readers: one module or package per file format. A reader turns a file into an `Index`.

A reader is a function ``index(path, names=None, **options) -> Index``. It reads metadata only: no bulk data, no MPI, no
TensorFlow. It raises `FormatError` for a file that is not of its format, and `FieldNotFound` for an unknown field; both
errors name the file. `matex_data.abc` describes the contract for readers in other packages.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from functools import wraps
from typing import Any

from matex_data.errors import DataError, FieldNotFound, FormatError
from matex_data.fields import NO_MATCH, expand_names, is_pattern
from matex_data.index.model import Index
from matex_data.index.stamps import Stamp
from matex_data.index.whole import FILE, SAMPLE, check_sample, files_as_samples
from matex_data.readers import compression
from matex_data.readers.collective import IndexingRanks, StampingRanks
from matex_data.readers.fits.headers import holds_rows, tables_behind
from matex_data.readers.formats import (
    FORMATS,
    HDF5_MAGIC,
    TABLE_SUFFIXES,
    Reader,
    all_formats,
    format_named,
    known_formats,
    load_function,
    missing_package,
)
from matex_data.readers.images.folders.manifest import names_images
from matex_data.readers.options import TRUST, check_options
from matex_data.readers.unsupported import PROBLEM, unsupported_formats
from matex_data.sampling.schedule import rank_range
from matex_data.storage.files import is_folder, open_binary
from matex_data.storage.objects import is_url
from matex_data.storage.trust import Trust

if __name__ != "matex_data.readers":
    raise ImportError("import this package as matex_data.readers: two copies of a class would be two classes")

__all__ = [
    "FORMATS",
    "HEAD_BYTES",
    "collective_reader",
    "data_folders",
    "detect",
    "files_of_folder",
    "folder_format",
    "has_known_name",
    "index_another",
    "known_formats",
    "read_head",
    "reader",
    "refuse_folder",
]

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


def folder_format(path: str, name: str | None = None) -> str | None:
    """Return the format whose data sets are directories, if the directory is one; None for files and other directories.

    Parameters
    ----------
    name : of the format that the user asks for; None: any.
    """
    if not is_folder(path):
        return None
    if name is not None:
        return name if format_named(name).folder is not None else None
    for format, known in all_formats().items():
        if known.folder is not None and load_function(format, known.folder)(path):
            return format
    return None


def data_folders(paths: Sequence[str]) -> list[str]:
    """Return the directories among the paths that are data sets as a whole, as their names tell, such as ``a.zarr``."""
    named = [format for format in all_formats().values() if format.folder is not None]
    likely = [path for path in paths if any(format.matches_name(path) for format in named)]
    return [path for path in likely if folder_format(path) is not None]


def detect(path: str, head: bytes, options: Mapping[str, Any] | None = None) -> str:
    """Return the name of the format of a file.

    Magic bytes decide first, also those of formats without a reader, then the begin of the text, then the name. Text
    tables have neither: all of ``head`` is parsed. An HDF5 file is netCDF-4 or openPMD if it has the marks of these,
    and a table whose first record names an image file, and no URL, is a manifest of images. A FITS file whose first
    data are a table or a cube is no image.

    Parameters
    ----------
    head : the first `HEAD_BYTES` of the file.
    options : of the reader, given by the user: ``root`` is the folder of the images of a manifest, and
        ``layout="manifest"`` says that the file is one.

    Raises
    ------
    FormatError : neither the content nor the name tells the format, or there is no reader for it.
    """
    formats = all_formats()
    by_name = [name for name, format in formats.items() if format.matches_name(path)]
    by_magic = [name for name, format in formats.items() if format.matches_magic(head)]
    by_both = [name for name in by_name if name in by_magic]
    text = b"" if by_magic else compression.plain_head(head)
    by_text = [name for name, format in formats.items() if format.matches_text(text)]
    by_name_alone = [name for name in by_name if name != "csv" and not formats[name].magic]
    for name in (*by_both, *by_magic, *by_text, *by_name_alone):
        if name == "images" and (holds_rows(path, head) or {"hdu", "sample_axis"} & set(options or {})):
            return "fits"
        if name == "images":
            _tell_tables(path, head)
        return _kind_of_hdf5(path) if name == "hdf5" else name
    _refuse_content(path, head, text, by_name)
    for name in by_name:
        if name != "csv":
            return name
    chosen = options or {}
    if chosen.get("layout") == "manifest" or names_images(path, head, chosen.get("root")):
        return "images"
    if _is_text_table(path, head, named="csv" in by_name):
        return "csv"
    for unsupported in unsupported_formats():
        if unsupported.matches_name(path):
            raise unsupported.error(path, known_formats())
    raise _unknown_format(path, head)


def _tell_tables(path: str, head: bytes) -> None:
    """Warn of tables behind an image of FITS, which is read alone."""
    tables = tables_behind(path, head)
    if tables:
        text = f"{path}: the image is read, and not the tables {tables} behind it; hdu={tables[0]!r} reads that table"
        warnings.warn(text, stacklevel=2)


def refuse_folder(path: str, names: Set[str]) -> None:
    """Raise ``FormatError`` for a directory that is a data set of a format without a reader.

    Parameters
    ----------
    names : of all files and directories in it.
    """
    for unsupported in unsupported_formats():
        if unsupported.matches_folder(names):
            raise unsupported.error(path, known_formats())


def _refuse_content(path: str, head: bytes, text: bytes, by_name: Sequence[str]) -> None:
    """Raise ``FormatError`` for a file of a format without a reader, or one that is compressed as a whole.

    Parameters
    ----------
    text : ``head`` after decompression.
    by_name : formats of its name; their readers decompress their files.
    """
    packing = compression.stored_as(head, "")
    for unsupported in unsupported_formats():
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


def index_another(
    path: str,
    names: Sequence[str] | None,
    likely: str,
    options: Mapping[str, Any],
    named: bool = False,
    trust: Trust | None = None,
) -> Index:
    """Return the index of another file of a data set, without arrays that belong to no sample. It is opened once.

    Parameters
    ----------
    path : of the file.
    names : argument of the reader.
    likely : format of the files before it, which is probably that of this one.
    options : of the reader.
    named : the user has named the format.
    trust : where bytes may come from beside the folder of the file.
    """
    stamp = _stamp(path)
    if named or (format_named(likely).verified and format_named(likely).matches_name(path) and not options):
        try:
            return _without_static(likely, path, names, options, stamp, trust)
        except FormatError:
            if named or _detected(path) == likely:
                raise
    with ExitStack() as opened:
        kind = _kind_of_open_hdf5(path, opened) if likely in ("hdf5", "openpmd") else None
        return _without_static(kind or _detected(path), path, names, options, stamp, trust)


def _detected(path: str) -> str:
    return folder_format(path) or detect(path, read_head(path))


def _without_static(
    name: str,
    path: str,
    names: Sequence[str] | None,
    options: Mapping[str, Any],
    stamp: Stamp | None,
    trust: Trust | None,
) -> Index:
    format = format_named(name)
    others = {"static": False} if format.takes_static else {}
    index = _indexed(name, load_function(name, format.reader), path, names, {**options, **others}, stamp, trust)
    return index.with_static({})


def _kind_of_open_hdf5(path: str, opened: ExitStack) -> str | None:
    """Return the format of an HDF5 file, and keep it open for its reader; None if it is no such file."""
    from matex_data.readers.hdf5.files import kept_open  # imports h5py, which most formats do without
    from matex_data.readers.hdf5.names import HDF5_ERRORS

    try:
        opened.enter_context(kept_open(path))
    except HDF5_ERRORS:
        return None
    return detect(path, HDF5_MAGIC[0][1])


def read_head(path: str) -> bytes:
    """Return the first `HEAD_BYTES` of a file; raise ``DataError`` if it cannot be read."""
    try:
        with open_binary(path) as file:
            return file.read(HEAD_BYTES)
    except OSError as error:
        raise DataError("the file cannot be read", file=path, found=error) from error


def _kind_of_hdf5(path: str) -> str:
    """Return the format of an HDF5 file; "hdf5" if it cannot be opened."""
    from matex_data.readers.hdf5.files import open_file  # imports h5py, which most formats do without
    from matex_data.readers.hdf5.names import HDF5_ERRORS
    from matex_data.readers.netcdf.netcdf4 import is_netcdf4
    from matex_data.readers.openpmd.series import is_openpmd

    try:
        with open_file(path) as file:
            return "openpmd" if is_openpmd(file) else "netcdf" if is_netcdf4(file) else "hdf5"
    except HDF5_ERRORS:
        return "hdf5"


def _is_text_table(path: str, head: bytes, named: bool) -> bool:
    """Return whether the file is a text table; ``named``: it has the name of one.

    Raises
    ------
    FormatError : the CSV reader is not installed.
    """
    try:
        import pyarrow  # noqa: F401 (by the reader, which would fail later)

        from matex_data.readers.csv import dialect
    except ModuleNotFoundError as error:
        if named:
            raise missing_package("csv", error, path) from error
        return False
    text = compression.plain_head(head)
    if not named:
        return dialect.is_table(text, whole=text is head and len(head) < HEAD_BYTES)
    certain = path.lower().endswith(TABLE_SUFFIXES)
    return not dialect.is_markup_or_script(text) and (certain or not dialect.is_binary(text))


def _unknown_format(path: str, head: bytes) -> FormatError:
    return FormatError(
        "cannot tell the format of the file",
        file=path,
        expected=f"one of {known_formats()}; a text table has the same number of fields, two or more, in each record",
        found=f"a file that begins with {head[:16]!r}",
        remedy="name the format with format=",
    )


def reader(name: str) -> Reader:
    """Return the function that indexes one file of a format, ``index(path, names=None, trust=None, **options)``.

    ``trust`` is where bytes may come from beside the folder of the file; a reader that takes none opens no other file.

    Raises
    ------
    FormatError : there is no such format, or a package that its reader imports is not installed.
    """
    function = load_function(name, format_named(name).reader)

    @wraps(function)
    def index(path: str, names: Sequence[str] | None = None, trust: Trust | None = None, /, **options: Any) -> Index:
        return _indexed(name, function, path, names, options, _stamp(path), trust)

    return index


def _indexed(
    name: str,
    function: Reader,
    path: str,
    names: Sequence[str] | None,
    options: Mapping[str, Any],
    stamp: Stamp | None,
    trust: Trust | None,
) -> Index:
    """Return what a reader returns, with the stamp: taken before the file is opened, so that a change shows."""
    options, samples = _samples(name, options)
    check_options(name, function, options, leading=2)
    _check_place(name, path)
    try:
        given = {**options, **_trust_of(name, trust)}
        found = _with_patterns(names, path, lambda chosen: function(path, chosen, **given))
        return samples(found).with_stamps({path: stamp})
    except ModuleNotFoundError as error:
        raise missing_package(name, error, path) from error
    except OSError as error:
        raise DataError("the file cannot be read", file=path, found=error) from error


def collective_reader(name: str) -> Reader | None:
    """Return the function by which all ranks index the files of a format; None if one rank indexes each file.

    The function has the signature ``index_collectively(paths, names, ranks, trust=None, **options) -> Index`` and is
    *Collective*.
    Each rank takes the stamps of its block of the files. Rank 0 gets the index of all files; other ranks may get that
    of their own files.

    Raises
    ------
    FormatError : there is no such format, or a package that its reader imports is not installed.
    """
    address, stamped = format_named(name).collective_reader, format_named(name).stamped
    if address is None:
        return None
    function = load_function(name, address)

    @wraps(function)
    def index_collectively(
        paths: Sequence[str],
        names: Sequence[str] | None,
        ranks: IndexingRanks,
        trust: Trust | None = None,
        /,
        **options: Any,
    ) -> Index:
        options, samples = _samples(name, options)
        check_options(name, function, options, leading=3)
        _check_place(name, paths[0])
        own = {path: _stamp(path) for path in paths[slice(*rank_range(len(paths), ranks.rank, ranks.size))] if stamped}
        stamping = StampingRanks(ranks, own)
        given = {**options, **_trust_of(name, trust)}
        index = samples(_with_patterns(names, paths[0], lambda chosen: function(paths, chosen, stamping, **given)))
        if stamping.gathered:
            return index
        return index.with_stamps({path: stamp for stamps in ranks.allgather(own) for path, stamp in stamps.items()})

    return index_collectively


def _samples(name: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[Index], Index]]:
    """Return the options of a reader, and what makes the samples that the user asks for of those of the reader.

    Raises
    ------
    FormatError : files of the format have no such samples.
    """
    sample, own = options.get(SAMPLE), format_named(name).samples
    check_sample(sample, own, name)
    if sample != FILE or FILE in own:
        return dict(options), lambda index: index
    return {key: value for key, value in options.items() if key != SAMPLE}, files_as_samples


def _trust_of(name: str, trust: Trust | None) -> dict[str, Trust]:
    """Return the argument of a reader that asks where bytes may come from; none for others."""
    return {TRUST: trust or Trust()} if format_named(name).takes_trust else {}


def _check_place(name: str, path: str) -> None:
    """Raise ``FormatError`` if the file is in a store of objects, and a reader of another package reads files only."""
    if is_url(path) and name not in FORMATS and not format_named(name).remote:
        raise FormatError(
            f"files of the format {name!r} are not read from a store of objects",
            file=path,
            remedy="copy the files to a file system that all ranks see; or, in the package that registers the format, "
            "open them by matex_data.abc.open_binary, and give Format(..., remote=True)",
        )


def _with_patterns(names: Sequence[str] | None, path: str, read: Callable[[Sequence[str] | None], Index]) -> Index:
    """Return the index of the fields ``names``; patterns are expanded if the reader has no fields of these names.

    Parameters
    ----------
    path : of the file, for errors.
    read : reads the index of the given fields; None: of all fields.
    """
    try:
        return read(names)
    except FieldNotFound as error:
        if error.problem == NO_MATCH or not any(map(is_pattern, names or [])):
            raise
    return read(expand_names(names or [], read(None).fields, path))


def _stamp(path: str) -> Stamp | None:
    try:
        return Stamp.of(path)
    except OSError:  # the error of the reader is more precise
        return None
