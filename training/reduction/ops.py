"""Reductions over all ranks inside TensorFlow graphs: packed into buckets, in one order on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from matex_data import machine
from matex_data._types import Array
from matex_data.arguments import check_arguments
from matex_data.mpi.library import MPI
from matex_data.training.comm.channel import Channel, CommunicationPool, open_channel
from matex_data.training.comm.collectives import Op
from matex_data.training.comm.runtime import Choice, Runtime, runtime_of
from matex_data.training.compat import in_session_graph
from matex_data.training.reduction.buckets import ALONE_BYTES, BUCKET_BYTES, Bucket, plan_buckets
from matex_data.training.reduction.graphs import SequenceCounter, check_compiler
from matex_data.training.reduction.payloads import DensePayload, Payload, SparsePayload
from matex_data.training.reduction.rounding import WIRE_DTYPES, WireDtype

ReductionStrategy = Literal["chained", "funneled", "concurrent"]
REDUCED = "matex_reduction"
"""Scope of the operations that reduce over the ranks, which have different rows."""

THREADS = {"chained": 0, "funneled": 1, "concurrent": 4}
"""Communication threads of each strategy; with none, the threads of the graph communicate."""


def allreduce(tensors: Any, op: Op = "mean", *, comm: MPI.Intracomm | None = None) -> Any:
    """Reduce tensors element by element over all ranks, in graphs and in eager code. *Collective*.

    Parameters
    ----------
    tensors : tensor, or nested structure of tensors, of the same shapes and dtypes on every rank. None stays None.
        Of ``tf.IndexedSlices``, "mean" and "sum" gather the slices of all ranks. The sum of integers is exact.
    op : "mean", "sum", "max" or "min". All of them are NaN where any rank has NaN. In a mean each rank counts once,
        whatever the number of its rows: the mean over rows is a sum of sums, divided by the sum of their numbers.
    comm : communicator; None: all ranks of the job.

    Returns
    -------
    tensors : the same structure, with the same values on every rank.

    Raises
    ------
    TypeError : the mean of integers, any operation on booleans or strings, or "max" or "min" of complex numbers or
        ``tf.IndexedSlices``.
    ArgumentError : ``op`` is none of the four.
    tf.errors.InvalidArgumentError : on all ranks, if their dtype cannot hold a sum of integers.

    Examples
    --------
    >>> import tensorflow as tf, matex_data as md
    >>> losses = tf.constant([0.5, 1.5])  # of the rows of this rank
    >>> float(md.training.allreduce(tf.reduce_mean(losses)))  # on one rank: its own mean
    1.0
    >>> int(md.training.allreduce(len(losses), op="sum"))  # rows of all ranks
    2
    """
    # AutoGraph would convert this package's code, slowly, and warn about each call of MPI.
    return tf.autograph.experimental.do_not_convert(_allreduce)(tensors, op, comm)


def _allreduce(tensors: Any, op: Op, comm: MPI.Intracomm | None) -> Any:
    check_arguments(allreduce, locals(), "training.allreduce")
    channel = open_channel(comm)
    leaves = tf.nest.flatten(tensors)
    kept = (tf.IndexedSlices, type(None))
    leaves = [leaf if isinstance(leaf, kept) else tf.convert_to_tensor(leaf) for leaf in leaves]
    for leaf in leaves:
        _check(leaf, op)
    weight = 1 / channel.size if op == "mean" else None
    return tf.nest.pack_sequence_as(tensors, Reducer(channel)(leaves, weight, op))


def _check(leaf: Any, op: Op) -> None:
    if leaf is None:
        return
    if leaf.dtype in (tf.bool, tf.string) or (op == "mean" and leaf.dtype.is_integer):
        instead = ', or give op="sum"' if leaf.dtype.is_integer else ""
        raise TypeError(f"cannot compute the {op} of {leaf.dtype.name} values; cast them first (tf.cast){instead}")
    if leaf.dtype.is_complex and op in ("max", "min"):
        raise TypeError(f"cannot compute the {op} of {leaf.dtype.name} values, which have no order: reduce tf.abs(...)")
    if isinstance(leaf, tf.IndexedSlices) and op in ("max", "min"):
        raise TypeError(f"cannot compute the {op} of tf.IndexedSlices; convert them first (tf.convert_to_tensor)")


class Reducer:
    """Weighted sum of tensors over all ranks, by one strategy. *Collective*.

    Parameters
    ----------
    strategy, bucket_bytes, dense_share : as of ``distribute``.
    wire_dtype : dtype in which ``average`` sends dense gradients, as of ``distribute``.
    scope : name scope of the operations.
    collectives : by which ``average`` reduces dense gradients that are sent as they are: "mpi"; "tensorflow"; "auto":
        TensorFlow's, where this process has them for all ranks of the channel. MPI reduces everything else.
    """

    def __init__(
        self,
        channel: Channel,
        strategy: ReductionStrategy = "chained",
        bucket_bytes: int = BUCKET_BYTES,
        dense_share: float | None = None,
        wire_dtype: WireDtype | None = None,
        scope: str = REDUCED,
        collectives: Choice = "auto",
    ) -> None:
        self.channel = channel
        self.strategy: ReductionStrategy = strategy
        self.bucket_bytes = bucket_bytes
        self.dense_share = dense_share
        self.wire_dtype: WireDtype | None = wire_dtype
        self._scope = scope
        self.collectives: Choice = collectives
        self._runtime = runtime_of(channel, collectives, strategy)
        self._pool = channel.pool(THREADS[strategy]) if THREADS[strategy] and channel.size > 1 else None

    def average(self, gradients: Sequence[Any], weight: Any, unless_equal: bool = False) -> list[Any]:
        """Return the weighted average of gradients over all ranks, sent in the wire dtype. *Collective*.

        Parameters
        ----------
        weight : factor of this rank, see ``__call__``; those of all ranks sum to one.
        unless_equal : compare digests first; gradients that are equal on all ranks are their own average and not sent.
        """
        compared = unless_equal or self.wire_dtype is not None
        runtime = None if compared or self.channel.narrowed or in_session_graph() else self._runtime
        return self(gradients, weight, wire_dtype=self.wire_dtype, unless_equal=unless_equal, runtime=runtime)

    def total(self, tensor: Any, op: Op = "sum") -> Any:
        """Return the sum of a tensor over all ranks, or its maximum or minimum. *Collective*."""
        return self([tensor], None, op)[0]

    def __call__(
        self,
        tensors: Sequence[Any],
        weight: Any = None,
        op: Op = "sum",
        wire_dtype: WireDtype | None = None,
        unless_equal: bool = False,
        runtime: Runtime | None = None,
    ) -> list[Any]:
        """Return the sum over all ranks of ``weight`` times each tensor. *Collective*.

        Parameters
        ----------
        weight : factor of this rank, a number or a scalar tensor; None: 1. With 0 this rank contributes exact zeros,
            also for infinities and NaN.
        op : "max" and "min" instead of the sum.
        wire_dtype : dtype in which sums of dense tensors are sent; None: as they are.
        unless_equal : return tensors that are equal on all ranks as they are.
        runtime : sums dense floats of static shapes; None: MPI sums everything.
        """
        if self.channel.size == 1:
            return list(tensors)
        out = list(tensors)
        dense = [i for i, t in enumerate(tensors) if t is not None and not isinstance(t, tf.IndexedSlices)]
        sparse = [i for i, t in enumerate(tensors) if isinstance(t, tf.IndexedSlices)]
        buckets = self._plan_buckets([tensors[i] for i in dense])
        positions = [[dense[p] for p in bucket.positions] for bucket in buckets] + [[i] for i in sparse]
        wire = None if wire_dtype is None else WIRE_DTYPES[wire_dtype]
        payloads: list[Payload] = [
            DensePayload(self.channel, bucket, [tensors[i] for i in dense], op, wire, unless_equal)
            for bucket in buckets
        ]
        payloads += [SparsePayload(self.channel, tensors[i], self.dense_share, unless_equal) for i in sparse]
        with tf.name_scope(self._scope):
            results = self._run(payloads, weight, runtime) if payloads else []
        for at, payload, outputs in zip(positions, payloads, results, strict=True):
            for i, tensor in zip(at, payload.unpack(outputs), strict=True):
                out[i] = tensor
        return out

    def _plan_buckets(self, tensors: list[Any]) -> list[Bucket]:
        counts = [t.shape.num_elements() for t in tensors]
        sizes = [ALONE_BYTES if n is None else n for n in counts]  # ranks compare shapes that are known at run time
        return plan_buckets(sizes, [np.dtype(t.dtype.as_numpy_dtype) for t in tensors], self.bucket_bytes)

    def _run(self, payloads: list[Payload], weight: Any, runtime: Runtime | None) -> list[list[Any]]:
        check_compiler()
        weight = tf.constant(1, tf.float64) if weight is None else tf.convert_to_tensor(weight, tf.float64)
        if runtime is not None:
            fitting = [payload for payload in payloads if isinstance(payload, DensePayload) and payload.is_static()]
            sums = iter(run_in_runtime(self.channel, runtime, fitting, weight) if fitting else [])
            others = [payload for payload in payloads if payload not in fitting]
            rest = iter(run_chained(self.channel, others, weight) if others else [])
            return [next(sums if payload in fitting else rest) for payload in payloads]
        if self._pool is None or self.channel.narrowed or in_session_graph():
            return run_chained(self.channel, payloads, weight)
        return _run_in_pool(self.channel, self._pool, payloads, weight)


def broadcast_from_root(channel: Channel, tensors: Sequence[Any]) -> list[Any]:
    """Return the tensors of rank 0, in graphs and in eager code. *Collective*."""

    def run(number: Any, *arrays: Array) -> list[Any]:
        copies = [np.array(array, order="C") for array in arrays]
        for copy in copies:
            channel.graph.broadcast(copy.reshape(-1))
        return [number, *copies]

    received = run_once(channel, run, tensors)
    for tensor, new in zip(tensors, received, strict=True):
        new.set_shape(tensor.shape)
    return received


def gather_rows(channel: Channel, tensors: Sequence[Any]) -> list[Any]:
    """Return the concatenated rows of all ranks, in the order of ranks, in graphs and in eager code. *Collective*.

    Parameters
    ----------
    tensors : tensors of one dimension or more; the number of rows may differ between ranks.

    Raises
    ------
    RuntimeError : on all ranks, if dtypes, or shapes behind the first axis, differ; in a graph, when it runs.
    """

    def run(number: Any, *arrays: Array) -> list[Any]:
        kinds = [(array.dtype.name, array.shape[1:]) for array in arrays]
        channel.check_same(f"gather rows of {kinds}", channel.graph)
        return [number, *(channel.graph.gather(np.ascontiguousarray(array)) for array in arrays)]

    received = run_once(channel, run, tensors)
    for tensor, new in zip(tensors, received, strict=True):
        new.set_shape([None, *tensor.shape[1:]])
    return received


def run_once(channel: Channel, run: Any, tensors: Sequence[Any], dtypes: Sequence[Any] | None = None) -> list[Any]:
    """Run a collective function of NumPy arrays as one operation, in the order of the sequence counter.

    Parameters
    ----------
    run : function of the operation's number and the arrays; returns the number and arrays.
    dtypes : of the arrays that it returns; None: those of ``tensors``.
    """
    check_compiler()
    returned = [tensor.dtype for tensor in tensors] if dtypes is None else dtypes
    with _sequence_counter(channel, "chained").advance() as cursor:
        cursor.number, *received = tf.numpy_function(run, [cursor.number, *tensors], [tf.int64, *returned])
    return list(received)


def run_chained(channel: Channel, payloads: Sequence[Payload], weight: Any) -> list[list[Any]]:
    """Add blocking operations, each of which takes the sequence number of the one before it.

    There is one for each payload, which overlaps with the computation of other gradients, or a single one where
    nothing can overlap.
    """
    results: list[list[Any]] = []
    with _sequence_counter(channel, "chained").advance() as cursor:
        for group in [[payload] for payload in payloads] if _can_overlap() else [list(payloads)]:
            forms = [(payload.without_tensors(), len(payload.inputs)) for payload in group]

            def run(number: Any, weight: Any, *arrays: Array, forms: list[tuple[Payload, int]] = forms) -> list[Any]:
                remaining, out = iter(arrays), [number + 1]
                for payload, count in forms:
                    out += payload.prepare(float(weight), list(islice(remaining, count)))(channel.graph)
                return out

            inputs = [tensor for payload in group for tensor in payload.inputs]
            dtypes = [dtype for payload in group for dtype in payload.dtypes]
            cursor.number, *outputs = tf.numpy_function(run, [cursor.number, weight, *inputs], [tf.int64, *dtypes])
            received = iter(outputs)
            results += [list(islice(received, len(payload.dtypes))) for payload in group]
    return results


def run_in_runtime(
    channel: Channel, runtime: Runtime, payloads: Sequence[DensePayload], weight: Any
) -> list[list[Any]]:
    """Add sums by TensorFlow's collectives, one after the other, behind a comparison of what the ranks are about to do.

    All ranks have computed all gradients when the first sum begins: a rank whose step fails is missed by MPI, whose
    waits end, and not by a sum of TensorFlow, which would wait for it.
    """
    inputs = [tensor for payload in payloads for tensor in payload.inputs]
    operation = "; ".join(["reduce by TensorFlow", *(payload.operation for payload in payloads)])

    def meet(number: Any) -> Any:
        channel.check_same(operation, channel.graph)
        channel.graph.compare_ranks()
        return number + 1

    results: list[list[Any]] = []
    with _sequence_counter(channel, "chained").advance() as cursor:
        with tf.control_dependencies(inputs):
            last = number = tf.numpy_function(meet, [cursor.number], tf.int64)
        for index, payload in enumerate(payloads):
            with tf.control_dependencies([last]):
                last = runtime.sum(payload.addend(weight), f"{index}: {payload.operation}")
            results.append([tf.cast(last, payload.dtypes[0])])
        with tf.control_dependencies([last]):
            cursor.number = tf.identity(number)
    return results


def _can_overlap() -> bool:
    """Return whether the graph of this rank has a thread that can compute while another one communicates.

    With one thread the order of gradients that do not depend on one another differs between the ranks. If they reduced
    each one at once, they would wait for each other every time.
    """
    threads = tf.config.threading.get_inter_op_parallelism_threads() or machine.own_cores()
    return bool(threads > 1)


def _run_in_pool(channel: Channel, pool: CommunicationPool, payloads: list[Payload], weight: Any) -> list[list[Any]]:
    """Add two operations for each payload: submit it, in the order of all, and wait for it once all are submitted."""
    with _sequence_counter(channel, pool).advance() as cursor:
        numbers = []
        for payload in payloads:
            form = payload.without_tensors()

            def start(number: Any, weight: Any, *arrays: Array, form: Payload = form) -> Any:
                pool.submit(int(number), form.prepare(float(weight), arrays))
                return number + 1

            numbers.append(cursor.number)
            cursor.number = tf.numpy_function(start, [cursor.number, weight, *payload.inputs], tf.int64)

        def wait(number: Any, _: Any) -> Any:
            return pool.result(int(number))

        return [
            tf.nest.flatten(tf.numpy_function(wait, [number, cursor.number], payload.dtypes))
            for number, payload in zip(numbers, payloads, strict=True)
        ]


def _sequence_counter(channel: Channel, name: str | CommunicationPool) -> SequenceCounter:
    counter = channel.counters.setdefault(name, SequenceCounter())
    assert isinstance(counter, SequenceCounter)
    return counter
