"""Shares of ranks in the cores of their machine."""

from __future__ import annotations

import os
from typing import Any

import pytest

from matex_data.mpi.node import CoreShare, core_share
from tests.support.ranks import Pools

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else 1
pytestmark = pytest.mark.skipif(CORES < 2, reason="ranks cannot be bound to two cores")


def _share(comm: Any, bound: dict[int, list[int]]) -> int:
    """Return the share when ranks are bound to these of the first two cores."""
    own = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {sorted(own)[core] for core in bound[comm.rank]})
        return int(core_share(comm))
    finally:
        os.sched_setaffinity(0, own)


@pytest.mark.parametrize(
    ("bound", "share"),
    [
        ({0: [0], 1: [1]}, CoreShare.OWN),
        ({0: [0, 1], 1: [0, 1]}, CoreShare.FULL),
        ({0: [0], 1: [0]}, CoreShare.OVERSUBSCRIBED),
        ({0: [0, 1], 1: [0, 1], 2: [0, 1]}, CoreShare.OVERSUBSCRIBED),
    ],
)
def test_share_of_bound_and_unbound_ranks(ranks: Pools, bound: dict[int, list[int]], share: CoreShare) -> None:
    size = len(bound)
    assert ranks(size).run(_share, bound) == [share] * size
