"""Open ROOT files, and the trees in them, through uproot."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Mapping
from typing import Any

import uproot
from uproot.models.RNTuple import ListFrameReader

from matex_data.errors import DataError, FormatError, near_matches, shortened
from matex_data.index.library import OpenFiles
from matex_data.index.stamps import Stamp
from matex_data.storage.files import exists, open_binary, undecodable
from matex_data.storage.objects import is_url

_read_list = ListFrameReader.read


def _read_bounded(self: Any, chunk: Any, cursor: Any, context: Any) -> Any:
    """Read a list of an ``RNTuple`` after a look at its count, by which uproot loops before it looks at checksums."""
    size, items = cursor.copy().fields(chunk, struct.Struct("<qI"), context)
    if 8 * items > -size - 12 or -size > chunk.stop - cursor.index:  # each item begins with its size, 8 bytes
        raise ValueError(f"a list of {items:,} items in {-size:,} bytes, {chunk.stop - cursor.index:,} before its end")
    return _read_list(self, chunk, cursor, context)


ListFrameReader.read = _read_bounded  # uproot has no option for it

TREES = ("TTree", "TNtuple", "TNtupleD", "ROOT::RNTuple")
MAX_SHOWN = 12  # keys in an error


def open_file(path: str) -> Any:
    """Open a file; reads are plain ones, without threads, and nothing is cached.

    Raises
    ------
    FormatError : it is no ROOT file, or a damaged one.
    """
    try:
        return uproot.open(
            open_binary(path) if is_url(path) else {path: None},
            handler=uproot.source.object.ObjectSource if is_url(path) else uproot.source.file.MultithreadedFileSource,
            use_threads=False,
            object_cache=None,
            array_cache=None,
        )
    except Exception as error:  # uproot raises errors of many kinds for a damaged file
        raise file_error(path, error) from error


def file_error(path: str, error: Exception) -> DataError:
    """Return the error for a file that uproot cannot read."""
    if not exists(path):
        error = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    is_old = "unsupported compression" in str(error)
    return undecodable(
        FormatError,
        "the file cannot be read as ROOT",
        path,
        error,
        expected="a ROOT file",
        remedy="let ROOT write it anew: hadd -f404 new.root old.root"
        if is_old
        else "if it is a ROOT file, it is damaged: copy it again from its source",
    )


def choose_tree(file: Any, path: str, tree: str | None) -> str:
    """Return the key of a tree, with its cycle.

    Parameters
    ----------
    tree : name, with the folders in the file, and maybe with a cycle (``"events;2"``); otherwise the highest cycle
        is chosen. None: the only one.

    Raises
    ------
    FormatError : there is no tree, none of that name, or more than one and no name.
    """
    classes: Mapping[str, str] = file.classnames(recursive=True, cycle=True)
    cycles: dict[str, list[int]] = {}
    for key, kind in classes.items():
        if kind in TREES:
            name, _, cycle = key.rpartition(";")
            cycles.setdefault(name, []).append(int(cycle))
    if tree is None:
        if len(cycles) != 1:
            raise _number_error(path, classes, list(cycles))
        tree = next(iter(cycles))
    name = tree.strip("/")
    if classes.get(name) in TREES:
        return name
    if name not in cycles:
        raise FormatError(
            "the file has no such tree",
            file=path,
            expected=f"one of {near_matches(name, cycles)}",
            found=f"tree={tree!r}",
            remedy="correct the name; without tree= the only one is read",
        )
    return f"{name};{max(cycles[name])}"


def _number_error(path: str, classes: Mapping[str, str], trees: list[str]) -> FormatError:
    if trees:
        likely = next((name for name in trees if name.lower().endswith("events")), trees[0])
        return FormatError(
            "the file has several trees",
            file=path,
            expected="one tree",
            found=", ".join(map(repr, trees)),
            remedy=f"name one of them, for example tree={likely!r}",
        )
    shown = shortened((f"{key!r} ({kind})" for key, kind in classes.items()), MAX_SHOWN)
    return FormatError(
        "the file has no tree",
        file=path,
        expected="a TTree or an RNTuple",
        found=", ".join(shown) or "no keys at all",
        remedy="open a file that holds events; histograms and other objects have no samples",
    )


def tree_in(file: Any, key: str) -> Any:
    """Return the tree of a key of an open file."""
    tree = file[key]
    if hasattr(tree, "field_records"):
        _note_fields(tree)
    return tree


def _note_fields(ntuple: Any) -> None:
    """Give each field of an ``RNTuple`` the list of those in it.

    For each field uproot would search the records of all fields: half a minute in one with 3,400.
    """
    inner: dict[int, list[Any]] = {}
    for number, field in enumerate(ntuple.all_fields):
        parent = ntuple.field_records[number].parent_field_id
        if parent != number:
            inner.setdefault(parent, []).append(field)

    def named(number: int) -> list[Any]:
        """Return the fields in one; of those without a name, the fields in them."""
        return [x for f in inner.get(number, ()) for x in (named(f.field_id) if f.is_anonymous else [f])]

    for number, field in enumerate(ntuple.all_fields):
        field._fields = named(number)


OPEN = OpenFiles[Any](16)


def open_tree(path: str, key: str) -> Any:
    """Return a tree whose file stays open while it is among those used last. Never to be called by two threads."""
    return OPEN.get((path, key, Stamp.of(path)), lambda: tree_in(open_file(path), key))
