"""Memory that is used again: how many free blocks a pool keeps, and of which kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from matex_data.reading.buffers import HUGE_PAGE, KEPT_SMALL, BufferPool


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize(("nbytes", "kept"), [(4096, KEPT_SMALL), (HUGE_PAGE, 3)])
def test_a_pool_keeps_so_many_free_blocks_of_a_kind(nbytes: int, kept: int) -> None:
    pool = BufferPool(3)
    blocks = [pool.bytes(nbytes) for _ in range(kept + 2)]
    last = {_address(block) for block in blocks[2:]}
    for i in range(len(blocks)):
        blocks[i] = np.empty(0, np.uint8)  # gives the block back, the oldest first
    again = [pool.bytes(nbytes) for _ in range(kept)]
    assert {_address(block) for block in again} == last
    assert _address(pool.bytes(nbytes)) not in last


def test_a_block_serves_arrays_of_a_quarter_of_its_size() -> None:
    pool = BufferPool()
    address = _address(pool.bytes(8 * HUGE_PAGE))
    assert _address(pool.bytes(2 * HUGE_PAGE)) == address
    assert _address(pool.bytes(2 * HUGE_PAGE - 1)) != address
