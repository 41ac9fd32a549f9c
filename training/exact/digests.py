"""Comparison of data between the ranks: data of which each rank keeps its rows has to be the same on all of them."""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from matex_data._types import Array
from matex_data.errors import PartitionError
from matex_data.training.comm.channel import Channel
from matex_data.training.exact.rows import is_sharded

WHOLE_BYTES = 1 << 30
"""Bytes of an array up to which all are read: 0.5 s at the 2 GB/s of ``zlib.crc32``."""
SAMPLED_BLOCKS, BLOCK_BYTES = 1024, 1 << 16
"""Evenly spaced blocks that are read of a larger array, and their bytes: another order of rows shows in nearly all."""
REMEDY = (
    "sort lists of files and sets, seed every generator of random numbers, as in random.Random(0); or use "
    "matex_data.open_dataset(...).tf_dataset(...), of which each rank reads its own rows"
)


class LeafDigest(NamedTuple):
    """Digest of an array or tensor within nested data.

    Attributes
    ----------
    path : position of the leaf, such as ``"x[0]"``.
    kind : type, shape and dtype as text.
    content : checksum of the values; 0 of objects that have none.
    """

    path: str
    kind: str
    content: int = 0


class Difference(NamedTuple):
    """Difference between the data of ranks, equal on all of them.

    Attributes
    ----------
    ranks : ranks that hold other data than most ranks; than rank 0 where there is no majority.
    leaf : path of the first leaf that differs.
    found : kinds of this leaf on rank 0 and on the first of ``ranks``, as text.
    """

    ranks: tuple[int, ...]
    leaf: str
    found: str

    def __str__(self) -> str:
        listed = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        return f"{self.leaf} on rank{'s' if len(self.ranks) > 1 else ''} {listed} differs: {self.found}"


def difference(channel: Channel, data: Any) -> Difference | None:
    """Return the difference between the data of the ranks; None if all hold the same. *Collective*.

    Two numbers are reduced. Only if they differ are the digests of the leaves gathered.

    Parameters
    ----------
    data : nested arrays, tensors, tables, or objects that are compared by their type alone, such as generators. Sharded
        data rightly differs, and is not compared; but all ranks or none have to hold sharded data.

    Examples
    --------
    >>> from matex_data.training.comm.channel import open_channel
    >>> difference(open_channel(), {"x": np.zeros((4, 2))}) is None  # on one rank
    True
    """
    if channel.size == 1:
        return None
    leaves = [LeafDigest("", "sharded")] if is_sharded(data) else leaf_digests(data)
    return compared(channel, leaves)


def compared(channel: Channel, leaves: Sequence[LeafDigest]) -> Difference | None:
    """Return the difference between digests of the ranks; None if they are equal. *Collective*."""
    number = int.from_bytes(hashlib.blake2b(repr(leaves).encode(), digest_size=7).digest(), "little")
    # Not by channel.host, where a rank that evaluates alone in a callback would meet others in another operation.
    if channel.communicator.same(number)[0]:
        return None
    by_rank: list[list[LeafDigest]] = channel.host.allgather_object(list(leaves))
    counts = Counter(map(tuple, by_rank))
    usual = max(counts, key=lambda leaves: (counts[leaves], leaves == tuple(by_rank[0])))
    ranks = tuple(rank for rank, leaves in enumerate(by_rank) if tuple(leaves) != usual)
    return _described(ranks, usual, by_rank[ranks[0]])


def _described(ranks: tuple[int, ...], usual: Sequence[LeafDigest], other: Sequence[LeafDigest]) -> Difference:
    """Return the difference with the first leaf that differs."""
    for mine, theirs in zip(usual, other, strict=False):
        if mine != theirs:
            path = mine.path or theirs.path or "the data"
            if mine.path != theirs.path:
                return Difference(ranks, path, f"{theirs.path} in its position")
            found = f"other values of {mine.kind}" if mine.kind == theirs.kind else f"{theirs.kind}, not {mine.kind}"
            return Difference(ranks, path, found)
    return Difference(ranks, "the data", f"{len(other)} leaves, not {len(usual)}")


def check_same(channel: Channel, call: str, data: Any) -> None:
    """Raise ``PartitionError`` on all ranks unless they call a method with the same data. *Collective*.

    Parameters
    ----------
    call : the call, as in ``"fit()"``.
    """
    found = difference(channel, data)
    if found is not None:
        raise PartitionError(
            f"the ranks give {call} different data, of which each would keep its rows: rows would be used twice or "
            "never",
            expected="the same data on all ranks",
            found=found,
            remedy=REMEDY,
        )


def leaf_digests(data: Any) -> list[LeafDigest]:
    """Return the digests of all leaves of nested data, in the order of its structure.

    Examples
    --------
    >>> [leaf.path for leaf in leaf_digests({"x": [np.zeros(3), np.ones(3)], "y": np.ones(3)})]
    ['x[0]', 'x[1]', 'y']
    """
    return [_leaf_digest(path, leaf) for path, leaf in _leaves(data, "")]


def _leaves(data: Any, path: str) -> Iterable[tuple[str, Any]]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _leaves(value, f"{path}[{key!r}]" if path else str(key))
    elif isinstance(data, list | tuple) and not _is_row_list(data):
        for i, value in enumerate(data):
            yield from _leaves(value, f"{path}[{i}]")
    else:
        yield path, data


def _is_row_list(data: Sequence[Any]) -> bool:
    """Return whether a list holds numbers or texts, and so is an array."""
    return bool(data) and all(isinstance(value, int | float | str | bytes) for value in data)


def _leaf_digest(path: str, leaf: Any) -> LeafDigest:
    if leaf is None:
        return LeafDigest(path, "None")
    if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
        components = [_leaf_digest(path, array) for array in tf.nest.flatten(leaf, expand_composites=True)]
        kind = f"{type(leaf).__name__} of {', '.join(component.kind for component in components)}"
        return LeafDigest(path, kind, zlib.crc32(repr([component.content for component in components]).encode()))
    is_data = hasattr(leaf, "__array__") or isinstance(leaf, list | tuple | int | float | str | bytes)
    if not is_data:  # a generator or a dataset: its batches are compared
        return LeafDigest(path, type(leaf).__name__)
    array = np.asarray(keras.ops.convert_to_numpy(leaf) if isinstance(leaf, keras.Variable) else leaf)
    return LeafDigest(path, f"{array.dtype}{list(array.shape)}", content_digest(array))


def content_digest(array: Array) -> int:
    """Return a checksum of the values of an array of any dtype and memory layout, at about 2 GB/s.

    Of an array of more than ``WHOLE_BYTES``, blocks are read: a memory map may be larger than memory.

    Examples
    --------
    >>> content_digest(np.arange(6)) == content_digest(np.arange(12)[::2] // 2)
    True
    >>> content_digest(np.arange(6)) == content_digest(np.arange(6)[::-1])
    False
    """
    if array.dtype.hasobject:
        return zlib.crc32(repr(array.tolist()).encode())
    if not array.ndim or not array.nbytes:
        return zlib.crc32(array.tobytes())
    row_bytes = max(1, array.nbytes // len(array))
    rows = max(1, BLOCK_BYTES // row_bytes)
    starts: Iterable[int] = range(0, len(array), rows)
    if array.nbytes > WHOLE_BYTES and len(starts) > SAMPLED_BLOCKS:  # type: ignore[arg-type]
        starts = np.linspace(0, len(array) - rows, SAMPLED_BLOCKS).astype(int).tolist()
    elif array.flags.c_contiguous:
        return zlib.crc32(array.reshape(-1).view(np.uint8).data)
    digest = 0
    for start in starts:
        block = np.ascontiguousarray(array[start : start + rows])
        digest = zlib.crc32(block.reshape(-1).view(np.uint8).data, digest)
    return digest


def joint_digest(arrays: Iterable[Array]) -> int:
    """Return one checksum of the values of several arrays."""
    return zlib.crc32(repr(list(map(content_digest, arrays))).encode())
