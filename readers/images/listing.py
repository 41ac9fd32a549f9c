"""Listings: which image files make a data set, by which layout, and what is known of each."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import DataError, FormatError
from matex_data.paths import natural_sorted
from matex_data.readers.formats import TABLE_SUFFIXES, TEXT_SUFFIXES
from matex_data.readers.images.folders import Folder, is_image, read_folder, report_others
from matex_data.readers.images.manifest import read_manifest
from matex_data.readers.images.texts import Texts

LAYOUTS = ("classes", "flat", "pairs", "manifest")
SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing", "dev", "eval"}
IMAGE_FOLDER = re.compile(r"(.*[-_ ])?(images?|imgs?|inputs?|jpegimages|photos?|scans?)$", re.IGNORECASE)
MASK_FOLDER = re.compile(
    r"(.*[-_ ])?(masks?|labels?|annotations?|gts?|ground[-_ ]?truths?|targets?|segmentations?|segmentationclass)$",
    re.IGNORECASE,
)
MASK_END = re.compile(r"[-_.](mask|label|annotation|gt|seg|segmentation|target)s?$", re.IGNORECASE)


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
    masks : of pairs, the mask of each image.
    columns : values for each file, by the name of the field.
    """

    path: str
    root: str
    images: Texts
    masks: Texts | None = None
    columns: Mapping[str, Array | Texts | Classes] = field(default_factory=dict)


def list_images(paths: Sequence[str], layout: str | None, root: str | None) -> list[Listing]:
    """Return the listings of folders, manifests and image files; neighbouring files make one listing.

    Parameters
    ----------
    layout : one of ``LAYOUTS``, or None: found from the folders.
    root : folder that the paths of a manifest are relative to; None: its own.

    Raises
    ------
    DataError : there is no image, or a file of a manifest does not exist.
    FormatError : the layout is ambiguous, or the folder has another one.
    """
    if layout is not None and layout not in LAYOUTS:
        raise FormatError("there is no such layout", expected=f"one of {LAYOUTS}, or None", found=repr(layout))
    listings: list[Listing] = []
    files: list[str] = []
    for path in paths:
        kind = _kind(path, layout)
        if kind == "file":
            files.append(path)
            continue
        listings += _list_files(files, layout)
        files = []
        listings.append(_list_manifest(path, root) if kind == "manifest" else _list_folder(path, layout))
    listings += _list_files(files, layout)
    if root is not None and any(listing.root != root for listing in listings):
        raise FormatError("root= is for manifests", file=paths[0], expected="a table of image files", found=paths[0])
    return listings


def _kind(path: str, layout: str | None) -> str:
    if is_image(path) and layout != "manifest":
        return "file"
    if Path(path).is_dir():
        return "folder"
    is_table = path.lower().endswith((*TABLE_SUFFIXES, *TEXT_SUFFIXES))
    return "manifest" if layout == "manifest" or is_table else "file"


def _list_manifest(path: str, root: str | None) -> Listing:
    manifest = read_manifest(path, root)
    return Listing(path, manifest.root, Texts.of(manifest.files), columns=dict(manifest.columns))


def _list_files(files: Sequence[str], layout: str | None) -> list[Listing]:
    """Return the listing of single image files, with the folder that all of them share as its root."""
    if not files:
        return []
    if len(files) == 1 and layout in (None, "flat"):
        file = Path(files[0])
        return [Listing(files[0], str(file.parent), Texts.of([file.name]))]
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


def _list_folder(path: str, layout: str | None) -> Listing:
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
    while not top.images and len(top.folders) == 1 and not top.folders[0].images and layout in (None, "classes"):
        top = top.folders[0]  # a folder that holds nothing but a folder of folders
    found = layout or _layout_of(path, top)
    if found == "manifest":
        raise FormatError("a manifest is a table", file=path, expected="the path of a table", found="a folder")
    others = [other for folder in top.walk() for other in folder.others]
    if found == "flat":
        listing = Listing(_folder_path(root), root, Texts.of(top.files()))
    elif found == "pairs":
        listing = _list_pairs(path, root, top)
        report_others(path, _unpaired(top), "lie beside the folders of images and masks")
    else:
        listing = _list_classes(path, root, top)
        others += top.images
    report_others(path, others)
    return listing


def _contents(folder: Folder) -> str:
    files = [other for inner in folder.walk() for other in inner.others]
    return f"{len(list(folder.walk())) - 1} folders, {len(files)} other files" + (f": {files[:3]}" if files else "")


def _layout_of(path: str, top: Folder) -> str:
    """Return the layout of a folder with images in it or below it.

    Raises
    ------
    FormatError : there are several.
    """
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
    images, masks = _pair_folders(top)
    if images and masks:
        return "pairs"
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
    return "flat" if len(below) == 1 and images else "classes"


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


def _pair_folders(top: Folder) -> tuple[list[Folder], list[Folder]]:
    """Return the folders with the names of images, and those with the names of masks."""
    below = [folder for folder in top.folders if folder.holds_images]
    masks = [folder for folder in below if MASK_FOLDER.match(folder.base)]
    return [f for f in below if IMAGE_FOLDER.match(f.base) and f not in masks], masks


def _unpaired(top: Folder) -> list[str]:
    images, masks = _pair_folders(top)
    return [file for folder in top.folders if folder not in (*images, *masks) for file in folder.files()] + top.images


def _list_pairs(path: str, root: str, top: Folder) -> Listing:
    """Return the listing of the images and masks of equal stems."""
    images, masks = _pair_folders(top)
    if len(images) != 1 or len(masks) != 1:
        raise FormatError(
            "it is not clear which folders hold the images and the masks",
            file=path,
            expected="one folder named 'images', and one named 'masks' or 'labels'",
            found=f"{[f.base for f in images]} and {[f.base for f in masks]} among {[f.base for f in top.folders]}",
            remedy="rename the folders",
        )
    of_images, of_masks = _by_stem(root, images[0]), _by_stem(root, masks[0])
    if not of_images.keys() & of_masks.keys():
        of_masks = {MASK_END.sub("", stem): name for stem, name in of_masks.items()}
    _check_pairs(root, of_images, of_masks, masks[0])
    _check_pairs(root, of_masks, of_images, images[0])
    stems = natural_sorted(of_images)
    found, paired = (Texts.of(of_stem[stem] for stem in stems) for of_stem in (of_images, of_masks))
    return Listing(_folder_path(root), root, found, paired)


def _by_stem(root: str, folder: Folder) -> dict[str, str]:
    """Return the files of a folder by their names relative to it, without suffix."""
    stems: dict[str, str] = {}
    for name in folder.files():
        stem = os.path.splitext(name[len(folder.name) + 1 :])[0]  # noqa: PTH122 (a Path takes ten times as long)
        if stem in stems:
            raise FormatError(
                "two files of a folder of pairs have the same stem",
                file=f"{root}/{name}",
                expected=f"one file named {stem!r}, whatever its suffix",
                found=f"{stems[stem]!r} as well",
                remedy="remove one of them",
            )
        stems[stem] = name
    return stems


def _check_pairs(root: str, files: Mapping[str, str], others: Mapping[str, str], folder: Folder) -> None:
    lacking = [stem for stem in files if stem not in others]
    if lacking:
        raise FormatError(
            "an image or a mask has no counterpart",
            file=f"{root}/{files[lacking[0]]}",
            expected=f"a file {lacking[0]!r} with any suffix in the folder {folder.name!r}",
            found=f"none; {len(lacking)} of {len(files)} files lack one",
            remedy="add the file, or remove its counterpart",
        )


def _folder_path(root: str) -> str:
    """Return the path of a data set that is a folder: a separator at its end tells that it is no file."""
    return root.rstrip("/") + "/"
