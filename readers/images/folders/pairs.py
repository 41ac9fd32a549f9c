"""Pairs of images and masks: which folders hold them, and which mask belongs to which image."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matex_data.errors import FormatError, near_matches
from matex_data.paths import natural_sorted
from matex_data.readers.images.folders.contents import Folder

SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing", "dev", "eval"}
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
IMAGE_WORDS = {"image", "images", "img", "imgs", "input", "inputs", "photo", "photos", "scan", "scans", "rgb"}
MASK_WORDS = {
    *("mask", "masks", "label", "labels", "annotation", "annotations", "gt", "gts", "target", "targets"),
    *("truth", "truths", "groundtruth", "groundtruths", "segmentation", "segmentations", "seg"),
}
UNSAID = {"jpeg", "ground", "class"}  # words of JPEGImages, ground_truth, SegmentationClass
ENDS = {*SPLITS, "tr", "ts"}  # words that may follow, as in imagesTr
MASK_END = re.compile(r"[-_.](mask|label|annotation|gt|seg|segmentation|target)s?$", re.IGNORECASE)
IMAGE_END = re.compile(r"_0000$")  # number of the only channel, as nnU-Net has it


@dataclass(frozen=True)
class PairFolders:
    """A folder of images, and the folder of their masks."""

    images: Folder
    masks: Folder


@dataclass(frozen=True)
class ImagePairs:
    """Images and their masks.

    Parameters
    ----------
    images : names of the files, relative to the root of the data set.
    masks : names of the masks of each image.
    """

    images: list[str]
    masks: list[list[str]]


def find_pairs(path: str, top: Folder, names: tuple[str, str] | None = None) -> list[PairFolders]:
    """Return the folders of images and masks: those of ``top``, or those of each folder in it; [] if there are none.

    Parameters
    ----------
    names : of the folder of images and the folder of masks; None: known names, such as "images" and "masks".

    Raises
    ------
    FormatError : several folders may be meant, or those with these names are missing.
    """
    below = [folder for folder in top.folders if folder.holds_images]
    if names is not None:
        return _named(path, top, below, names)
    found = _known(path, below)
    if found or {folder.base.lower() for folder in below} <= SPLITS:
        return found
    inner = [_known(path, [inner for inner in folder.folders if inner.holds_images]) for folder in below]
    complete = [pairs for pairs in inner if pairs]
    if complete and len(complete) < len(below):
        lacking = next(folder for folder, pairs in zip(below, inner, strict=True) if not pairs)
        raise FormatError(
            "a folder has no images and masks, as others have",
            file=path,
            expected=f"folders such as {complete[0][0].images.name!r} and {complete[0][0].masks.name!r}",
            found=f"{[folder.base for folder in lacking.folders]} in {lacking.name!r}",
            remedy="add the folder, or remove its counterpart; layout='classes' takes each folder as a class",
        )
    return [pair for pairs in complete for pair in pairs]


def _known(path: str, folders: Sequence[Folder]) -> list[PairFolders]:
    """Return the one pair of folders with known names; [] if there is none. Raise ``FormatError`` if there are more."""
    roles = [(folder, _role(folder.base)) for folder in folders]
    images = [(folder, key) for folder, (role, key) in roles if role == "image"]
    masks = [(folder, key) for folder, (role, key) in roles if role == "mask"]
    if not images or not masks:
        return []
    pairs = [PairFolders(image, mask) for image, key in images for mask, other in masks if key == other]
    if not pairs and len(images) == len(masks) == 1:
        pairs = [PairFolders(images[0][0], masks[0][0])]
    if len(pairs) != 1:
        first = (pairs or [PairFolders(images[0][0], masks[0][0])])[0]
        raise FormatError(
            "it is not clear which folders hold the images and the masks",
            file=path,
            expected="one folder named 'images', and one named 'masks' or 'labels'",
            found=f"{[f.base for f, _ in images]} and {[f.base for f, _ in masks]} among {[f.base for f in folders]}",
            remedy=f"name them: pairs=({first.images.base!r}, {first.masks.base!r})",
        )
    return pairs


def _role(name: str) -> tuple[str, tuple[str, ...]]:
    """Return what a folder holds, by its name, and the other words of the name.

    >>> _role("CameraRGB"), _role("labelsTr"), _role("cats")
    (('image', ('camera',)), ('mask', ('tr',)), ('', ()))
    """
    words = [word.lower() for word in WORD.findall(name)]
    words = [word for word in words if word not in UNSAID] or words
    end = next((i for i in range(len(words), 0, -1) if words[i - 1] not in ENDS), 0)
    last = words[end - 1] if end else ""
    key = (*words[: end - 1], *words[end:]) if end else ()
    if last in MASK_WORDS:
        return "mask", tuple(word for word in key if word not in IMAGE_WORDS)
    return ("image", key) if last in IMAGE_WORDS else ("", ())


def is_image_folder(folder: Folder) -> bool:
    """Return whether a folder has a name of folders of images."""
    return _role(folder.base)[0] == "image"


def _named(path: str, top: Folder, below: Sequence[Folder], names: tuple[str, str]) -> list[PairFolders]:
    """Return the folders with these names in ``top``, or in each folder in it."""
    found = []
    for folder in [top] if _at(top, names[0]) or _at(top, names[1]) else below:
        images, masks = (_at(folder, name) for name in names)
        if images is None or masks is None:
            missing = names[0] if images is None else names[1]
            others = [inner.base for inner in folder.folders]
            raise FormatError(
                "there is no folder of that name",
                file=path,
                expected=f"one of {near_matches(missing, others)} in {folder.name or path!r}",
                found=repr(missing),
                remedy="give pairs= as the names of the folder of images and of the folder of masks",
            )
        found.append(PairFolders(images, masks))
    return found


def _at(folder: Folder, name: str) -> Folder | None:
    """Return the folder with this name, relative to another one; None if there is none that holds images."""
    path = f"{folder.name}/{name.strip('/')}".lstrip("/")
    return next((inner for inner in folder.walk() if inner.name == path and inner.holds_images), None)


def match_pairs(root: str, folders: Sequence[PairFolders], top: Folder) -> ImagePairs:
    """Return images and masks by their names; all masks beside a single image in a folder of its own are masks of it.

    Raises
    ------
    FormatError : an image or a mask has no counterpart, or several.
    """
    pairs = ImagePairs([], [])
    above = {folder.name for folder in top.folders}
    for folder in folders:
        images, masks = folder.images.files(), folder.masks.files()
        is_nested = folder.images.name not in above
        if is_nested and len(images) == 1 and not _stems(folder.images).keys() & _stems(folder.masks).keys():
            pairs.images.append(images[0])
            pairs.masks.append(masks)
        else:
            _match_by_stem(root, folder, pairs)
    return pairs


def _match_by_stem(root: str, folder: PairFolders, pairs: ImagePairs) -> None:
    images, masks = _by_stem(root, folder.images), _by_stem(root, folder.masks)
    if not images.keys() & masks.keys():
        images, masks = _by_stem(root, folder.images, IMAGE_END), _by_stem(root, folder.masks, MASK_END)
    _check_pairs(root, images, masks, folder.masks)
    _check_pairs(root, masks, images, folder.images)
    for stem in natural_sorted(images):
        pairs.images.append(images[stem])
        pairs.masks.append([masks[stem]])


def _stem(folder: Folder, name: str) -> str:
    """Return the name of a file relative to a folder, without suffix."""
    return os.path.splitext(name[len(folder.name) + 1 :])[0]  # noqa: PTH122 (a Path takes ten times as long)


def _stems(folder: Folder) -> dict[str, str]:
    """Return the files of a folder by their stems, without what marks an image or a mask."""
    return {MASK_END.sub("", IMAGE_END.sub("", _stem(folder, name))): name for name in folder.files()}


def _by_stem(root: str, folder: Folder, end: re.Pattern[str] | None = None) -> dict[str, str]:
    """Return the files of a folder by their stems, without an ``end``."""
    stems: dict[str, str] = {}
    for name in folder.files():
        stem = _stem(folder, name)
        stem = stem if end is None else end.sub("", stem)
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


def check_no_pairs(path: str, folders: Sequence[Folder]) -> None:
    """Raise if folders may be images and their masks as well as classes: each has a file for each file of the others.

    Folders whose names differ in a number alone are classes, and so are those of one file each.
    """
    first, *others = folders
    count = len(first.files())
    numbered = len({re.sub(r"\d+", "", folder.base) for folder in folders}) == 1
    if not others or numbered or count < 2 or any(len(folder.files()) != count for folder in others):
        return
    stems = _stems(first).keys()
    if all(_stems(folder).keys() == stems for folder in others):
        raise FormatError(
            "the folders may be classes, or images and their masks: their files have the same names",
            file=path,
            expected="classes, or pairs",
            found=f"{count} files of the same names in each of {[folder.base for folder in folders[:4]]}",
            remedy=f"layout='classes', or pairs=({first.base!r}, {others[0].base!r}) with the folder of images first",
        )
