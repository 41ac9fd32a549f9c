"""Dependence of a tensor on the samples of a batch: the lattice of the proof.

A tensor is compared with its counterparts that are computed from shards, which are any rows of the batch. A shape that
is None is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from matex_data.training.proof.sizes import ONE, ROWS, Size, product

Shape = tuple[Size, ...]
Values = tuple[Size | None, ...]


@dataclass(frozen=True)
class Reason:
    """Reason why something is not proven.

    Parameters
    ----------
    layer : scope of the operation, which names layers from the outermost to the innermost; or name of a class.
    operation : type of the operation, or name of a method or an attribute.
    why : what it does.
    """

    layer: str
    operation: str
    why: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.operation} {self.why}"


@dataclass(frozen=True)
class Independent:
    """Tensor that every shard has in common with the batch.

    Parameters
    ----------
    values : elements, for small tensors of integers; None for each that is unknown.
    """

    shape: Shape | None = None
    values: Values | None = None


@dataclass(frozen=True)
class RowCount:
    """Tensor that depends on the number of rows, but not on the samples: harmless in shapes alone.

    Parameters
    ----------
    values : elements, for small tensors of numbers; None for each that is unknown.
    """

    shape: Shape | None = None
    values: Values | None = None


@dataclass(frozen=True)
class PerSample:
    """Tensor whose slices along one axis each depend on one sample, and on nothing else of the batch.

    The axis has ``before * rows * after`` elements: those of sample ``i`` are at ``(b * rows + i) * after + a``. All
    other axes have sizes that the shards have in common with the batch.

    Parameters
    ----------
    axis : position of the axis, from 0.
    """

    axis: int
    shape: Shape
    before: Size = ONE
    after: Size = ONE

    @property
    def from_right(self) -> int:
        """Return the position of the axis, counted from the last one, which has 1."""
        return len(self.shape) - self.axis

    @property
    def layout(self) -> tuple[int, Size, Size]:
        """Return what has to be equal for two tensors to have their samples at the same positions when broadcast."""
        return self.from_right, self.before, self.after


@dataclass(frozen=True)
class Total:
    """Sum, or mean, over the rows of something that depends on one sample each.

    Parameters
    ----------
    mean : the sum is divided by the number of rows, so the rows' weighted mean over shards is that of the batch.
    reason : operation that sums, which is the reason if the total is used for something that is not linear in it.
    """

    shape: Shape | None
    mean: bool
    reason: Reason = field(compare=False)


@dataclass(frozen=True)
class Listed:
    """List of tensors (``TensorList``), all with the same dependence.

    Parameters
    ----------
    element : dependence of an element; None if no element was set.
    """

    element: State | None = None


@dataclass(frozen=True)
class Mixed:
    """Tensor of which nothing is proven, since it combines samples, or since an operation is not known."""

    reasons: tuple[Reason, ...]


State = Independent | RowCount | PerSample | Total | Listed | Mixed
NewName = Callable[[int], Size]
"""Function that returns the name of an axis by its position."""


def rows_axis(shape: Shape) -> int | None:
    """Return the axis whose size is a multiple of the number of rows; None if there is none, or more than one."""
    axes = [axis for axis, size in enumerate(shape) if size.has_rows]
    return axes[0] if len(axes) == 1 and shape[axes[0]] / ROWS is not None and not _squared(shape[axes[0]]) else None


def _squared(size: Size) -> bool:
    rest = size / ROWS
    return rest is not None and rest.has_rows


def constant_rows(shape: Shape) -> PerSample | None:
    """Return the dependence of a tensor of such a shape whose rows are all equal; None if no axis is that of rows."""
    axis = rows_axis(shape)
    after = None if axis is None else shape[axis] / ROWS
    return None if axis is None or after is None else PerSample(axis, shape, ONE, after)


def axis_size(state: PerSample) -> Size:
    """Return the size of the axis with the samples."""
    return product((state.before, ROWS, state.after))


def join(first: State, second: State, new: NewName, reason: Reason) -> State:
    """Return the dependence of a tensor that may be either of two.

    Parameters
    ----------
    new : names an axis whose sizes differ.
    reason : reason of a mixed result, if neither is mixed by itself.
    """
    if first == second:
        return first
    if isinstance(first, Mixed) or isinstance(second, Mixed):
        return first if isinstance(first, Mixed) else second
    if isinstance(first, Listed) and isinstance(second, Listed):
        if first.element is None or second.element is None:
            return Listed(_renamed(second.element if first.element is None else first.element, new, reason))
        return Listed(join(first.element, second.element, new, reason))
    if isinstance(first, PerSample) and isinstance(second, PerSample):
        shape = join_shapes(first.shape, second.shape, new, keep=first.axis)
        same = first.layout == second.layout and shape is not None
        return replace(first, shape=shape) if same else Mixed((reason,))  # type: ignore[arg-type]
    return _join_other(first, second, new, reason)


def _renamed(element: State | None, new: NewName, reason: Reason) -> State | None:
    """Return an element of a list with names of its own for its axes.

    A name in the body of a loop stands for the number of one step, but elements stay in a list for other steps.
    """
    if isinstance(element, Independent):
        return Independent(None)
    if isinstance(element, PerSample):
        if element.before.powers or element.after.powers:
            return Mixed((reason,))
        sizes = enumerate(element.shape)
        return replace(element, shape=tuple(s if at == element.axis or not s.powers else new(at) for at, s in sizes))
    return element


def _join_other(first: State, second: State, new: NewName, reason: Reason) -> State:
    kinds = {type(first), type(second)}
    if kinds - {Independent, RowCount, Total} or kinds == {RowCount, Total}:
        return Mixed((reason,))
    assert isinstance(first, Independent | RowCount | Total)
    assert isinstance(second, Independent | RowCount | Total)
    shape = join_shapes(first.shape, second.shape, new)
    if isinstance(first, Total) or isinstance(second, Total):
        mean = {state.mean for state in (first, second) if isinstance(state, Total)} == {True}
        same = isinstance(first, Total) and isinstance(second, Total) and first.mean == second.mean
        total = first if isinstance(first, Total) else second
        return replace(total, shape=shape) if mean or same else Mixed((reason,))
    return RowCount() if RowCount in kinds else Independent(shape)


def join_shapes(first: Shape | None, second: Shape | None, new: NewName, keep: int | None = None) -> Shape | None:
    """Return the shape of a tensor that has either of two; None if their ranks differ, or one is unknown."""
    if first is None or second is None or len(first) != len(second):
        return None
    sizes = zip(first, second, strict=True)
    return tuple(a if a == b or axis == keep else new(axis) for axis, (a, b) in enumerate(sizes))
