"""Checksum of a graph, by which processes can tell that they have traced the same one."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np


def fingerprint(graph: Any) -> int:
    """Return a checksum of the operations of a graph, of the functions that it calls, and of captured constants.

    Names do not count: they have numbers that depend on what else a process has traced.

    Examples
    --------
    >>> import tensorflow as tf
    >>> functions = [tf.function(lambda x, factor=factor: x * factor) for factor in (2, 2, 3)]
    >>> concrete = [function.get_concrete_function(tf.TensorSpec([None])) for function in functions]
    >>> first, same, other = [fingerprint(function.graph) for function in concrete]
    >>> first == same, first == other
    (True, False)
    """
    checksum = 0
    for text in _texts(graph):
        checksum = zlib.crc32(text, checksum)
    return checksum


def _texts(graph: Any) -> Iterator[bytes]:
    positions = {tensor.ref(): f"argument {i}" for i, tensor in enumerate(graph.inputs)}
    for i, op in enumerate(graph.get_operations()):
        inputs = [positions.get(tensor.ref(), "") for tensor in op.inputs]
        yield f"{op.type} {inputs}".encode()
        positions.update((tensor.ref(), f"{i}:{j}") for j, tensor in enumerate(op.outputs))
        for name, value in sorted(op.node_def.attr.items()):
            functions = [value.func.name] if value.HasField("func") else [f.name for f in value.list.func]
            if functions:
                yield from _of_functions(graph, functions)
            elif not name.startswith("_"):
                yield name.encode() + value.SerializeToString(deterministic=True)
    yield f"{[positions.get(tensor.ref(), '') for tensor in graph.outputs]}".encode()
    for outer, _ in graph.captures:
        if hasattr(outer, "numpy") and outer.dtype.name not in ("resource", "variant"):
            array = np.asarray(outer.numpy())
            yield repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()


def _of_functions(graph: Any, names: list[str]) -> Iterator[bytes]:
    for name in names:
        body = getattr(graph._get_function(name), "graph", None)
        if body is not None:
            yield from _texts(body)
