"""Entries that uproot reads: an ``RNTuple``, and branches whose bytes are not in baskets of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import awkward as ak

from matex_data._types import Bytes, Integers
from matex_data.declared import declared
from matex_data.errors import DecodeError
from matex_data.index.decoded import SelectedBlocks
from matex_data.index.model import EMPTY, ReadRequest
from matex_data.index.table import Outputs
from matex_data.locks import Lock
from matex_data.readers.root.entries import BranchBlocks
from matex_data.readers.root.files import open_tree
from matex_data.readers.root.probe import first_line

_LOCK = Lock()  # the trees of uproot that this process keeps open


@declared
@dataclass(frozen=True, eq=False)
class Clusters(BranchBlocks):
    """Branch whose blocks uproot reads and decodes, one at a time in a process; each rank reads its own.

    Parameters
    ----------
    tree : key of the tree in the file.
    row_bytes : bytes of an entry in memory, about.
    """

    tree: str
    row_bytes: int

    def inner_bytes(self, name: str) -> int:
        return self.rows * self.row_bytes // len(self.members) if self.members[name].field.ragged else 0

    def decoded_bytes(self, block: int, outs: Outputs) -> int:
        return int(self.edges[block + 1] - self.edges[block]) * self.row_bytes

    def block_requests(self, selection: SelectedBlocks, positions: Integers) -> Iterator[ReadRequest]:
        for i in positions.tolist():
            yield ReadRequest(EMPTY, EMPTY, on_complete=partial(self._decode, selection, i))

    def _decode(self, selection: SelectedBlocks, i: int, _: Bytes) -> None:
        self.decode_block(selection, i, lambda block, _: self._read(block))

    def _read(self, block: int) -> ak.Array:
        start, stop = self.edges[block : block + 2].tolist()
        try:
            with _LOCK:
                branch = open_tree(self.path, self.tree)[self.branch]
                entries = branch.array(entry_start=start, entry_stop=stop, library="ak")
            if len(entries) != stop - start:
                raise ValueError(f"{len(entries)} entries, instead of {stop - start}")
        except Exception as error:  # uproot and the codecs raise errors of many kinds
            raise DecodeError(
                "uproot cannot read the entries",
                file=self.path,
                field=self.branch,
                row=start,
                found=first_line(error),
                remedy="the file may be damaged there: restore it from its source",
            ) from error
        return entries
