"""Folders of image files: their contents by ``os.scandir``, each folder listed once and no file examined."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from matex_data.errors import FormatError, shortened
from matex_data.paths import natural_sorted
from matex_data.readers.formats import IMAGE_SUFFIXES, JSON_LINES_SUFFIXES, TABLE_SUFFIXES
from matex_data.storage.files import unreadable
from matex_data.storage.objects import is_url, names_below
from matex_data.warning import warn

DEPTH = 32  # of folders in folders; more is a circle of links
SHOWN = 3  # names in a message


def is_image(name: str) -> bool:
    """Return whether a file has the name of an image."""
    return name.lower().endswith(IMAGE_SUFFIXES)


def is_hidden(name: str) -> bool:
    """Return whether a file or folder belongs to the system."""
    return name.startswith(".") or name == "__MACOSX"


@dataclass
class Folder:
    """Contents of a folder.

    Parameters
    ----------
    name : relative to the root of the data set; "" is the root itself.
    images : names of its image files, sorted with numbers by value.
    folders : folders in it, likewise.
    others : paths of files that are no images, or hidden, relative to the root.
    """

    name: str
    images: list[str] = field(default_factory=list)
    folders: list[Folder] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    @property
    def base(self) -> str:
        """Name within its own folder."""
        return self.name.rpartition("/")[2]

    def walk(self) -> Iterator[Folder]:
        """Yield the folder and all folders below it."""
        yield self
        for folder in self.folders:
            yield from folder.walk()

    def files(self) -> list[str]:
        """Return all image files, relative to the root, sorted with numbers by value."""
        found = [f"{folder.name}/{image}".lstrip("/") for folder in self.walk() for image in folder.images]
        return found if not self.folders else natural_sorted(found)

    @property
    def holds_images(self) -> bool:
        """True if there is an image in it or below it."""
        return any(folder.images for folder in self.walk())


def read_folder(root: str, name: str = "", depth: int = 0) -> Folder:
    """Return the contents of a folder and of all folders below it; raise ``DataError`` if a folder cannot be read."""
    if is_url(root):
        return _folder_of("", list(_names_below(root)))
    if depth > DEPTH:
        raise FormatError("the folders contain each other", file=f"{root}/{name}", expected=f"at most {DEPTH} levels")
    folder, below = Folder(name), []
    for entry in _entries(f"{root}/{name}" if name else root):
        if is_hidden(entry.name):
            folder.others.append(f"{name}/{entry.name}".lstrip("/"))
        elif entry.is_dir():
            below.append(entry.name)
        elif is_image(entry.name):
            folder.images.append(entry.name)
        else:
            folder.others.append(f"{name}/{entry.name}".lstrip("/"))
    folder.images = natural_sorted(folder.images)
    folder.folders = [read_folder(root, f"{name}/{other}".lstrip("/"), depth + 1) for other in natural_sorted(below)]
    return folder


def _names_below(url: str) -> Iterator[str]:
    try:
        yield from names_below(url)
    except OSError as error:
        raise unreadable(url, error, "the folder") from error


def _folder_of(name: str, names: Sequence[str]) -> Folder:
    """Return the contents of a folder of objects.

    Parameters
    ----------
    name : of the folder, relative to the root.
    names : of all objects below it, relative to itself.
    """
    folder, below = Folder(name), dict[str, list[str]]()
    for path in names:
        first, separator, rest = path.partition("/")
        if is_hidden(first) or not (separator or is_image(first)):
            folder.others.append(f"{name}/{path}".lstrip("/"))
        elif separator:
            below.setdefault(first, []).append(rest)
        else:
            folder.images.append(first)
    folder.images = natural_sorted(folder.images)
    folder.folders = [_folder_of(f"{name}/{other}".lstrip("/"), below[other]) for other in natural_sorted(below)]
    return folder


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError as error:
        raise unreadable(path, error, "the folder") from error


def report_others(root: str, others: Sequence[str], reason: str = "are no images") -> None:
    """Warn once of files that are left out."""
    if others:
        shown = natural_sorted(others)
        names = ", ".join(shortened(map(repr, shown), SHOWN))
        tables = [name for name in shown if name.lower().endswith((*TABLE_SUFFIXES, *JSON_LINES_SUFFIXES))]
        hint = f"; open {tables[0]!r} itself if it lists images and their labels" if tables else ""
        warn(f"{root}: {len(shown)} files {reason} and are left out: {names}{hint}")
