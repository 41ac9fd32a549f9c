"""Folders of image files: their contents by ``os.scandir``, each folder listed once and no file examined."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from matex_data.errors import DataError, FormatError
from matex_data.paths import natural_sorted
from matex_data.readers.formats import FORMATS, IMAGE_SUFFIXES, TABLE_SUFFIXES, TEXT_SUFFIXES

PROBED_ENTRIES = 1000  # of a folder, to tell whether it holds images
PROBED_FOLDERS = 100
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
    """Return the contents of a folder and of all folders below it.

    Raises
    ------
    DataError : a folder cannot be read.
    """
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


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError as error:
        raise DataError("the folder cannot be read", file=path, found=error) from error


def report_others(root: str, others: Sequence[str], reason: str = "are no images") -> None:
    """Warn once of files that are left out."""
    if others:
        shown = natural_sorted(others)
        names = ", ".join(map(repr, shown[:SHOWN])) + (", ..." if len(shown) > SHOWN else "")
        tables = [name for name in shown if name.lower().endswith(TABLE_SUFFIXES)]
        hint = f"; open {tables[0]!r} itself if it lists images and their labels" if tables else ""
        warnings.warn(f"{root}: {len(shown)} files {reason} and are left out: {names}{hint}", stacklevel=2)


def is_image_folder(path: str) -> bool:
    """Return whether a folder holds a data set of images: image files, or folders of them. Looks at some entries only.

    A folder with more files of another format than images is not one, nor is one with a table, unless at least two
    folders in it hold images: a table may list images, and a folder beside it may hold pictures of its columns.
    """
    files, folders = _probe(path)
    images = sum(is_image(name) for name in files)
    data = sum(_is_data(name) for name in files)
    if images or data:
        return images > data
    if any(name.lower().endswith(TABLE_SUFFIXES) for name in files):
        return (
            len(folders) > 1
            and len(list(islice(_image_folders(path, folders), 2))) == 2
            and not _manifests(path, files)
        )
    return next(_image_folders(path, folders), None) is not None


def _probe(path: str) -> tuple[list[str], list[str]]:
    """Return names of files and of folders in a folder."""
    try:
        with os.scandir(path) as entries:
            found = [entry for entry in islice(entries, PROBED_ENTRIES) if not is_hidden(entry.name)]
            folders = [entry.name for entry in found if entry.is_dir()]
    except OSError:
        return [], []
    return [entry.name for entry in found if entry.name not in set(folders)], natural_sorted(folders)


def _is_data(name: str) -> bool:
    """Return whether a file has the name of another format; tables and texts may accompany images."""
    if is_image(name) or name.lower().endswith((*TABLE_SUFFIXES, *TEXT_SUFFIXES)):
        return False
    return any(format.matches_name(name) for format in FORMATS.values())


def _image_folders(path: str, folders: Sequence[str]) -> Iterator[str]:
    """Yield the folders that hold images, or folders of images."""
    waiting = [(name, name) for name in folders]
    for number in range(PROBED_FOLDERS):
        if number >= len(waiting):
            return
        name, top = waiting[number]
        files, below = _probe(f"{path}/{name}")
        if any(is_image(file) for file in files):
            yield top
        else:
            waiting += [(f"{name}/{other}", top) for other in below]


def _manifests(path: str, files: Sequence[str]) -> list[str]:
    from matex_data.readers.images.manifest import names_images

    tables = [name for name in files if name.lower().endswith(TABLE_SUFFIXES)]
    return [name for name in tables if names_images(str(Path(path, name)), _head(Path(path, name)))]


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(1 << 16)
    except OSError:
        return b""
