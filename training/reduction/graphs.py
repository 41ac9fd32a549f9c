"""The graph that is being traced: whether XLA compiles it, variables beside it, the order of collective operations."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from matex_data.training.compat import in_session_graph
from matex_data.training.replacements import Replacements

log = logging.getLogger("matex_data.training")

compiled_by_xla: ContextVar[list[str] | None] = ContextVar("compiled_by_xla", default=None)
"""While XLA compiles what is traced: reasons why it cannot; otherwise None."""


def check_compiler() -> None:
    """Raise ``NotImplementedError`` if XLA compiles the function that is being traced, which now communicates."""
    reasons = compiled_by_xla.get()
    if reasons is not None and tf.inside_function():
        reasons.append("XLA does not compile functions that communicate")
        raise NotImplementedError(reasons[0])


def disable_xla(model: Any, rank: int, replacements: Replacements) -> None:
    """Let a model train without XLA, if it is compiled for it: XLA cannot compile communication. Warn on rank 0."""
    if model.jit_compile:
        if rank == 0:
            log.warning("XLA cannot compile communication: %s trains without jit_compile", model.name)
        replacements.set(model, "_jit_compile", False)


OWN_VARIABLE = "matex_data"
"""Name of the variables that this package adds to steps."""


def eager_variable(value: Any, dtype: tf.DType) -> Any:
    """Return a new variable on the CPU that is not trained, created outside of all functions that are being traced.

    ``tf.function`` traces a function twice if it sees that variables are created. It looks at the thread that traces.
    """

    def create() -> Any:
        with tf.device("CPU:0"), tf.name_scope(""):  # the whole name, whoever makes it
            return tf.Variable(value, trainable=False, dtype=dtype, name=OWN_VARIABLE)

    if in_session_graph():
        with tf.init_scope():
            return create()
    if tf.executing_eagerly():
        return create()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(create).result()


class SequenceCounter:
    """Variable that every collective operation reads and writes, which puts them in one order on all ranks.

    TensorFlow keeps the reads and writes of one variable in program order, through loops, branches and nested
    functions. Communication threads know their operations by the numbers.

    Attributes
    ----------
    variable : the variable; None before its first use.
    number : within ``advance``, the number of the next operation, a scalar int64 tensor; each operation takes it as an
        input and replaces it by an output of its own.
    """

    def __init__(self) -> None:
        self.variable: Any = None
        self.number: Any = None

    @contextlib.contextmanager
    def advance(self) -> Iterator[SequenceCounter]:
        """Context manager: order the operations of this block after those of earlier blocks."""
        if in_session_graph():  # the session of the user would have to initialize a variable
            self.number = tf.constant(0, tf.int64)
            yield self
            return
        if self.variable is None:
            self.variable = eager_variable(0, tf.int64)
        self.number = self.variable.read_value()
        yield self
        self.variable.assign(self.number)
        self.number = None


def is_fixed(tensor: Any, counts: Collection[int] = ()) -> bool:
    """Return whether a tensor of a graph does not depend on the rows of a batch, such as the positions of words.

    It is computed from constants, variables and lengths of axes other than the first one.

    Parameters
    ----------
    counts : constants that may be one of these, or a shape with rows, do depend on them; see ``is_count``.
    """
    if not isinstance(tensor, tf.Tensor) or not hasattr(tensor, "graph"):  # eager tensors have none
        return False
    outside = {id(inner): outer for outer, inner in getattr(tensor.graph, "captures", ())}
    pending, seen = [tensor], set[int]()
    while pending:
        source = pending.pop()
        constant = id(source) in outside and not hasattr(outside[id(source)], "graph")
        if id(source) in seen or source.dtype == tf.resource or constant:
            continue
        seen.add(id(source))
        op = source.op
        if op.type == "StridedSlice" and op.inputs[0].op.type == "Shape":
            begin, rank = tf.get_static_value(op.inputs[1]), op.inputs[0].op.inputs[0].shape.rank
            if begin is None or not rank or source.shape.rank != 0 or begin[0] % rank == 0:
                return False
            continue
        if op.type == "StridedSlice" and op.inputs[0].op.type == "Const":  # of a shape that is static
            begin = tf.get_static_value(op.inputs[1])
            if begin is None or begin[0] == 0:
                pending.append(op.inputs[0])
            continue
        if op.type in ("Placeholder", "Shape", "Size") or (op.op_def.is_stateful and op.type != "ReadVariableOp"):
            return False
        if is_count(source, counts):
            return False
        pending += list(op.inputs)
    return True


IndexKind = Literal["rows", "fixed", "unique"]
"""Indices of a sparse gradient: of rows; not determined by rows; each once in a batch."""
_SOURCES = {"Identity": 0, "Reshape": 0, "Cast": 0, "StopGradient": 0, "SelectV2": 2}
"""Input from which an operation takes indices; the selection is that of Keras, of indices below 0."""
_UNIQUE = ("Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2")


def index_parts(indices: Any) -> list[tuple[Any, IndexKind]]:
    """Return the parts of which the indices of a sparse gradient consist, one after the other, and their kinds."""
    if is_fixed(indices):
        return [(indices, "fixed")]
    source = indices
    while hasattr(source, "graph") and source.op.type in _SOURCES:
        before = source.op.inputs[_SOURCES[source.op.type]]
        if before.shape.rank != 1 or (source.op.type == "SelectV2" and not _counts_from_end(source.op, before)):
            break
        source = before
    if hasattr(source, "graph") and source.shape.rank == 1 and source.op.type == "ConcatV2":
        return [part for one in source.op.inputs[:-1] for part in index_parts(one)]
    unique = hasattr(source, "graph") and source.op.type in _UNIQUE and source.value_index == 0
    return [(indices, "unique" if unique else "rows")]


def _counts_from_end(selection: Any, indices: Any) -> bool:
    """Return whether a selection adds something to some of these indices, as Keras does to those below 0."""
    added = selection.inputs[1].op
    return added.type == "AddV2" and any(tensor is indices for tensor in added.inputs)


def is_count(tensor: Any, counts: Collection[int]) -> bool:
    """Return whether a tensor of a graph is a constant that may be one of these counts, or a shape with rows.

    Parameters
    ----------
    counts : of rows, the least of them, and of elements.
    """
    if not counts or tensor.op.type != "Const" or tensor.shape.rank not in (0, 1) or tensor.shape == (0,):
        return False
    value = tf.get_static_value(tensor)
    if tensor.shape.rank == 0:
        return bool(np.isin(value, list(counts)))
    return bool(value.dtype.kind in "iu" and value[0] > 0 and value[0] % min(counts) == 0)  # rows may be joined
