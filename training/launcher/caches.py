"""Cache files of ``tf.data``: ranks do not write to the same one."""

from __future__ import annotations

import atexit
import functools
import glob
import os
from pathlib import Path
from typing import Any

import tensorflow as tf

from matex_data.training.exact.rows import is_sharded
from matex_data.training.launcher.registry import SaveRegistry


def patch_caches(registry: SaveRegistry) -> None:
    """Patch ``tf.data.Dataset.cache``: ranks do not write to the same cache file."""
    original = tf.data.Dataset.cache

    @functools.wraps(original)
    def cache(dataset: Any, filename: Any = "", name: Any = None) -> Any:
        if isinstance(filename, str | os.PathLike) and os.fspath(filename):
            filename = _cache_file(registry, dataset, os.fspath(filename))
        return original(dataset, filename, name)

    tf.data.Dataset.cache = cache


def _cache_file(registry: SaveRegistry, dataset: Any, filename: str) -> str:
    """Return the cache file of this rank.

    Rank 0 writes the file of the script, which all ranks read once it is complete, also in later jobs. Until then the
    other ranks write files that are removed at the end of the job. Of a sharded dataset each rank keeps a file.
    """
    if is_sharded(dataset):
        return f"{filename}.rank{registry.rank}of{registry.size}"
    if registry.rank == 0 or Path(f"{filename}.index").exists():
        return filename
    own = f"{filename}.{registry.job_id}-rank{registry.rank}"
    atexit.register(_remove, own)
    return own


def _remove(prefix: str) -> None:
    for path in Path(prefix).parent.glob(f"{glob.escape(Path(prefix).name)}*"):
        path.unlink(missing_ok=True)
