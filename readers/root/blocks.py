"""Entries of one branch that are decoded a block at a time, and shared by all fields of the branch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from matex_data._types import Array, Integers
from matex_data.index.decoded import DecodedBlocks
from matex_data.index.scatter import RowIndices
from matex_data.readers.root.entries import Entries, scatter_entries
from matex_data.readers.root.members import Member


@dataclass(frozen=True, eq=False)
class BranchBlocks(DecodedBlocks):
    """Branch whose fields are decoded from the same blocks: the baskets of a ``TTree``, the clusters of an ``RNTuple``.

    Parameters
    ----------
    branch : name of the branch.
    members : the fields, by name.
    clusters : int64[n], the first entry of each cluster of the fields that are read, the unit of shuffling.
    """

    branch: str
    members: Mapping[str, Member]
    clusters: Integers

    @property
    def width(self) -> int:  # type: ignore[override]
        return len(self.members)

    def borders(self) -> Integers:
        return self.clusters

    def copy_rows(self, name: str, block: Entries, rows: RowIndices, out: Array, destination: RowIndices) -> None:
        scatter_entries(block, rows, self.members[name], out, destination)
