"""Find datasets in an HDF5 file by name, and say what is there if a name is not."""

from __future__ import annotations

from time import monotonic

import h5py

from matex_data.errors import FieldNotFound, FormatError, near_matches

MOST_OBJECTS = 20_000  # a file of more objects, or one that takes longer to walk, is not listed to the end
SECONDS = 5.0
FAILURES = (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError, NotImplementedError, MemoryError)


def find(file: h5py.File, path: str, name: str) -> h5py.Dataset:
    """The dataset of that name; a leading slash makes no difference.

    Raises
    ------
    FieldNotFound : there is no such object.
    FormatError : there is one, but it is no dataset, or cannot be opened.
    """
    try:
        found = file[name]
    except FAILURES as error:
        raise _not_opened(file, path, name, error) from error
    if isinstance(found, h5py.Dataset):
        return found
    kind = "a group" if isinstance(found, h5py.Group) else "a named datatype"
    below = [other for other in _walk(file)[0] if other.startswith(name.strip("/") + "/")]
    remedy = f"name one of its datasets: {near_matches(name, below)}" if below else "name a dataset"
    raise FormatError(
        "the field is not a dataset", file=path, field=name, expected="a dataset", found=kind, remedy=remedy
    )


def _not_opened(file: h5py.File, path: str, name: str, error: Exception) -> FormatError | FieldNotFound:
    try:
        link = file.get(name, getlink=True) if name.strip("/") else None
    except FAILURES:
        link = None
    if isinstance(link, h5py.SoftLink | h5py.ExternalLink):
        to = f"{link.filename}:{link.path}" if isinstance(link, h5py.ExternalLink) else link.path
        return FormatError("the field is a link that leads nowhere", file=path, field=name, expected=to, found=error)
    if link is not None:
        return FormatError("the dataset cannot be opened", file=path, field=name, found=error)
    near = near_matches(name.strip("/"), [*_walk(file)[0], *_links(file)])
    return FieldNotFound("the file has no such dataset", file=path, field=name, expected=f"one of {near}")


def dataset_names(file: h5py.File, path: str) -> list[str]:
    """Every dataset of the file once, by its first hard link.

    Raises
    ------
    FormatError : the file cannot be walked through to its end.
    """
    names, trouble = _walk(file)
    if trouble is not None:
        raise FormatError(
            "the objects of the file cannot be listed",
            file=path,
            expected=f"groups that open, no more than {MOST_OBJECTS} objects",
            found=trouble,
            remedy="name the fields with inputs= and targets=",
        )
    return names


def _walk(file: h5py.File) -> tuple[list[str], object]:
    """Names of datasets, and what kept us from finding all of them."""
    names: list[str] = []
    seen = 0
    latest = monotonic() + SECONDS

    def visit(name: bytes, info: h5py.h5o.ObjInfo) -> int | None:
        nonlocal seen
        seen += 1
        if info.type == h5py.h5o.TYPE_DATASET and name != b".":
            names.append(name.decode("utf-8", "surrogateescape"))
        return 1 if seen > MOST_OBJECTS or monotonic() > latest else None

    try:
        stopped = h5py.h5o.visit(file.id, visit, info=True)
    except FAILURES as error:
        return names, error
    return names, None if stopped is None else f"more than {seen - 1} objects"


def _links(file: h5py.File) -> list[str]:
    """Names of soft and external links, wherever they lead."""
    names: list[str] = []
    latest = monotonic() + SECONDS

    def visit(name: bytes, info: h5py.h5l.LinkInfo) -> int | None:
        if info.type != h5py.h5l.TYPE_HARD:
            names.append(name.decode("utf-8", "surrogateescape"))
        return 1 if len(names) > MOST_OBJECTS or monotonic() > latest else None

    try:
        file.id.links.visit(visit, info=True)
    except FAILURES:
        return names  # only a hint: what was seen is good enough
    return names
