"""Listings: which image files make a data set, by which layout, and what is known of each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from matex_data._types import Array, Integers
from matex_data.declared import declared
from matex_data.errors import DataError, FormatError
from matex_data.readers.formats import JSON_LINES_SUFFIXES, JSON_SUFFIXES, TABLE_SUFFIXES, TEXT_SUFFIXES
from matex_data.readers.images.folders.contents import Folder, is_image, read_folder, report_others
from matex_data.readers.images.folders.manifest import read_manifest
from matex_data.readers.images.folders.members import ManifestValues
from matex_data.readers.images.folders.pairs import (
    SPLITS,
    PairFolders,
    check_no_pairs,
    find_pairs,
    is_image_folder,
    match_pairs,
)
from matex_data.readers.images.folders.probing import metadata_table
from matex_data.readers.images.texts import Texts
from matex_data.storage.files import is_folder
from matex_data.storage.objects import is_url
from matex_data.storage.trust import NONE, Trust

LAYOUTS = ("classes", "flat", "pairs", "manifest")


@declared
@dataclass(frozen=True)
class Classes:
    """Class of each file, where the files are sorted by class.

    Parameters
    ----------
    names : of the classes, sorted.
    first : int64[classes], first file of each class.
    count : number of files.
    """

    names: tuple[str, ...]
    first: Integers
    count: int

    def __len__(self) -> int:
        return self.count

    def take(self, numbers: Integers) -> Array:
        """Return the classes of files, int64."""
        return np.searchsorted(self.first, numbers, side="right") - 1


@dataclass(frozen=True)
class Listing:
    """Image files of a data set. Immutable, and small enough to broadcast.

    Parameters
    ----------
    path : folder with a separator at its end, or manifest.
    root : folder that the names of the files are relative to.
    images : names of the files.
    masks : of pairs, and of a manifest with two columns of files: the masks of the images.
    mask_counts : int64[images], masks of each image; None: one each.
    columns : values for each file, by the name of the field.
    unread : reason for each column that cannot be read, by name.
    """

    path: str
    root: str
    images: Texts
    masks: Texts | None = None
    mask_counts: Integers | None = None
    columns: Mapping[str, ManifestValues | Classes] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)


def list_images(
    paths: Sequence[str],
    layout: str | None,
    root: str | None,
    pairs: tuple[str, str] | None = None,
    trust: Trust = NONE,
) -> list[Listing]:
    """Return the listings of folders, manifests and image files; neighbouring files make one listing.

    Parameters
    ----------
    layout : one of ``LAYOUTS``, or None: found from the folders.
    root : folder that the paths of a manifest are relative to; None: its own.
    pairs : names of the folder of images and of the folder of masks.
    trust : where the images of a manifest may lie, beside ``root``.

    Raises
    ------
    DataError : there is no image, or a file of a manifest does not exist, or is not trusted.
    FormatError : the layout is ambiguous, or the folder has another one.
    """
    if layout is not None and layout not in LAYOUTS:
        raise FormatError("there is no such layout", expected=f"one of {LAYOUTS}, or None", found=repr(layout))
    if pairs is not None:
        layout = _layout_of_pairs(pairs, layout)
    listings: list[Listing] = []
    files: list[str] = []
    for path in paths:
        kind = _kind(path, layout)
        if kind == "file":
            files.append(path)
            continue
        listings += _list_files(files, layout)
        files = []
        is_table = kind == "manifest"
        listings.append(_list_manifest(path, root, trust) if is_table else _list_folder(path, layout, pairs, trust))
    listings += _list_files(files, layout)
    if root is not None and any(listing.root != root for listing in listings):
        raise FormatError(
            "root= is for manifests",
            file=paths[0],
            expected="a table of image files",
            found=paths[0],
            remedy="leave out root=, or open the table",
        )
    if pairs is not None and any(listing.masks is None for listing in listings):
        raise FormatError(
            "pairs= is for folders",
            file=paths[0],
            expected="a folder with both",
            found=paths[0],
            remedy="leave out pairs=, or open the folder that has both folders in it",
        )
    return listings


def _layout_of_pairs(pairs: Any, layout: str | None) -> str:
    """Return the layout "pairs"; raise ``FormatError`` if another one is wanted, or ``pairs`` are no names."""
    given = tuple(pairs) if isinstance(pairs, tuple | list) else ()
    if len(given) != 2 or not all(isinstance(name, str) and name.strip("/") for name in given):
        raise FormatError(
            "pairs= does not name two folders",
            expected="the names of the folder of images and of the folder of masks",
            found=repr(pairs),
            remedy="for example pairs=('CameraRGB', 'CameraMask')",
        )
    if layout not in (None, "pairs"):
        raise FormatError("pairs= is for the layout 'pairs'", expected="layout='pairs', or none", found=repr(layout))
    return "pairs"


def _kind(path: str, layout: str | None) -> str:
    if is_image(path) and layout != "manifest":
        return "file"
    if is_folder(path):
        return "folder"
    is_table = path.lower().endswith((*TABLE_SUFFIXES, *TEXT_SUFFIXES, *JSON_LINES_SUFFIXES, *JSON_SUFFIXES))
    return "manifest" if layout == "manifest" or is_table else "file"


def _list_manifest(path: str, root: str | None, trust: Trust) -> Listing:
    try:
        manifest = read_manifest(path, root, trust)
    except RecursionError as error:
        raise FormatError("objects of the manifest are nested too deeply", file=path, found=error) from error
    masks = None if manifest.masks is None else Texts.of(manifest.masks)
    return Listing(path, manifest.root, Texts.of(manifest.files), masks, None, manifest.columns, manifest.unread)


def _list_files(files: Sequence[str], layout: str | None) -> list[Listing]:
    """Return the listing of single image files, with the folder that all of them share as its root."""
    if not files:
        return []
    if len(files) == 1 and layout in (None, "flat"):
        folder, separator, name = files[0].rpartition("/")
        return [Listing(files[0], (folder or separator) or ".", Texts.of([name]))]
    if layout in ("pairs", "manifest"):
        raise FormatError(
            f"a list of image files has no layout {layout!r}",
            file=files[0],
            expected="layout='flat' or 'classes'",
            found=f"layout={layout!r}",
            remedy="open the folder, or the table",
        )
    root, names = _common_root(files)
    if layout == "classes":
        return [_of_classes(root, _by_class(files[0], names))]
    return [Listing(_folder_path(root), root, Texts.of(names))]


def _common_root(files: Sequence[str]) -> tuple[str, list[str]]:
    """Return the folder that holds all files, and their names relative to it."""
    if is_url(files[0]):
        root = os.path.commonprefix([f"{file.rpartition('/')[0]}/" for file in files]).rpartition("/")[0]  # noqa: RUF071
        return root, [file[len(root) :].lstrip("/") for file in files]
    if len({file.startswith("/") for file in files}) > 1:
        files = [os.path.abspath(file) for file in files]  # noqa: PTH100 (a Path takes ten times as long)
    files = [os.path.normpath(file) for file in files]
    root = os.path.commonpath([os.path.dirname(file) for file in files])  # noqa: PTH120
    return root or ".", [file[len(root) :].lstrip("/") for file in files]


def _by_class(path: str, names: Sequence[str]) -> dict[str, list[str]]:
    classes: dict[str, list[str]] = {}
    for name in names:
        base, separator, _ = name.partition("/")
        if not separator:
            raise FormatError(
                "the files do not lie in folders of classes",
                file=path,
                expected="a folder per class, and layout='classes'",
                found=f"{name!r} beside them",
                remedy="use layout='flat'",
            )
        classes.setdefault(base, []).append(name)
    return classes


def _list_folder(path: str, layout: str | None, names: tuple[str, str] | None, trust: Trust) -> Listing:
    """Return the listing of a folder, by the given layout or the one that it has."""
    root = path.rstrip("/") or "/"
    top = read_folder(root)
    if not top.holds_images:
        raise DataError(
            "the folder holds no images",
            file=path,
            expected="image files, or folders of them",
            found=_contents(top),
            remedy="check the path",
        )
    table = None if layout is not None else metadata_table(root, top.others)
    if table is not None:
        listing = _list_manifest(table, None, trust)
        listed = {os.path.normpath(file) for file in listing.images}
        report_others(path, [file for file in top.files() if os.fsencode(file) not in listed], f"are not in {table!r}")
        return listing
    while not top.images and len(top.folders) == 1 and not top.folders[0].images and layout in (None, "classes"):
        top = top.folders[0]  # a folder that holds nothing but a folder of folders
    may_be_pairs = layout == "pairs" or (layout is None and not top.images)
    pairs = find_pairs(path, top, names) if may_be_pairs else []
    found = layout or ("pairs" if pairs else _layout_of(path, top))
    if found == "manifest":
        raise FormatError("a manifest is a table", file=path, expected="the path of a table", found="a folder")
    others = [other for folder in top.walk() for other in folder.others]
    if found == "flat":
        listing = Listing(_folder_path(root), root, Texts.of(top.files()))
    elif found == "pairs":
        listing = _list_pairs(path, root, pairs, top)
    else:
        listing = _list_classes(path, root, top)
        others += top.images
    report_others(path, others)
    return listing


def _contents(folder: Folder) -> str:
    files = [other for inner in folder.walk() for other in inner.others]
    return f"{len(list(folder.walk())) - 1} folders, {len(files)} other files" + (f": {files[:3]}" if files else "")


def _layout_of(path: str, top: Folder) -> str:
    """Return the layout of a folder with images in it or below it; raise ``FormatError`` if there are several."""
    below = [folder for folder in top.folders if folder.holds_images]
    if not below:
        return "flat"
    if top.images:
        raise FormatError(
            "the folder holds images, and folders of images as well",
            file=path,
            expected="one layout",
            found=f"the image {top.images[0]!r} beside the folder {below[0].base!r}",
            remedy="layout='classes' takes each folder as a class, layout='flat' all images without labels; or open "
            "one of the folders",
        )
    if len(below) > 1 and all(folder.base.lower() in SPLITS for folder in below):
        names = [folder.base for folder in below]
        example = f"{path.rstrip('/')}/{names[0]}"
        raise FormatError(
            "the folder holds several data sets",
            file=path,
            expected="images, or a folder for each class",
            found=f"the folders {names}",
            remedy=f"open one of them, for example {example!r}; layout='classes' takes them as classes",
        )
    if len(below) == 1:
        return "flat" if is_image_folder(below[0]) else "classes"
    check_no_pairs(path, below)
    return "classes"


def _list_classes(path: str, root: str, top: Folder) -> Listing:
    for folder in top.folders:
        if not folder.holds_images:
            raise DataError(
                "the folder of a class holds no images",
                file=f"{root}/{folder.name}",
                expected="at least one image",
                found=_contents(folder),
                remedy="remove the folder, or rename it with a dot in front",
            )
    if not top.folders:
        raise FormatError(
            "the folder has no classes",
            file=path,
            expected="a folder for each class",
            found=f"{len(top.images)} images without a folder",
            remedy="use layout='flat'",
        )
    return _of_classes(root, {folder.base: folder.files() for folder in top.folders})


def _of_classes(root: str, files: Mapping[str, Sequence[str]]) -> Listing:
    names = sorted(files)  # as Keras and torchvision sort them
    counts = [len(files[name]) for name in names]
    first = np.cumsum([0, *counts[:-1]], dtype=np.int64)
    images = Texts.of(file for name in names for file in files[name])
    return Listing(_folder_path(root), root, images, columns={"label": Classes(tuple(names), first, sum(counts))})


def _list_pairs(path: str, root: str, folders: Sequence[PairFolders], top: Folder) -> Listing:
    if not folders:
        raise FormatError(
            "it is not clear which folders hold the images and the masks",
            file=path,
            expected="one folder named 'images', and one named 'masks' or 'labels'",
            found=repr([folder.base for folder in top.folders]),
            remedy="name them: pairs=('folder of images', 'folder of masks')",
        )
    pairs = match_pairs(root, folders, top)
    counts = np.array([len(masks) for masks in pairs.masks], np.int64)
    masks = Texts.of(mask for masks in pairs.masks for mask in masks)
    used = {folder.name for pair in folders for folder in (pair.images, pair.masks)}
    report_others(path, _beside(top, used), "lie beside the folders of images and masks")
    masks_per_image = counts if (counts > 1).any() else None
    return Listing(_folder_path(root), root, Texts.of(pairs.images), masks, masks_per_image)


def _beside(folder: Folder, used: set[str]) -> list[str]:
    """Return the image files that are in none of the ``used`` folders."""
    if folder.name in used:
        return []
    own = [f"{folder.name}/{image}".lstrip("/") for image in folder.images]
    return own + [file for inner in folder.folders for file in _beside(inner, used)]


def _folder_path(root: str) -> str:
    """Return the path of a data set that is a folder: a separator at its end tells that it is no file."""
    return root.rstrip("/") + "/"
