"""Shares of ranks in the cores of their machine."""

from __future__ import annotations

import os
from typing import Any

import pytest

from matex_data import machine
from matex_data.mpi.node import CoreShare, core_share, gather_cores
from tests.support.ranks import Pools

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else 1
pytestmark = pytest.mark.skipif(CORES < 2, reason="ranks cannot be bound to two cores")


def _bound(comm: Any, bound: dict[int, list[int]], call: Any) -> Any:
    """Return the result of a function of ``comm`` when ranks are bound to these of the first two cores."""
    own = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {sorted(own)[core] for core in bound[comm.rank]})
        return call(comm)
    finally:
        os.sched_setaffinity(0, own)


def _gathered(comm: Any) -> tuple[int, list[int]]:
    """Return the number of ranks and the number of cores of each of the others that may be used here, too."""
    before = machine._local_size[:], machine._cores_of_others[:]
    try:
        gather_cores(comm)
        return machine.local_size(), [len(cores & machine.core_numbers()) for cores in machine._cores_of_others]
    finally:
        machine._local_size[:], machine._cores_of_others[:] = before


@pytest.mark.parametrize(
    ("bound", "share", "in_common"),
    [
        ({0: [0], 1: [1]}, CoreShare.OWN, [0]),
        ({0: [0, 1], 1: [0, 1]}, CoreShare.FULL, [2]),
        ({0: [0], 1: [0]}, CoreShare.OVERSUBSCRIBED, [1]),
        ({0: [0, 1], 1: [0, 1], 2: [0, 1]}, CoreShare.OVERSUBSCRIBED, [2, 2]),
    ],
)
def test_share_of_bound_and_unbound_ranks(
    ranks: Pools, bound: dict[int, list[int]], share: CoreShare, in_common: list[int]
) -> None:
    size = len(bound)
    assert ranks(size).run(_bound, bound, core_share) == [share] * size
    assert ranks(size).run(_bound, bound, _gathered) == [(size, in_common)] * size
