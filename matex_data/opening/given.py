"""The data that ``open_dataset`` is given: paths of files, or arrays in memory, equal on all ranks."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from matex_data.arguments import check_arguments
from matex_data.errors import ArgumentError, DataError, near_matches
from matex_data.fields import as_list
from matex_data.index.columns import PathTable
from matex_data.memory import EXAMPLE, NAME, HeldArrays, digest, index_arrays, is_in_memory
from matex_data.mpi.communicator import Communicator, Equal
from matex_data.opening.folders import roots
from matex_data.paths import count_numbered, existing_files, natural_sorted, numbered, partitioned_files
from matex_data.readers import data_folders, files_of_folder, folder_format, refuse_folder
from matex_data.storage import objects
from matex_data.storage.files import check_link, unreadable
from matex_data.storage.trust import NONE, Trust
from matex_data.transforms.categories import without_categories

FIRST_BLOCK = 1 << 12  # paths that are looked for at once
MOST_NAMED = 4  # paths in an error
MOST_OF_WEB = 1_000_000  # files of a range on a web server

MemoryArrays = Any
"""Dict of arrays, ``pandas.DataFrame`` or ``xarray.Dataset``."""
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
IsWhole = Callable[[str], Any]
"""Function that tells whether a folder is a data set as a whole."""


@dataclass(frozen=True)
class Given:
    """Files, or arrays in memory.

    Parameters
    ----------
    files : paths of the files; of arrays one name that is no path.
    memory : the arrays; None: files.
    trust : what the user trusts, beside the folders of the files.
    roots : see `Reading`.
    """

    files: PathTable
    memory: HeldArrays | None
    trust: Trust = NONE
    roots: frozenset[str] = frozenset()

    @classmethod
    def of(cls, comm: Communicator, arguments: Mapping[str, Any]) -> Given:
        """Return what all ranks are given. *Collective*.

        Parameters
        ----------
        comm : the ranks.
        arguments : of ``open_dataset``, by name; see `equal_on_all`.

        Raises
        ------
        DataError : there are no such files, or something cannot be trusted; the arrays are no data set, or options are
            given that only files have.
        PartitionError : the arrays differ between the ranks.
        """
        if is_in_memory(arguments["paths"]):
            return cls(PathTable.of([NAME]), _hold(comm, arguments))
        return _resolve(comm, arguments)


def equal_on_all(arguments: Mapping[str, Any]) -> Equal:
    """Return what the ranks compare of the arguments of ``open_dataset``: all but the communicator."""
    compared = {name: value for name, value in arguments.items() if name not in ("paths", "comm", "options")}
    paths = "arrays" if is_in_memory(arguments["paths"]) else _named(arguments["paths"])
    remedy = "call open_dataset with the same arguments on every rank"
    return Equal({"paths": paths, **compared, **arguments["options"]}, "the ranks open different data sets", remedy)


def _hold(comm: Communicator, arguments: Mapping[str, Any]) -> HeldArrays:
    """Return arrays in memory, after a look at whether all ranks have equal ones. *Collective*."""
    _, options = without_categories(arguments["options"])

    def hold() -> HeldArrays:
        unknown = [name for name in options if name != "sample_dim"]
        unknown += [name for name in ("sample", "format", "index", "absent") if arguments[name] is not None]
        if unknown:
            raise DataError(
                f"{unknown[0]}= is an option of files",
                expected="files",
                found="arrays in memory",
                remedy=f"leave out {unknown[0]}=",
            )
        names = [*as_list(arguments["inputs"]), *as_list(arguments["targets"])]
        return index_arrays(arguments["paths"], options.get("sample_dim"), names)

    held = comm.agreed(hold)
    if comm.size > 1:
        remedy = "give all samples on every rank, or write them to a file that all ranks open"
        comm.agree(equal=Equal({"arrays": digest(held.arrays)}, "the ranks open different arrays", remedy))
    return held


def _resolve(comm: Communicator, arguments: Mapping[str, Any]) -> Given:
    """Return the files of ``paths``, what is trusted, and the roots, as rank 0 finds them. *Collective*.

    So a thousand ranks do not list a folder, and have one environment.
    """
    paths, trusted = arguments["paths"], arguments["trusted"]
    trees = [trusted] if isinstance(trusted, str | os.PathLike) else list(trusted)

    def find() -> Given:
        files = expand(paths, arguments["format"], arguments["options"])
        others = _others(paths, files)
        folders = [path for path in others if objects.is_url(path) or Path(path).is_dir()]
        return Given(PathTable.of(files), None, Trust.of([*trees, *folders]) | Trust.of_site(), roots(others))

    return comm.on_root(find)


def _named(paths: Paths) -> tuple[object, ...]:
    """Return what is equal for equal arguments: the paths; of many, the first ones, their number, and a digest."""
    try:
        check_arguments(_named, locals(), "open_dataset")
    except ArgumentError as error:
        remedy = f"give arrays in memory by name, such as {EXAMPLE}"
        expected = f"{error.expected}; a dict of arrays, a pandas.DataFrame or an xarray.Dataset"
        raise ArgumentError(error.problem, expected=expected, found=error.found, remedy=remedy) from None
    names = [os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    if len(names) <= MOST_NAMED:
        return tuple(names)
    digest = hashlib.blake2b("\0".join(names).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    return (*names[:MOST_NAMED], f"{len(names)} in all", digest)


def _others(paths: Paths, files: Sequence[str]) -> set[str]:
    """Return the folders and patterns that the user names: those among ``paths`` that are not the files themselves."""
    named = {os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)}
    return named.difference(files)


def expand(paths: Paths, format: str | None = None, options: Mapping[str, Any] | None = None) -> list[str]:
    """Return the files of a path, a glob, a directory or a list of these, sorted within each.

    A directory that is a data set as a whole, such as a folder of images, stands for itself. A range in braces,
    ``train-{000..255}.tar``, is a list, each file of which has to exist.

    Parameters
    ----------
    format : name of the format; None: detected.
    options : of the reader.

    Raises
    ------
    DataError : there are no such files.
    """
    expanded: list[str] = []
    is_whole = partial(folder_format, name=format, options=options)
    given = _given([paths] if isinstance(paths, str | os.PathLike) else paths)
    # Longer and longer blocks: a range is compared with what exists before all of it is in memory.
    size = FIRST_BLOCK
    while block := list(islice(given, size)):
        urls = [path for path, _ in block if objects.is_url(path)]
        for url in urls:
            objects.check_url(url)
        local = [path for path, _ in block if not objects.is_url(path)]
        try:
            files = existing_files(local) | _existing_objects(urls)
            for path, whole in block:
                expanded += [path] if path in files else _expand_one(path, is_whole, whole)
        except OSError as error:
            raise unreadable(os.fsdecode(error.filename or ""), error, "the path") from error
        size *= 2
    if not expanded:
        raise DataError(
            "the list of files is empty",
            expected="at least one path",
            found=paths,
            remedy="look at what has made the list, such as the pattern of glob.glob",
        )
    return expanded


def _given(paths: Iterable[str | os.PathLike[str]]) -> Iterator[tuple[str, str]]:
    """Yield each path, those of ranges in braces one by one, and the argument that it is of."""
    for whole in (os.fspath(path) for path in paths):
        if not whole:
            raise DataError("a path is empty", expected="the name of a file or folder", remedy='name it, such as "."')
        if "{" not in whole or (not objects.is_url(whole) and _exists(whole)):
            yield whole, whole
            continue
        if objects.is_web(whole) and count_numbered(whole) > MOST_OF_WEB:
            raise DataError(
                "the range stands for too many files of a web server, which does not list what it has",
                file=whole,
                expected=f"at most {MOST_OF_WEB:,}",
                found=f"{count_numbered(whole):,}",
            )
        yield from ((path, whole) for path in numbered(whole))


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError as error:
        raise unreadable(os.fsdecode(error.filename or ""), error, "the path") from error


def _expand_url(url: str, is_whole: IsWhole) -> list[str]:
    """Return the objects of a URL, which may be a pattern or a folder, sorted."""
    try:
        if objects.has_wildcard(url):
            found, folders = objects.matching(url)
            files = [*found, *data_folders(folders)] or [
                file for folder in folders for file in _expand_url(folder, is_whole)
            ]
        else:
            folder = url.rstrip("/")
            if is_whole(folder):
                return [folder]
            names = [name for name in objects.names_below(folder) if _is_partitioned(name)]
            files = files_of_folder([f"{folder}/{name}" for name in names])
    except OSError as error:
        raise unreadable(url, error, "the store") from error
    if not files:
        remedy = "check the name of the bucket, and the path in it"
        raise DataError(
            "there are no such objects", file=url, expected="an object, a folder or a pattern", remedy=remedy
        )
    return natural_sorted(files)


def _existing_objects(urls: Sequence[str]) -> set[str]:
    try:
        return objects.existing_objects(urls)
    except OSError as error:
        raise unreadable(urls[0], error, "the store") from error


def _is_partitioned(name: str) -> bool:
    """Return whether a file lies in a folder itself, or in its partitions, folders such as ``year=2020``."""
    *folders, file = name.split("/")
    return not file.startswith(".") and all("=" in folder and not folder.startswith(".") for folder in folders)


def _of_folder(path: str, is_whole: IsWhole) -> tuple[list[str], list[str]]:
    """Return the files of a folder, or itself if it is a data set as a whole, and those that may be links."""
    if is_whole(path):
        return [path], []
    with os.scandir(path) as scanned:  # of which most file systems tell the type at once
        entries = list(scanned)
    refuse_folder(path, {entry.name for entry in entries})
    folders = data_folders([entry.path for entry in entries if entry.is_dir()])
    listed = {file.path: file.is_file() for file in partitioned_files(entries)}
    files = folders or files_of_folder(list(listed))
    return files, [file for file in files if not listed.get(file, True)]


def _expand_one(path: str, is_whole: IsWhole, whole: str) -> list[str]:
    """Return the files of a path that is no file, which is one of those that the argument ``whole`` stands for."""
    if objects.is_url(path):
        return _expand_url(path, is_whole)
    location = Path(path)
    if location.is_file():
        return [path]
    is_folder, folders = location.is_dir(), list[str]()
    if is_folder:
        files, links = _of_folder(path, is_whole)
    else:
        found = glob.glob(path, recursive=True)  # noqa: PTH207 (absolute too)
        existing = existing_files(found)
        files = [*existing, *data_folders(found)]
        links = natural_sorted(file for file in found if file not in existing)
        if not files:  # folders alone, of which each stands for what it does where it is named by itself
            folders = [folder for folder in found if Path(folder).is_dir()]
            inner = [_of_folder(folder, is_whole) for folder in folders]
            files = list(dict.fromkeys(file for own, _ in inner for file in own))
            links += [link for _, own in inner for link in own]
    for link in links:
        check_link(link)
    if files:
        return natural_sorted(files)
    folder = location.parent
    siblings = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    raise DataError(
        "the directory holds no files" if is_folder else "the directories hold no files" if folders else "no such file",
        file=path,
        expected=None if path == whole else f"all of the {count_numbered(whole):,} files of {whole!r}",
        found=f"in its folder: {near_matches(location.name, siblings)}" if siblings else f"no folder {str(folder)!r}",
        remedy="check the path; a relative path begins at the working directory",
    )
