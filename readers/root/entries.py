"""Copy decoded entries to their destinations in an output array."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import awkward as ak
import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.errors import DecodeError
from matex_data.index.decoded import DecodedBlocks, SingleBlocks
from matex_data.index.ragged import RaggedArray, scatter_lists
from matex_data.index.scatter import RowIndices, scatter
from matex_data.index.table import Outputs
from matex_data.locks import Lock
from matex_data.readers.root.files import open_tree
from matex_data.readers.root.members import BranchField
from matex_data.readers.root.probe import first_line
from matex_data.storage.files import undecodable

Entries: TypeAlias = Any
"""Decoded entries of a branch, in either byte order: an array, a `RaggedArray` (strings: of bytes), or an ``ak.Array``,
since awkward has no types for mypy."""


def scatter_entries(
    entries: Entries, rows: RowIndices, member: BranchField, out: Array, destination: RowIndices
) -> None:
    """Assign ``out[destination] = entries[rows]`` for one member of the branch. The rows are copied.

    Parameters
    ----------
    entries : of a branch; a structured array, or lists of one, if the branch has members.
    rows : entries to copy, counted from the first of ``entries``.
    member : field of the branch.
    out, destination : output array, and the index in it for each of ``rows``.
    """
    if isinstance(entries, ak.Array):
        for name in member.path:
            entries = entries[name]
        selected = ak.to_packed(entries[rows])
        entries, rows = _from_awkward(selected, member), slice(0, len(selected))
    elif not isinstance(entries, RaggedArray):
        scatter(out, destination, _member_of(entries[rows], member))
        return
    if isinstance(entries, RaggedArray):
        lists = entries[rows]
        if member.kind == "text":
            out[destination] = np.fromiter(_texts(lists), object, len(lists))
        else:
            scatter_lists(out, destination, lists.offsets, _member_of(lists.values, member))
    else:
        scatter(out, destination, entries)


def _member_of(values: Array, member: BranchField) -> Array:
    """Return a member of structured values, or their native and nested counterpart if it has members itself."""
    dtype = member.field.dtype
    if values.dtype.names is None or values.dtype == dtype:  # awkward's are nested already
        return values
    if member.path:
        return values["/".join(member.path)]
    out = np.empty(values.shape, dtype)
    _fill(out, lambda path: values["/".join(path)])
    return out


def _fill(out: Array, taken: Callable[[tuple[str, ...]], Array], path: tuple[str, ...] = ()) -> None:
    """Fill records, of whose members ``taken`` returns those that are no records by the names that lead to them."""
    for name in out.dtype.names or ():
        if out[name].dtype.names is None:
            out[name] = taken((*path, name))
        else:
            _fill(out[name], taken, (*path, name))


def _texts(lists: RaggedArray) -> Sequence[bytes]:
    data, cuts = lists.values.tobytes(), lists.offsets.tolist()
    return [data[a:b] for a, b in pairwise(cuts)]


def _from_awkward(array: ak.Array, member: BranchField) -> Array | RaggedArray:
    if member.kind == "flat":
        return _plain(array, member)
    if member.kind == "nested":
        return _object_array(_items(ak.to_layout(array)))
    layout = ak.to_layout(array).to_ListOffsetArray64(True)
    content = layout.content[: layout.offsets[-1]]
    if member.kind == "text":
        return RaggedArray(np.asarray(content.data), layout.offsets.data)
    return RaggedArray(_plain(ak.Array(content), member), layout.offsets.data)


def _plain(array: ak.Array, member: BranchField) -> Array:
    """Return numbers, or records of numbers, as an array of the field's dtype."""
    dtype = member.field.dtype
    if dtype.names is None:
        return np.asarray(ak.to_numpy(array, allow_missing=False))
    out = np.empty((len(array), *member.field.shape), dtype)
    _fill(out, lambda path: ak.to_numpy(array[path], allow_missing=False))
    return out


def _items(layout: ak.contents.Content) -> list[Any]:
    """Return the elements of nested lists: byte strings, arrays of numbers, or object arrays of these."""
    lists = layout.to_ListOffsetArray64(True)
    cuts = lists.offsets.data.tolist()
    if layout.parameter("__array__") in ("string", "bytestring"):
        data = np.asarray(lists.content.data)[: cuts[-1]].tobytes()
        return [data[a:b] for a, b in pairwise(cuts)]
    content = lists.content[: cuts[-1]]
    if content.is_numpy:
        values = np.array(ak.to_numpy(content, allow_missing=False))
        return [values[a:b] for a, b in pairwise(cuts)]
    inner = _items(content)
    return [_object_array(inner[a:b]) for a, b in pairwise(cuts)]


def _object_array(items: Sequence[Any]) -> Array:
    return np.fromiter(items, object, len(items))


@dataclass(frozen=True, eq=False)
class BranchBlocks(DecodedBlocks):
    """Branch whose fields are decoded from the same blocks: the baskets of a ``TTree``, the clusters of an ``RNTuple``.

    Parameters
    ----------
    members : the fields, by name.
    clusters : int64[n], the first entry of each cluster of the fields that are read, the unit of shuffling.
    """

    branch: str
    members: Mapping[str, BranchField]
    clusters: Integers

    @property
    def width(self) -> int:  # type: ignore[override]
        return len(self.members)

    def borders(self) -> Integers:
        return self.clusters

    def key(self, block: int, outs: Outputs) -> Hashable:
        return self, block  # of which all members are decoded

    def copy_rows(self, name: str, block: Entries, rows: RowIndices, out: Array, destination: RowIndices) -> None:
        scatter_entries(block, rows, self.members[name], out, destination)


_LOCK = Lock()  # the trees of uproot that this process keeps open


@declared
@dataclass(frozen=True, eq=False)
class Clusters(BranchBlocks, SingleBlocks):
    """Branch whose blocks uproot reads and decodes, one at a time in a process; each rank reads its own.

    Parameters
    ----------
    tree : key of the tree in the file.
    row_bytes : bytes of an entry in memory, about.
    counted : entries are lists of numbers, whose lengths another branch has alone.
    """

    tree: str
    row_bytes: int
    counted: bool = False

    def inner_bytes(self, name: str) -> int:
        return self.rows * self.row_bytes // len(self.members) if self.members[name].field.ragged else 0

    def decoded_bytes(self, block: int, outs: Outputs) -> int:
        return int(self.edges[block + 1] - self.edges[block]) * self.row_bytes

    def decode(self, block: int, names: Sequence[str], stored: Bytes) -> ak.Array:
        start, stop = self.edges[block : block + 2].tolist()
        try:
            with _LOCK:
                branch = open_tree(self.path, self.tree)[self.branch]
                if self.counted:
                    entries = _counted_lists(branch, start, stop)
                else:
                    entries = branch.array(entry_start=start, entry_stop=stop, library="ak")
            if len(entries) != stop - start:
                raise ValueError(f"{len(entries)} entries, instead of {stop - start}")
            if invalid := ak.validity_error(entries):  # lists beyond their content
                raise ValueError(invalid)
        except Exception as error:  # uproot and the codecs raise errors of many kinds
            raise undecodable(
                DecodeError,
                "uproot cannot read the entries",
                self.path,
                error,
                field=self.branch,
                row=start,
                found=first_line(error),
                remedy="the file may be damaged there: restore it from its source",
            ) from error
        return entries


def _counted_lists(branch: Any, start: int, stop: int) -> ak.Array:
    """Return the entries of a basket without offsets; uproot would count by those of the other branch's basket."""
    counts = branch.count_branch.array(entry_start=start, entry_stop=stop, library="np")
    basket = branch.basket(int(np.searchsorted(branch.entry_offsets, start, side="right")) - 1)
    values = np.frombuffer(basket.data, branch.interpretation.content.from_dtype)
    native = values.astype(values.dtype.newbyteorder("="))
    return ak.unflatten(ak.from_numpy(native, regulararray=True), counts)
