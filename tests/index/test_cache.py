"""The cache of decoded chunks."""

from __future__ import annotations

import pytest

from matex_data.index.cache import ChunkCache


def test_fail_pending_chunks() -> None:
    cache = ChunkCache(1)
    first, second = (cache.reserve(key, 10) for key in ("kept", "newer"))  # the second one evicts the first
    cache.fail_pending(OSError("gone"))
    for chunk in (first, second):
        with pytest.raises(OSError, match="gone"):
            chunk.result(timeout=1)
