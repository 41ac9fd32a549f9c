"""``distribute``: an optimizer that averages gradients over the ranks before its own ``apply``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from matex_data.errors import PartitionError
from matex_data.mpi.library import MPI
from matex_data.training.average.gradients import GradientAverage
from matex_data.training.comm.channel import Channel, open_channel
from matex_data.training.comm.devices import warn_of_shared_gpu
from matex_data.training.exact.batch_weights import patch_iteration
from matex_data.training.exact.variables import inner_optimizer
from matex_data.training.keras_api import ACCUMULATING
from matex_data.training.partition.parts import channels_of
from matex_data.training.reduction.buckets import BUCKET_BYTES
from matex_data.training.reduction.ops import Reducer, Strategy
from matex_data.training.reduction.rounding import WireDtype
from matex_data.training.replacements import Replacements


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

    Parameters
    ----------
    optimizer : one that ``accumulates``.
    average : over the ranks.
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
    strategy: Strategy = "chained",
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
    ValueError : ``strategy`` is none of the three, or ``wire_dtype`` none of the two.

    Examples
    --------
    >>> import keras, matex_data as md
    >>> optimizer = md.training.distribute(keras.optimizers.SGD(0.5))
    >>> weight = keras.Variable(1.0)
    >>> optimizer.apply([keras.ops.array(0.5)], [weight])  # on several ranks: the average of the ranks' gradients
    >>> float(weight.numpy())
    0.75
    """
    channel = open_channel(comm)
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
    """Raise an error if the ranks hold different parts of a variable, whose gradients have no average.

    Raises
    ------
    PartitionError : they do.
    """
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
