"""A look at some entries of a folder, to tell whether it holds a data set of images."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Sequence
from itertools import islice

from matex_data.paths import natural_sorted
from matex_data.readers.detection import read_head
from matex_data.readers.fits.kinds import holds_rows
from matex_data.readers.formats import FORMATS, TABLE_SUFFIXES, TEXT_SUFFIXES
from matex_data.readers.images.folders.contents import is_hidden, is_image
from matex_data.readers.images.folders.manifest import names_images
from matex_data.storage.files import open_binary
from matex_data.storage.objects import is_url, names_below

METADATA = ("metadata.jsonl", "metadata.csv")
PROBED_ENTRIES = 1000  # of a folder
PROBED_FOLDERS = 100


def is_image_folder(path: str) -> bool:
    """Return whether a folder holds a data set of images: image files, or folders of them. Looks at some entries only.

    A folder with more files of another format than images is not one, nor is one with a table, unless at least two
    folders in it hold images: a table may list images, and a folder beside it may hold pictures of its columns.
    """
    files, folders = _probe(path)
    if metadata_table(path, files) is not None:
        return any(map(is_image, files)) or next(_image_folders(path, folders), None) is not None
    images = sum(is_image(name) for name in files)
    data = sum(_is_data(name) for name in files)
    if images or data:
        return images > data and not _are_tables(path, files)
    if any(name.lower().endswith(TABLE_SUFFIXES) for name in files):
        return (
            len(folders) > 1
            and len(list(islice(_image_folders(path, folders), 2))) == 2
            and not _manifests(path, files)
        )
    return next(_image_folders(path, folders), None) is not None


def metadata_table(path: str, names: Container[str]) -> str | None:
    """Return the table of the images in a folder of these files, as Hugging Face names it; None: there is none."""
    tables = [f"{path.rstrip('/')}/{name}" for name in METADATA if name in names]
    return next((table for table in tables if names_images(table, read_head(table))), None)


def _probe(path: str) -> tuple[list[str], list[str]]:
    """Return names of files and of folders in a folder."""
    try:
        if is_url(path):
            names = [name for name in islice(names_below(path), PROBED_ENTRIES) if not is_hidden(name)]
            within = dict.fromkeys(name.partition("/")[0] for name in names if "/" in name)
            return [name for name in names if "/" not in name], natural_sorted(within)
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


def _are_tables(path: str, files: Sequence[str]) -> bool:
    """Return whether the first of the images is a FITS file of a table or a cube."""
    first = natural_sorted(name for name in files if is_image(name))[:1]
    return any(holds_rows(f"{path}/{name}", _head(f"{path}/{name}")) for name in first)


def _manifests(path: str, files: Sequence[str]) -> list[str]:
    tables = [name for name in files if name.lower().endswith(TABLE_SUFFIXES)]
    return [name for name in tables if names_images(f"{path}/{name}", _head(f"{path}/{name}"))]


def _head(path: str) -> bytes:
    try:
        with open_binary(path) as file:
            return file.read(1 << 16)
    except OSError:
        return b""
