"""Average of gradients over the ranks, each of them once: where scripts compute them, and where optimizers apply them.

A script may clip averages, scale, sum or keep them before an optimizer gets them. Nothing in these tensors shows where
they come from. So the ranks compare them: what is equal on all ranks, bit by bit, is its own average and is not sent;
everything else is averaged. Weights therefore stay equal on all ranks, whatever a script computes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import keras
import tensorflow as tf

from matex_data.errors import ArgumentError, PartitionError
from matex_data.locks import setting
from matex_data.mpi.library import MPI
from matex_data.training.arguments import open_checked
from matex_data.training.comm.channel import Channel
from matex_data.training.comm.runtime import warn_of_shared_gpu
from matex_data.training.compat import in_session_graph, note_steps, session_weight
from matex_data.training.exact.batch_weights import batch_weights, patch_iteration
from matex_data.training.exact.state import step_state
from matex_data.training.exact.variables import inner_optimizer
from matex_data.training.keras_api import ACCUMULATING, is_recording
from matex_data.training.partition.parts import channels_of
from matex_data.training.reduction.buckets import BUCKET_BYTES
from matex_data.training.reduction.ops import Reducer, ReductionStrategy
from matex_data.training.reduction.payloads import WHOLE
from matex_data.training.reduction.rounding import WireDtype
from matex_data.training.replacements import Replacements, left_on_error

log = logging.getLogger("matex_data.training")
_told: list[bool] = []
_by_row: ContextVar[bool] = ContextVar("by_row", default=False)
"""True while TensorFlow maps a function over rows."""


class GradientAverage:
    """Weighted average of gradients over the ranks of a channel."""

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self.channel = reducer.channel
        self.state = step_state(reducer.channel)

    def computed(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the averages of gradients that were computed from the rows of this rank. *Collective*.

        Gradients are dense tensors or ``tf.IndexedSlices``; None stays None.
        """
        self.state.returned = True
        return self._average(gradients, unless_equal=False)

    def applied(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the averages of gradients that an optimizer is about to apply. *Collective*.

        Averages stay as they are. If the step has computed averages before, gradients that are equal on all ranks stay,
        too: they were computed from these averages.
        """
        return self._average(gradients, unless_equal=self.state.returned)

    def _average(self, gradients: Sequence[Any], unless_equal: bool) -> list[Any]:
        result = list(gradients)
        local = [i for i, g in enumerate(result) if g is not None and not self.state.is_average(g)]
        if not local:
            return result
        averages = self.reducer.average([result[i] for i in local], self.weight(), unless_equal)
        if in_session_graph():
            note_steps(averages)
        for i, average in zip(local, averages, strict=True):
            result[i] = average
        self.state.note(averages)
        return result

    def weight(self) -> Any:
        """Return the weight of this rank: of the step, of the batches that a loop took, or that a session feeds."""
        if self.state.running:
            return self.state.weight
        if in_session_graph():
            return session_weight(WHOLE)
        return batch_weights(self.channel.communicator).next_step_weight()


class GradientPatches:
    """Context manager: ``GradientTape.gradient`` and ``tf.gradients`` return averages over the ranks.

    Gradients with respect to variables are averaged. Gradients with respect to other tensors, as in a gradient
    penalty, stay local, and so do gradients that an outer tape may differentiate again, and those of single rows, which
    a script may clip before it adds them up; the optimizer averages those.
    """

    def __init__(self, average: GradientAverage, enabled: Callable[[], bool] = lambda: True) -> None:
        self._average = average
        self._enabled = enabled
        self._replacements = Replacements()

    @left_on_error
    def __enter__(self) -> GradientPatches:
        self._patch(tf.GradientTape, "gradient")
        for owner in (tf, tf.compat.v1):
            self._patch(owner, "gradients")
            for name in ("map_fn", "vectorized_map"):
                self._patch_rows(owner, name)
        for name in ("jacobian", "batch_jacobian"):
            self._patch_rows(tf.GradientTape, name)
        return self

    def __exit__(self, *_: object) -> None:
        self._replacements.restore()

    def _patch(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)
        keyword, position = ("xs", 1) if name == "gradients" else ("sources", 2)

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            gradients = original(*args, **kwargs)
            if not self._enabled() or is_recording():
                return gradients
            if _by_row.get():
                self._tell_of_rows()
                return gradients
            return self._average_variables(kwargs[keyword] if keyword in kwargs else args[position], gradients)

        self._replacements.set(owner, name, patched)

    def _patch_rows(self, owner: Any, name: str) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            target = kwargs.get("target", args[1] if len(args) > 1 else None)
            one = name == "jacobian" and getattr(getattr(target, "shape", None), "rank", None) == 0
            with setting(_by_row, _by_row.get() or not one):
                return original(*args, **kwargs)

        self._replacements.set(owner, name, patched)

    def _tell_of_rows(self) -> None:
        """Say once what averages the gradients of rows."""
        if self._average.channel.rank == 0 and self._average.channel.size > 1 and not _told:
            _told.append(True)
            log.warning(
                "gradients within tf.map_fn, tf.vectorized_map and tape.jacobian are those of this rank's rows: the "
                "optimizer averages what it gets of them\n"
                "  remedy: where a step changes variables by them without an optimizer, average them by "
                "training.allreduce"
            )

    def _average_variables(self, sources: Any, gradients: Any) -> Any:
        """Average the gradients whose sources are variables."""
        leaves = tf.nest.flatten(gradients)
        pairs = enumerate(zip(tf.nest.flatten(sources), leaves, strict=True))
        selected = [i for i, (source, leaf) in pairs if hasattr(source, "assign") and leaf is not None]
        for i, average in zip(selected, self._average.computed([leaves[i] for i in selected]), strict=True):
            leaves[i] = average
        return tf.nest.pack_sequence_as(gradients, leaves)


def accumulates(optimizer: Any) -> bool:
    """Return whether an optimizer adds up the gradients of some steps as Keras's own ones do."""
    inner = inner_optimizer(optimizer)
    keras_own = all(
        getattr(type(inner), name) is getattr(keras.optimizers.Optimizer, name) and name not in vars(inner)
        for name in ACCUMULATING
    )
    known = optimizer is inner or type(optimizer) is keras.optimizers.LossScaleOptimizer
    return bool(getattr(inner, "gradient_accumulation_steps", None)) and known and keras_own


class AccumulatedAverage:
    """Average over the ranks of gradients that an optimizer has added up.

    Each rank adds up its own gradients, times its weight and the number of ranks. So the mean over the ranks of what
    they have added up is, at any time, what one process would have added up.
    """

    def __init__(self, optimizer: Any, average: GradientAverage) -> None:
        self._outer, self._inner, self._average = optimizer, inner_optimizer(optimizer), average
        self._reducer, self._size = average.reducer, average.channel.size

    @contextlib.contextmanager
    def before_update(self) -> Iterator[None]:
        """Context manager: the optimizer averages gradients before it clips them. *Collective* in each update.

        With a scaled loss the ranks agree in each step on whether all gradients are finite.
        """
        with Replacements() as replacements:
            clip, check = self._inner._clip_gradients, getattr(self._outer, "check_finite", None)
            replacements.set(self._inner, "_clip_gradients", lambda gradients: clip(self._mean(gradients)))
            if check is not None:
                replacements.set(self._outer, "check_finite", lambda gradients: self._all_finite(check, gradients))
            yield

    def weighed(self, gradients: Sequence[Any]) -> list[Any]:
        """Return this rank's gradients, times its weight and the number of ranks; None stays None."""
        weight = self._average.weight()
        if not tf.is_tensor(weight):  # all ranks weigh equally
            return list(gradients)
        factor = weight * self._size
        return [g if g is None else tf.math.multiply_no_nan(g, tf.cast(factor, g.dtype)) for g in gradients]

    def _mean(self, gradients: Sequence[Any]) -> list[Any]:
        return self._reducer.average(list(gradients), 1 / self._size)

    def _all_finite(self, check: Callable[[Sequence[Any]], Any], gradients: Sequence[Any]) -> Any:
        (finite,) = self._reducer([tf.cast(check(gradients), tf.int32)], None, "min")
        return finite > 0


def distribute(
    optimizer: Any,
    comm: MPI.Intracomm | None = None,
    *,
    strategy: ReductionStrategy = "chained",
    bucket_bytes: int = BUCKET_BYTES,
    dense_share: float | None = None,
    wire_dtype: WireDtype | None = None,
) -> Any:
    """Make an optimizer average gradients over all ranks, and return it. *Collective*.

    The average precedes everything else that the optimizer does: the finite check of loss scaling, clipping,
    accumulation and moving averages. The class, the configuration and the saved state of the optimizer do not change.
    ``fit`` and ``matex run`` do not need this function, and have options of their own; training loops without the
    launcher do.

    Parameters
    ----------
    optimizer : Keras optimizer; of nested optimizers (``LossScaleOptimizer``), the outer one.
    comm : communicator; None: all ranks of the job.
    strategy : how the graph communicates. "chained": its own threads, one bucket after the other. "funneled": one
        communication thread. "concurrent": four of them, each with a communicator of its own.
    bucket_bytes : gradients are packed into buckets of about this size, in bytes.
    dense_share : fraction of the rows of a variable from which sparse gradients (``tf.IndexedSlices``) are summed row
        by row. None: keep the slices of all ranks, as one process would.
    wire_dtype : dtype in which gradients are sent, for slow networks: "float16" or "bfloat16". Each rank's gradient,
        times its weight, and the average are rounded to it; sums are computed in float32, and are the same on all
        ranks. Gradients in float64 and sparse gradients are sent as they are. None: send all of them as they are.

    Returns
    -------
    optimizer : the same object.

    Raises
    ------
    ArgumentError : ``optimizer`` is none, ``strategy`` none of the three, or ``wire_dtype`` none of the two.

    Examples
    --------
    >>> import keras, matex_data as md
    >>> optimizer = md.training.distribute(keras.optimizers.SGD(0.5))
    >>> weight = keras.Variable(1.0)
    >>> optimizer.apply([keras.ops.array(0.5)], [weight])  # on several ranks: the average of the ranks' gradients
    >>> float(weight.numpy())
    0.75
    """

    def check() -> None:
        if isinstance(optimizer, type) or not hasattr(optimizer, "apply"):
            raise ArgumentError(
                "training.distribute() takes no optimizer= of this kind",
                expected="an optimizer of Keras, such as keras.optimizers.Adam()",
                found=repr(optimizer),
            )

    channel = open_checked("training.distribute", distribute, locals(), check)
    channel.communicator.note_sharded_data()
    patch_iteration()
    warn_of_shared_gpu(channel.rank)
    attach_average(optimizer, GradientAverage(Reducer(channel, strategy, bucket_bytes, dense_share, wire_dtype)))
    return optimizer


def attach_average(optimizer: Any, average: GradientAverage, waits: bool = False) -> None:
    """Make ``optimizer.apply`` average its gradients first; ``apply`` is *collective* from then on.

    Parameters
    ----------
    waits : average what an optimizer adds up over steps once, in the step that updates the weights.
    """
    detach_average(optimizer)
    # An inner optimizer applies nothing on a rank whose gradients overflow, and would leave the others waiting.
    detach_average(getattr(optimizer, "inner_optimizer", None))
    later = AccumulatedAverage(optimizer, average) if waits else None
    object.__setattr__(optimizer, "apply", _AveragingApply(optimizer.apply, average, later))


def detach_average(optimizer: Any) -> None:
    """Undo ``attach_average``."""
    if is_distributed(optimizer):
        object.__delattr__(optimizer, "apply")


def is_distributed(optimizer: Any) -> bool:
    """Return whether the optimizer averages gradients over the ranks."""
    return isinstance(getattr(optimizer, "__dict__", {}).get("apply"), _AveragingApply)


class _AveragingApply:
    """``apply`` of an optimizer, preceded by the average over the ranks."""

    def __init__(
        self, apply: Callable[..., Any], average: GradientAverage, later: AccumulatedAverage | None = None
    ) -> None:
        self._apply = apply
        self._average = average
        self._later = later

    def __call__(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        # AutoGraph would take a second to convert this package's code.
        return tf.autograph.experimental.do_not_convert(self._apply_averages)(grads, trainable_variables)

    def _apply_averages(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None) -> Any:
        _check_parts(self._average.channel, trainable_variables or ())
        if self._average.state.averaged:
            return self._apply(grads, trainable_variables)
        dense = not any(isinstance(gradient, tf.IndexedSlices) for gradient in grads)
        if self._later is not None and dense:
            weighed = self._later.weighed(grads)
            with self._average.state.only_averages(), self._later.before_update():
                return self._apply(weighed, trainable_variables)
        with self._average.state.only_averages():
            return self._apply(self._average.applied(list(grads)), trainable_variables)


def _check_parts(channel: Channel, variables: Sequence[Any]) -> None:
    """Raise ``PartitionError`` if the ranks hold different parts of a variable, whose gradients have no average."""
    for variable in variables:
        for parts in channels_of(variable):
            holders = list(range(parts.size))
            among = parts.user.group.Translate_ranks(holders, channel.user.group)
            if sum(rank != MPI.UNDEFINED for rank in among) > 1:
                raise PartitionError(
                    "the ranks that average gradients hold different parts of a variable",
                    field=variable.path,
                    expected="training.fit(model, data, mesh=mesh), which trains models in parts",
                    found=f"an average over {channel.size} ranks, {parts.size} of which hold parts",
                    remedy="train with training.fit, or build the model without training.deferred",
                )
