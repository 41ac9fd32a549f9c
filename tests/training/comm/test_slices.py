"""Sums within a machine run in slices that stay in the caches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from matex_data.mpi.node import on_one_machine
from matex_data.training.comm.channel import open_channel
from matex_data.training.comm.collectives import CALL_BYTES, SLICE_BYTES, Collectives
from tests.support.ranks import Pool

ELEMENTS = SLICE_BYTES // 4 * 2 + 3


def _sum(comm: Any) -> Any:
    channel, reduced = open_channel(comm), list[int]()
    run = Collectives._run

    def counted(self: Any, blocking: Any, started: Any, *arguments: Any) -> None:
        reduced.append(arguments[1].nbytes)
        run(self, blocking, started, *arguments)

    numbers = np.arange(ELEMENTS, dtype=np.float32) % 97
    found = numbers * (comm.rank + 1)
    with mock.patch.object(Collectives, "_run", counted):
        channel.graph.reduce(found)
    others = channel.host, channel.graph.duplicate(), channel.subset(range(comm.size)).graph
    right = (found == numbers * sum(range(comm.size + 1))).all()
    return reduced, bool(right), {other.slice_bytes for other in others}


@pytest.mark.rank_counts(2, 3)
def test_a_large_sum_within_a_machine_runs_in_slices(pool: Pool) -> None:
    for reduced, right, nbytes in pool.run(_sum):
        assert reduced == [SLICE_BYTES, SLICE_BYTES, 12]
        assert right
        assert nbytes == {SLICE_BYTES}


def test_between_machines_nothing_is_cut() -> None:
    def ranks(of_node: int) -> Any:
        return SimpleNamespace(size=4, Split_type=lambda _: SimpleNamespace(size=of_node, Free=lambda: None))

    assert on_one_machine(ranks(4))
    assert not on_one_machine(ranks(2))
    assert CALL_BYTES > SLICE_BYTES
