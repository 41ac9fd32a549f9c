"""Pairs of ranks that check a step: two shards of a batch against their union, whatever the number of ranks."""

from __future__ import annotations

import contextlib
from typing import Any

from matex_data.training.comm.channel import Channel, Subset
from matex_data.training.exact.rows import rank_slice


class Pairs:
    """Pairs of neighbouring ranks: in the first round of a check 0 and 1, 2 and 3, ..., in the next 1 and 2, 3 and 4.

    A step that treats the shards of all neighbours as their union treats all shards so.

    Parameters
    ----------
    channel : channel of all ranks.

    Attributes
    ----------
    rounds : rounds of a check, whatever the number of ranks beyond two.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.rounds = 1 if channel.size == 2 else 2
        self._subsets: dict[int, Subset] = {}

    def partner(self, number: int) -> int | None:
        """Return the partner of this rank in a round; None if it has none.

        Parameters
        ----------
        number : number of the round, from 0.
        """
        rank, size = self._channel.rank, self._channel.size
        lower = (rank + number) % 2 == 0 or size == 2
        other = 1 - rank if size == 2 else rank + 1 if lower else rank - 1
        return other if 0 <= other < size else None

    def rows(self, total: int, number: int) -> tuple[int, int]:
        """Return the first row of this rank's pair in a batch of ``total`` rows, and the one after its last."""
        partner = self.partner(number)
        assert partner is not None
        ends = [rank_slice(total, rank, self._channel.size) for rank in sorted((self._channel.rank, partner))]
        return ends[0].start, ends[1].stop

    def connect(self, number: int) -> None:
        """Connect this rank with its partner. *Collective* among them."""
        partner = self.partner(number)
        if partner is not None and partner not in self._subsets and self._channel.size > 2:
            # Even ranks are the first in all pairs, so that one traced step serves all.
            ranks = sorted((self._channel.rank, partner), key=lambda rank: rank % 2)
            self._subsets[partner] = self._channel.subset(ranks)

    def joined(self, number: int) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager: the channel consists of this rank and its partner, which are connected."""
        partner = self.partner(number)
        assert partner is not None
        return contextlib.nullcontext() if self._channel.size == 2 else self._channel.among(self._subsets[partner])
