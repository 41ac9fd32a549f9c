"""Readers: one module or package per file format. A reader turns a file into an `Index`.

A reader is a function ``index(path, names=None, **options) -> Index``. It reads metadata only: no bulk data, no MPI, no
TensorFlow. It raises `FormatError` for a file that is not of its format, and `FieldNotFound` for an unknown field; both
errors name the file. `matex_data.abc` describes the contract for readers in other packages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any

from matex_data.errors import FieldNotFound, FormatError
from matex_data.fields import NO_MATCH, expand_names, is_pattern
from matex_data.index.model import Index
from matex_data.index.stamps import Stamp
from matex_data.index.whole import FILE, SAMPLE, check_sample, files_as_samples
from matex_data.readers.catalogue import Catalogue
from matex_data.readers.collective import IndexingRanks
from matex_data.readers.detection import (
    HEAD_BYTES,
    data_folders,
    detect,
    files_of_folder,
    folder_format,
    has_known_name,
    read_head,
    refuse_folder,
)
from matex_data.readers.formats import (
    FORMATS,
    HDF5_MAGIC,
    Reader,
    format_named,
    known_formats,
    load_function,
    missing_package,
    no_text,
)
from matex_data.readers.options import TRUST, check_options, takes_names
from matex_data.readers.zarr.stores import is_repository
from matex_data.sampling.schedule import rank_range
from matex_data.storage.files import unreadable
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
    likely : format of the files before it, which is probably that of this one.
    named : the user has named the format.
    trust : where bytes may come from beside the folder of the file.
    """
    stamp = _stamp(path)
    if named or (format_named(likely).verified and format_named(likely).matches_name(path) and not options):
        try:
            return _indexed(likely, path, names, options, stamp, trust, is_first=False)
        except FormatError:
            if named or _detected(path, options) == likely:
                raise
    with ExitStack() as opened:
        kind = _kind_of_open_hdf5(path, options, opened) if likely in ("hdf5", "openpmd") else None
        return _indexed(kind or _detected(path, options), path, names, options, stamp, trust, is_first=False)


def _detected(path: str, options: Mapping[str, Any]) -> str:
    return folder_format(path) or detect(path, read_head(path), options)


def _kind_of_open_hdf5(path: str, options: Mapping[str, Any], opened: ExitStack) -> str | None:
    """Return the format of an HDF5 file, and keep it open for its reader; None if it is no such file."""
    from matex_data.readers.hdf5.files import kept_open  # imports h5py, which most formats do without
    from matex_data.readers.hdf5.names import HDF5_ERRORS

    try:
        opened.enter_context(kept_open(path))
    except HDF5_ERRORS:
        return None
    return detect(path, HDF5_MAGIC[0][1], options)


def reader(name: str) -> Callable[..., Index]:
    """Return the function that indexes one file of a format, ``index(path, names=None, trust=None, **options)``.

    ``trust`` is where bytes may come from beside the folder of the file; a reader that takes none opens no other file.

    Raises
    ------
    FormatError : there is no such format, or a package that its reader imports is not installed.
    """
    function = load_function(name, format_named(name).reader)

    @wraps(function)
    def index(path: str, names: Sequence[str] | None = None, trust: Trust | None = None, /, **options: Any) -> Index:
        return _indexed(name, path, names, options, _stamp(path), trust, is_first=True)

    return index


def _indexed(
    name: str,
    path: str,
    names: Sequence[str] | None,
    options: Mapping[str, Any],
    stamp: Stamp | None,
    trust: Trust | None,
    is_first: bool,
) -> Index:
    """Return what a reader returns, with the stamp: taken before the file is opened, so that a change shows.

    A stamp with parts is that of the reader, which knows these. A file that is being written (``swmr=True``) has none,
    and so has a repository, whose commits do not change its folder. ``is_first``: of the files of a data set; arrays
    that belong to no sample of others are not read.
    """
    format = format_named(name)
    function = load_function(name, format.reader)
    without = {"static": False} if format.takes_static and not is_first else {}
    options, samples = _samples(name, {**options, **without})
    if options.get("swmr") or (stamp is not None and name == "zarr" and is_repository(path)):
        stamp = None
    check_options(name, function, options, leading=1 + takes_names(function))
    _check_storage(name, path)
    try:
        given = {**options, **_trust_of(name, trust)}
        index = samples(_chosen(function, path, names, given, is_first))
        whole = {file.path: file.stamp for file in index.files if file.stamp is not None and file.stamp.parts}
        index = index.with_stamps({path: stamp, **whole})
        return index if is_first else index.with_static({})
    except ModuleNotFoundError as error:
        raise missing_package(name, error, path) from error
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise no_text(path, error) from error


def _chosen(
    function: Reader, path: str, names: Sequence[str] | None, given: Mapping[str, Any], is_first: bool
) -> Index:
    """Return the index of the fields ``names`` of what a reader finds, or that a reader with names returns."""
    if takes_names(function):
        return _with_patterns(names, path, lambda chosen: function(path, chosen, **given))
    found = function(path, **given)
    catalogue = found if isinstance(found, Catalogue) else Catalogue.of(path, found)
    if is_first:
        catalogue.check_named()
    return catalogue.index(names)


def collective_reader(name: str) -> Callable[..., Index] | None:
    """Return the function by which all ranks index the files of a format; None if one rank indexes each file.

    The function has the signature ``index_collectively(paths, names, ranks, trust=None, **options) -> Index`` and is
    *Collective*. Rank 0 gets the index of all files; other ranks may get that of their own files.

    Raises
    ------
    FormatError : there is no such format, or a package that its reader imports is not installed.
    """
    address = format_named(name).collective_reader
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
        _check_storage(name, paths[0])
        own_paths = paths[slice(*rank_range(len(paths), ranks.rank, ranks.size))]
        own = {} if name in FORMATS else {path: _stamp(path) for path in own_paths}  # readers of FORMATS take stamps
        given = {**options, **_trust_of(name, trust)}
        index = samples(_with_patterns(names, paths[0], lambda chosen: function(paths, chosen, ranks, **given)))
        return index.with_stamps({path: stamp for stamps in ranks.allgather(own) for path, stamp in stamps.items()})

    return index_collectively


def _samples(name: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[Index], Index]]:
    """Return the options of a reader, and what makes the samples that the user asks for of those of the reader; raise
    ``FormatError`` if files of the format have no such samples.
    """
    sample, own = options.get(SAMPLE), format_named(name).samples
    check_sample(sample, own, name)
    if sample != FILE or FILE in own:
        return dict(options), lambda index: index
    return {key: value for key, value in options.items() if key != SAMPLE}, files_as_samples


def _trust_of(name: str, trust: Trust | None) -> dict[str, Trust]:
    """Return the argument of a reader that asks where bytes may come from; none for others."""
    return {TRUST: trust or Trust()} if format_named(name).takes_trust else {}


def _check_storage(name: str, path: str) -> None:
    """Raise ``FormatError`` if the file is in a store of objects, and its reader reads files only."""
    if is_url(path) and not format_named(name).remote:
        register = "; or, in the package that registers the format, open them by matex_data.abc.open_binary, and give "
        raise FormatError(
            f"files of the format {name!r} are not read from a store of objects",
            file=path,
            remedy="copy the files to a file system that all ranks see"
            + ("" if name in FORMATS else register + "Format(..., remote=True)"),
        )


def _with_patterns(names: Sequence[str] | None, path: str, read: Callable[[Sequence[str] | None], Index]) -> Index:
    """Return the index of the fields ``names``; patterns are expanded if the reader has no fields of these names.
    ``read``: reads the index of the given fields; None: of all fields.
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
