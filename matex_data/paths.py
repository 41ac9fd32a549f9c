"""Paths of many files: their order, and which of them exist, without a system call for each; code of libraries."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from math import prod
from types import FrameType

_DIGITS = str.maketrans("0123456789", "0" * 10)
_NUMBER = re.compile("[0-9]+")
_RANGE = re.compile(r"\{([0-9]{1,18})\.\.([0-9]{1,18})\}")
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_OF_SCRIPT: list[str] = []
_STDLIB = os.path.dirname(os.__file__)  # noqa: PTH120
LISTED = 32  # files of one folder from which on the folder is listed, which is one call instead of one per file


def natural_sorted(paths: Iterable[str]) -> list[str]:
    """Return the paths with numbers by value, file2 before file10; equal ones in the order of the paths themselves.

    >>> natural_sorted(["b3", "a10", "a9"])
    ['a9', 'a10', 'b3']
    """
    listed = list(paths)
    if len({path.translate(_DIGITS) for path in listed}) == 1:  # in half the time
        return sorted(listed)
    return sorted(listed, key=lambda path: (_NUMBER.sub(_by_value, path), path))


def _by_value(number: re.Match[str]) -> str:
    """Return the digits of a number behind how many there are, and a character that is less than all others."""
    digits = number[0].lstrip("0")
    return f"\0{len(digits):04}{digits}"


def numbered(path: str) -> Iterator[str]:
    """Yield the paths of a range of numbers in braces, as in the names of WebDataset's shards and in a shell.

    Numbers have as many digits as the ends of the range if one of these has zeros in front.

    >>> list(numbered("train-{08..10}.tar"))
    ['train-08.tar', 'train-09.tar', 'train-10.tar']
    >>> list(numbered("a.tar"))
    ['a.tar']
    """
    found = _RANGE.search(path)
    if found is None:
        yield path
        return
    first, last = found.groups()
    is_padded = any(len(end) > 1 and end.startswith("0") for end in (first, last))
    width = max(len(first), len(last)) if is_padded else 0
    step = 1 if int(first) <= int(last) else -1
    for number in range(int(first), int(last) + step, step):
        for rest in numbered(path[found.end() :]):
            yield f"{path[: found.start()]}{number:0{width}d}{rest}"


def count_numbered(path: str) -> int:
    """Return how many paths `numbered` yields.

    >>> count_numbered("run{1..4}/{0..99999999999}.h5")
    400000000000
    """
    return prod(abs(int(last) - int(first)) + 1 for first, last in _RANGE.findall(path))


def leads_nowhere(path: str) -> bool:
    """Return whether a path is a link whose target does not exist.

    >>> leads_nowhere("no such file")
    False
    """
    return os.path.islink(path) and not os.path.exists(path)  # noqa: PTH110, PTH114 (URLs come here, too)


def partitioned_files(entries: Iterable[os.DirEntry[str]]) -> Iterator[os.DirEntry[str]]:
    """Yield the files of a folder, and those of its partitions, folders such as ``year=2020``; no hidden ones.

    Links that lead nowhere are among them.

    Parameters
    ----------
    entries : of the folder.
    """
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_file():
            yield entry
        elif "=" in entry.name and entry.is_dir():
            with os.scandir(entry.path) as inner:
                yield from partitioned_files(inner)
        elif entry.is_symlink() and leads_nowhere(entry.path):
            yield entry


def existing_files(paths: Sequence[str]) -> set[str]:
    """Return those of the paths that are files. A folder that holds many of them is listed once.

    >>> existing_files(["no such file"])
    set()
    """
    by_folder: dict[str, list[str]] = {}
    for path in paths:
        by_folder.setdefault(os.path.dirname(path), []).append(path)  # noqa: PTH120 (a Path takes ten times as long)
    found = (
        _listed(folder, of_folder) if len(of_folder) >= LISTED else filter(os.path.isfile, of_folder)
        for folder, of_folder in by_folder.items()
    )
    return set(chain.from_iterable(found))


def _listed(folder: str, paths: Sequence[str]) -> list[str]:
    try:
        with os.scandir(folder or os.curdir) as entries:
            names = {entry.name for entry in entries if entry.is_file()}
    except OSError:
        return []
    return [path for path in paths if os.path.basename(path) in names]  # noqa: PTH119


def count_as_script(path: str) -> None:
    """Let ``is_library`` be False for a source file, or for those of a folder: it is the program that runs."""
    _OF_SCRIPT.append(path)


def is_library(file: str) -> bool:
    """Return whether a source file belongs to an installed package or to the standard library.

    >>> is_library(os.__file__), is_library("/home/me/train.py")
    (True, False)
    """
    known = file.startswith(("<frozen", _STDLIB)) or any(folder in file for folder in _PACKAGES)
    return known and not file.startswith(tuple(_OF_SCRIPT))


def is_of_user(frame: FrameType) -> bool:
    """Return whether a frame executes code of the user, not of this package or a library."""
    own = str(frame.f_globals.get("__name__")).partition(".")[0] == "matex_data"
    return not own and not is_library(frame.f_code.co_filename)


def is_standard_library(file: str) -> bool:
    """Return whether a source file belongs to the standard library."""
    return is_library(file) and not any(folder in file for folder in _PACKAGES)
