"""Index of stacks: files of many pages, each of which all ranks read together instead of one rank."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from matex_data.errors import FormatError
from matex_data.fields import Field
from matex_data.index.model import FileIndex, Index, Layout
from matex_data.index.stamps import Stamp
from matex_data.readers.collective import IndexingRanks, agreed
from matex_data.readers.images.decoding import ImageOptions
from matex_data.readers.images.folders.files import FileValues, Pages
from matex_data.readers.images.folders.listing import Listing
from matex_data.readers.images.stacks.hyperstacks import Hyperstack
from matex_data.readers.images.texts import Texts
from matex_data.storage.files import reading

MOST_FILES = 4096  # each has an index of its own
SUFFIXES = (".tif", ".tiff")
IMAGE, PATH = "image", "path"

_Stack = tuple[Field, Layout, Stamp]


def index_stacks(
    listing: Listing,
    names: Sequence[str] | None,
    options: ImageOptions,
    ranks: IndexingRanks,
    hyperstack: Hyperstack | None = None,
) -> Index | None:
    """Return the index of a listing whose files are stacks of equal pages; None if it is another one. *Collective*.

    Parameters
    ----------
    hyperstack : axes of the planes of a file; None: each plane is a sample.

    Raises
    ------
    DataError : a file is truncated, or cannot be read.
    FormatError : the files are no hyperstacks, or differ in their axes.
    """
    selected = [IMAGE, PATH] if names is None else list(names)
    if not _may_be_stacks(listing) or not {IMAGE, PATH}.issuperset(selected):
        _check_optional(listing, hyperstack, f"fields {selected}")
        return None
    first = _of_ranks(listing, options, ranks, [0], hyperstack)[0]
    if first is None or (hyperstack is None and len(listing.images) > 1 and first[1].rows < 2):
        _check_optional(listing, hyperstack, "another file, or pages that are stored differently")
        return None
    found = _of_ranks(listing, options, ranks, range(len(listing.images)), hyperstack)
    if not all(stack is not None and stack[0] == first[0] for stack in found.values()):
        _check_optional(listing, hyperstack, "files that differ in their planes or axes")
        return None
    stacks = [(number, found[number]) for number in range(len(found))]
    files = [_file_index(listing, number, stack, selected) for number, stack in stacks if stack is not None]
    fields = {IMAGE: first[0], PATH: Field(PATH, (), np.dtype(object))}
    return Index({name: fields[name] for name in selected}, files)


def _check_optional(listing: Listing, hyperstack: Hyperstack | None, found: str) -> None:
    """Raise ``FormatError`` if the files have to be hyperstacks."""
    if hyperstack is not None:
        raise FormatError(
            "axes= and samples= are for hyperstacks",
            file=listing.path,
            expected="TIFF files whose planes are stored alike and without loss, and the fields 'image' and 'path'",
            found=found,
            remedy="leave out axes= and samples=: each plane then is a sample",
        )


def _may_be_stacks(listing: Listing) -> bool:
    count = len(listing.images)
    if listing.masks is not None or listing.columns or count > MOST_FILES:
        return False
    return count == 1 or all(listing.images.text(i).lower().endswith(SUFFIXES) for i in range(count))


def _of_ranks(
    listing: Listing,
    options: ImageOptions,
    ranks: IndexingRanks,
    numbers: Sequence[int],
    hyperstack: Hyperstack | None,
) -> dict[int, _Stack | None]:
    """Return fields and layouts by the number of the file; rank ``number % size`` looks at each. *Collective*."""
    mine = [number for number in numbers if number % ranks.size == ranks.rank]
    own = agreed(ranks, lambda: {number: _stack(listing, number, options, hyperstack) for number in mine})
    return {number: stack for stacks in ranks.allgather(own) for number, stack in stacks.items()}


def _stack(listing: Listing, number: int, options: ImageOptions, hyperstack: Hyperstack | None) -> _Stack | None:
    try:
        from matex_data.readers.images.stacks.alike import stack_layout
    except ModuleNotFoundError:  # without tifffile, pages are decoded one by one
        return None
    path = _path(listing, number)
    with reading(path):
        stamp = Stamp.of(path)  # before the file is read: a change meanwhile has to show
        found = stack_layout(path, options)
        if found is not None and hyperstack is not None:
            found = hyperstack.applied(path, *found)
    return None if found is None else (*found, stamp)


def _path(listing: Listing, number: int) -> str:
    return os.fsdecode(listing.images.path(listing.root, number))


def _file_index(listing: Listing, number: int, stack: _Stack, selected: Sequence[str]) -> FileIndex:
    _, layout, stamp = stack
    name = FileValues(Texts.of([listing.images.text(number)]), Pages.of(1, np.array([layout.rows])))
    layouts: dict[str, Layout] = {IMAGE: layout, PATH: name}
    return FileIndex(_path(listing, number), layout.rows, {field: layouts[field] for field in selected}, stamp)
