"""Variables of which each rank holds a part."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from matex_data._types import Array
from matex_data.errors import DataError, PartitionError
from matex_data.locks import setting
from matex_data.mpi.polling import poll
from matex_data.training import keras_api
from matex_data.training.comm.channel import Channel
from matex_data.training.comm.collectives import segments
from matex_data.training.reduction.buckets import plan_buckets

LEAVE_SECONDS = 5.0
"""Seconds that a rank waits for the others to leave by the same error, or to fail like this one."""
_hidden: ContextVar[bool] = ContextVar("hidden", default=False)
"""True while a model is called, whose layers read parts only where a rule combines their results."""


class Part(Protocol):
    """Form of a part: which section of the whole each rank of a channel holds.

    Attributes
    ----------
    channel : ranks that hold the sections.
    shape : of the whole.
    outer : form of the array that these ranks hold sections of, if this is itself a part; None: it is whole.
    """

    channel: Channel
    shape: tuple[int, ...]
    outer: Part | None

    def own(self, whole: Array) -> Array:
        """Return this rank's part of a whole array."""

    def join(self, parts: Sequence[Array]) -> Array:
        """Return the whole of the parts of all ranks."""


class AxisPart:
    """Part of an array that is cut into equal sections along one axis.

    Parameters
    ----------
    channel : ranks that hold the sections, in the order of ranks.
    axis : along which it is cut; the number of ranks divides its size.
    """

    outer: Part | None = None

    def __init__(self, channel: Channel, shape: Sequence[int], axis: int) -> None:
        self.channel, self.shape, self.axis = channel, tuple(shape), axis

    def own(self, whole: Any) -> Any:
        size = self.shape[self.axis] // self.channel.size
        begin = self.channel.rank * size
        return whole[(slice(None),) * self.axis + (slice(begin, begin + size),)]

    def join(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(parts, self.axis)


class Nested:
    """Part of a part, such as the section that a replica owns of the units of a part."""

    def __init__(self, inner: Part, outer: Part) -> None:
        self.channel, self.shape = inner.channel, outer.shape
        self.outer: Part | None = outer
        self._inner, self._outer = inner, outer

    def own(self, whole: Array) -> Array:
        return self._inner.own(self._outer.own(whole))

    def join(self, parts: Sequence[Array]) -> Array:
        return self._inner.join(parts)


class PartVariable(keras.Variable):  # type: ignore[misc]  # Keras has no types
    """Keras variable with this rank's part alone; its shape is that of the part.

    Objects get this class when ``cut`` cuts them, so that layers and optimizers keep the variables that they have.
    """

    @property
    def value(self) -> Any:
        """Return the part; within ``as_whole`` the whole tensor.

        Raises
        ------
        PartitionError : code other than that of its layer reads it while the model is called.
        """
        whole = vars(self).get("_matex_whole")
        if whole is not None:
            return self._maybe_autocast(whole())
        if _hidden.get():
            raise PartitionError(
                "a variable that is cut over ranks is read outside of its layer",
                field=self.path,
                expected="the layer that owns it, or an optimizer",
                found="other code of the model, which would take the part for the whole",
                remedy="give this variable no layout, or a layout of None for each dimension",
            )
        return super().value

    @property
    def shape(self) -> Any:
        """Return the shape of ``value``."""
        return tf.TensorShape(whole_shape(self)) if "_matex_whole" in vars(self) else super().shape

    def assign(self, value: Any) -> Any:
        """Set the part; where the whole is shown, to this rank's part of a whole value."""
        if vars(self).get("_matex_shown") is None:
            return super().assign(value)
        whole, part = tf.convert_to_tensor(value, self._dtype), part_of(self)
        with hidden_wholes([self]):
            super().assign(part.own(whole))  # type: ignore[union-attr]
        show_whole(self, whole)
        return whole

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return the whole values within ``as_whole``.

        Raises
        ------
        PartitionError : elsewhere, where this rank has a part alone; Keras's functions that save would write it.
        """
        if "_matex_whole" not in vars(self):
            raise PartitionError(
                "this rank has a part of a variable alone",
                field=self.path,
                expected="training.save(model, path), on all ranks",
                found="a conversion to a whole array, as model.save does it",
                remedy="call matex_data.training.save; or read the part as variable.value",
            )
        return np.asarray(self.numpy(), dtype)


def part_of(variable: Any) -> Part | None:
    """Return which part of a variable this rank holds; None: all of it."""
    found: Part | None = vars(variable).get("_matex_part") if hasattr(variable, "__dict__") else None
    return found


def whole_shape(variable: Any) -> tuple[int, ...]:
    """Return the shape of a variable, cut or not, on all ranks together."""
    return tuple((part_of(variable) or variable).shape)


def empty_whole(variable: Any) -> Array:
    """Return an array without values for the whole of a variable, cut or not."""
    return np.empty(whole_shape(variable), tf.as_dtype(variable.dtype).as_numpy_dtype)


def channels_of(variable: Any) -> list[Channel]:
    """Return the channels over whose ranks a variable is cut; none if this rank holds all of it."""
    part, found = part_of(variable), []
    while part is not None:
        found.append(part.channel)
        part = part.outer
    return found


def cut(variable: Any, part: Part) -> None:
    """Replace the values of a Keras variable by this rank's part of them."""
    hold(variable, part, part.own(variable.value.numpy()))


def hold(variable: Any, part: Part, own: Array) -> None:
    """Give a Keras variable the values of a part."""
    variable.__class__ = PartVariable
    object.__setattr__(variable, "_matex_part", part)
    keras_api.set_value(variable, np.ascontiguousarray(own))


def hold_alike(slot: Any, variable: Any) -> None:
    """Note that a slot of an optimizer has the form of a variable of which this rank holds a part."""
    slot.__class__ = PartVariable
    object.__setattr__(slot, "_matex_part", part_of(variable))


def slots(optimizer: Any, variables: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return the variables of an optimizer that belong to one of these variables, each with that.

    Keras names them after the paths of the variables. Those of another shape, such as counters, are left out.

    Raises
    ------
    PartitionError : a name fits several variables.
    """
    by_name: dict[str, list[Any]] = {}
    for variable in variables:
        by_name.setdefault(variable.path.replace("/", "_"), []).append(variable)
    found = []
    for slot in optimizer.variables:
        words = slot.name.split("_")
        prefixes = ("_".join(words[:n]) for n in range(len(words) - 1, 0, -1))
        prefix = next((prefix for prefix in prefixes if prefix in by_name), None)
        if prefix is None:
            continue
        if len(by_name[prefix]) > 1:
            raise PartitionError(
                "the state of an optimizer belongs to one of several variables",
                field=slot.path,
                expected="variables whose paths differ by more than slashes and underscores",
                found=[variable.path for variable in by_name[prefix]],
                remedy="give the layers other names",
            )
        found.append((slot, by_name[prefix][0]))
    return found


def join_variable(variable: Any) -> None:
    """Undo the latest ``cut`` of a variable on all ranks. *Collective* among the ranks that hold its sections."""
    part = part_of(variable)
    assert part is not None
    joined = _joined(part, keras_api.held_value(variable))
    if part.outer is not None:
        hold(variable, part.outer, joined)
        return
    variable.__class__ = keras.Variable
    object.__delattr__(variable, "_matex_part")
    keras_api.set_value(variable, joined)


def whole_at_root(variable: Any) -> Array | None:
    """Return the whole values of a variable on the first rank that holds a part of it, None on the others.

    *Collective* among the ranks that hold parts of it.
    """
    return whole_array_at_root(part_of(variable), keras_api.held_value(variable))


def whole_array_at_root(part: Part | None, own: Array) -> Array | None:
    """Return the whole of an array, of which each rank has such a part, as ``whole_at_root`` does. *Collective*."""
    whole: Array | None = _whole(part, own, _joined_at_root)
    return whole


def whole_on_all(variable: Any) -> Array:
    """Return the whole values of a variable on all ranks that hold parts of it. *Collective* among these."""
    whole: Array = _whole(part_of(variable), keras_api.held_value(variable), _joined)
    return whole


def _whole(part: Part | None, value: Array | None, join: Callable[[Part, Array], Array | None]) -> Any:
    while part is not None and value is not None:
        value, part = join(part, value), part.outer
    return value


def _joined_at_root(part: Part, value: Array) -> Array | None:
    stacks = [part.channel.host.gather_at_root(segment) for segment in segments(value.reshape(-1))]
    if part.channel.rank > 0:
        return None
    rows = np.concatenate([stack for stack in stacks if stack is not None], 1)
    return part.join([row.reshape(value.shape) for row in rows])


def _joined(part: Part, value: Array) -> Array:
    return part.join(list(part.channel.host.gather(value[None])))


def all_come(channel: Channel) -> bool:
    """Return whether all ranks call this, within ``LEAVE_SECONDS``. *Collective* if they do."""
    return poll(channel.host.comm.Ibarrier().Test, LEAVE_SECONDS)


def all_leave(channel: Channel, kind: type[BaseException] | None) -> bool:
    """Return whether all ranks leave a context, so that they can join parts. *Collective* if they do.

    Parameters
    ----------
    kind : class of the exception by which this rank leaves; None: there is none. Nearly every ``DataError``, and
        Ctrl-C, is raised on all ranks; an error of another class may be of one, and ends the job.
    """
    return kind is None or (issubclass(kind, DataError | KeyboardInterrupt) and all_come(channel))


def hiding_parts(hidden: bool = True) -> contextlib.AbstractContextManager[None]:
    """Return a context manager: reading a part raises an error in this block, or does not."""
    return setting(_hidden, hidden)


@contextlib.contextmanager
def as_whole(values: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Context manager: variables of which this rank holds parts have whole tensors as values.

    Parameters
    ----------
    values : variables, each with a function that returns its tensor whenever it is read.
    """
    variables = [variable for variable, _ in values]
    with hidden_wholes(variables):
        try:
            for variable, whole in values:
                object.__setattr__(variable, "_matex_whole", whole)
            yield
        finally:
            for variable in variables:
                vars(variable).pop("_matex_whole", None)


def show_whole(variable: Any, whole: Any) -> None:
    """Let a variable of which this rank holds a part have whole values, for code of the user outside of steps.

    Assigning whole values then sets the part. All ranks that hold parts show the whole, and hide it before a step.
    """
    object.__setattr__(variable, "_matex_shown", True)
    value = tf.convert_to_tensor(whole)
    object.__setattr__(variable, "_matex_whole", lambda: value)


def hide_wholes(variables: Sequence[Any]) -> list[tuple[Any, Callable[[], Any]]]:
    """Undo ``show_whole``; return the variables that were shown, with functions that return their whole values."""
    shown = [v for v in variables if vars(v).pop("_matex_shown", False)]
    return [(v, vars(v).pop("_matex_whole")) for v in shown]


@contextlib.contextmanager
def hidden_wholes(variables: Sequence[Any]) -> Iterator[None]:
    """Context manager: variables whose wholes are shown have their parts in this block."""
    shown = hide_wholes(variables)
    try:
        yield
    finally:
        for variable, whole in shown:
            show_whole(variable, whole())


def broadcast_in(channel: Channel, variables: list[Any], root: int = 0) -> None:
    """Broadcast the values of variables from rank ``root`` of a channel. *Collective*.

    Variables of which the ranks of this channel hold different parts keep them.

    Raises
    ------
    RuntimeError : on all ranks, if the ranks have different variables.
    """
    if channel.size == 1:
        return
    variables = [v for v in variables if channel not in channels_of(v)]
    shapes = [(tuple(variable.shape), str(variable.dtype)) for variable in variables]
    channel.check_same(f"broadcast {shapes} from rank {root}")
    sizes = [math.prod(variable.shape) * tf.as_dtype(variable.dtype).size for variable in variables]
    for bucket in plan_buckets(sizes, [np.dtype(np.uint8)] * len(sizes)):
        of_bucket = [variables[position] for position in bucket.positions]
        values = [np.ascontiguousarray((v if hasattr(v, "numpy") else v.value).numpy()) for v in of_bucket]
        packed = np.concatenate([value.reshape(-1).view(np.uint8) for value in values])
        channel.host.broadcast(packed, root)
        if channel.rank == root:
            continue
        parts = np.split(packed, np.cumsum([value.nbytes for value in values])[:-1])
        for variable, value, part in zip(of_bucket, values, parts, strict=True):
            variable.assign(part.view(value.dtype).reshape(variable.shape))
