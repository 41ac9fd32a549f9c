"""Rules of operations that change the shape of a tensor, or make one of a given shape.

Reshaping keeps the order of the elements, row-major. Let the samples be along an axis of ``before * rows * after``
elements, and let ``outer`` and ``inner`` be the products of the sizes to the left and to the right of it. The samples
are still along one axis afterwards if that axis is a multiple of the number of rows, and ``outer * before`` and
``after * inner`` are multiples of what is to its left and to its right.
"""

from __future__ import annotations

from dataclasses import replace

from matex_data.training.proof.axes import (
    Independent,
    PerSample,
    RowCount,
    Shape,
    State,
    Total,
    axis_size,
    constant_rows,
    rows_axis,
)
from matex_data.training.proof.rules import Node, rule, samples
from matex_data.training.proof.sizes import ONE, Size, product

SHAPE_OF_ROWS = "has a shape that depends on the number of rows in another way than by one axis"


def reshaped(x: PerSample, sizes: tuple[Size | None, ...]) -> PerSample | None:
    """Return the dependence after reshaping to the given sizes, of which one may be None; None if it is not proven.

    Examples
    --------
    >>> from matex_data.training.proof.sizes import ROWS
    >>> x = PerSample(0, (ROWS, Size(6), Size(4)))
    >>> reshaped(x, (ROWS * Size(6), Size(4))).after
    Size(number=6, powers=())
    >>> reshaped(x, (None, Size(48))) is None  # two rows become one
    True
    """
    known = product(size for size in sizes if size is not None)
    total = product(x.shape)
    rest = total / known
    if sizes.count(None) > 1 or rest is None or (None not in sizes and rest != ONE):
        return None
    shape = tuple(rest if size is None else size for size in sizes)
    axis = rows_axis(shape)
    if axis is None:
        return None
    before = product(x.shape[: x.axis]) * x.before / product(shape[:axis])
    after = x.after * product(x.shape[x.axis + 1 :]) / product(shape[axis + 1 :])
    if before is None or after is None:
        return None
    out = PerSample(axis, shape, before, after)
    return out if axis_size(out) == shape[axis] else None


@rule("Reshape", sizes=(1,), linear=True)
def reshape(node: Node) -> list[State]:
    """Return the dependence of a reshaped tensor."""
    x, sizes = node.inputs[0], node.values(1)
    if isinstance(x, PerSample) and sizes is not None and all(size is not None for size in sizes):
        wildcard = [None if size is None or size.integer == -1 else size for size in sizes]
        out = reshaped(x, tuple(wildcard)) if all(s is None or s.is_axis for s in wildcard) else None
        if out is not None:
            return [out]
    if isinstance(x, PerSample):
        return node.mixed("changes the shape in a way that may combine rows")
    if not isinstance(node.inputs[1], Independent):
        return node.mixed("lets the number of rows enter the shape of other values")
    if isinstance(x, Total):
        return [replace(x, shape=node.new_shape())]
    return [Independent(_sizes_of(node, sizes, x))]


def _sizes_of(node: Node, sizes: tuple[Size | None, ...] | None, x: State) -> Shape | None:
    """Return the shape of a reshaped tensor that all shards have in common, with names for unknown sizes."""
    rank = node.op.outputs[0].shape.rank
    if sizes is None or rank != len(sizes):
        return node.new_shape()
    known = [size if size is not None and size.is_axis else None for size in sizes]
    if known.count(None) == 1 and isinstance(x, Independent) and x.shape is not None:
        rest = product(x.shape) / product(size for size in known if size is not None)
        known = [rest if size is None else size for size in known]
    return tuple(node.new_axis(at) if size is None else size for at, size in enumerate(known))


@rule("Transpose")
def transpose(node: Node) -> list[State]:
    """Return the dependence of a tensor with permuted axes."""
    x, order = node.inputs[0], node.integers(1)
    if not isinstance(x, PerSample):
        return [node.independent()] if not samples(node) else node.mixed("has an order that depends on samples")
    if order is None:
        return node.mixed("permutes axes in an order that is not known")
    order = tuple(axis % len(x.shape) for axis in order)
    return [replace(x, axis=order.index(x.axis), shape=tuple(x.shape[axis] for axis in order))]


@rule("ExpandDims", linear=True)
def expand(node: Node) -> list[State]:
    """Return the dependence of a tensor with one more axis."""
    x, axes = node.inputs[0], node.integers(1)
    if isinstance(x, Total):
        return [replace(x, shape=node.new_shape())]
    if not isinstance(x, PerSample):
        return [node.independent()]
    if axes is None:
        return node.mixed("adds an axis at a position that is not known")
    axis = axes[0] % (len(x.shape) + 1)
    return [replace(x, axis=x.axis + (axis <= x.axis), shape=(*x.shape[:axis], ONE, *x.shape[axis:]))]


@rule("Squeeze", linear=True)
def squeeze(node: Node) -> list[State]:
    """Return the dependence of a tensor without axes of one element."""
    x = node.inputs[0]
    if isinstance(x, Total):
        return [replace(x, shape=node.new_shape())]
    if not isinstance(x, PerSample):
        return [node.independent()]
    rank = len(x.shape)
    axes = {axis % rank for axis in node.attribute("squeeze_dims")}
    if not axes or x.axis in axes:
        return node.mixed("removes the axis of the samples if there is one row")
    shape = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
    return [replace(x, axis=x.axis - sum(axis < x.axis for axis in axes), shape=shape)]


@rule("Fill", sizes=(0,))
def fill(node: Node) -> list[State]:
    """Return the dependence of a tensor of one value."""
    return constant(node, 0)


def constant(node: Node, position: int) -> list[State]:
    """Return the dependence of a tensor whose rows are equal, or equally distributed, by the input with its shape."""
    sizes = node.values(position)
    if isinstance(node.inputs[position], Independent):
        if sizes is None or any(size is None or not size.is_axis for size in sizes):
            return [node.independent()]
        return [replace(node.independent(), shape=tuple(size for size in sizes if size is not None))]
    known = () if sizes is None else tuple(size for size in sizes if size is not None and size.is_axis)
    rows = constant_rows(known) if sizes is not None and len(known) == len(sizes) else None
    return node.mixed(SHAPE_OF_ROWS) if rows is None else [rows]


@rule("BroadcastTo", sizes=(1,))
def broadcast_to(node: Node) -> list[State]:
    """Return the dependence of a tensor that is repeated along axes of one element."""
    x, sizes = node.inputs[0], node.values(1)
    if not isinstance(node.inputs[1], Independent | RowCount):
        return node.mixed("has a shape that depends on samples")
    if isinstance(x, Independent) and isinstance(node.inputs[1], Independent):
        return [node.independent()]
    shape = x.shape if isinstance(x, Independent | PerSample) else None
    if sizes is None or shape is None or None in sizes:
        return node.mixed("has a shape that is not known")
    target = tuple(size for size in sizes if size is not None)
    out = constant_rows(target) if all(size.is_axis for size in target) else None
    if out is None or isinstance(x, RowCount | Total):
        return node.mixed(SHAPE_OF_ROWS)
    if isinstance(x, PerSample):
        aligned = x.from_right == out.from_right and axis_size(x) == axis_size(out)
        return [replace(x, axis=out.axis, shape=target)] if aligned else node.mixed("repeats rows along another axis")
    aligned = len(shape) < out.from_right or shape[-out.from_right] == ONE
    return [out] if aligned else node.mixed("has a fixed number of rows")


@rule("Tile", sizes=(1,))
def tile(node: Node) -> list[State]:
    """Return the dependence of a tensor that is repeated along its axes."""
    x, times = node.inputs[0], node.values(1)
    if isinstance(x, Independent) and isinstance(node.inputs[1], Independent):
        return [node.independent()]
    shape = x.shape if isinstance(x, Independent | PerSample) else None
    if times is None or shape is None or any(n is None or not n.is_axis for n in times):
        return node.mixed("repeats a tensor by numbers that are not known")
    factors = [n for n in times if n is not None]
    target = tuple(size * n for size, n in zip(shape, factors, strict=True))
    axis = rows_axis(target)
    if axis is None:
        return node.mixed(SHAPE_OF_ROWS)
    if isinstance(x, PerSample):
        return [replace(x, shape=target, before=x.before * factors[x.axis])]
    return [constant_rows(target) or x] if shape[axis] == ONE else node.mixed("repeats a tensor of several rows")


@rule("ConcatV2")
def concatenate(node: Node) -> list[State]:
    """Return the dependence of tensors, one behind the other along an axis."""
    rows = samples(node)
    if not rows:
        return [node.independent()]
    axis, first = node.integers(-1), rows[0]
    if axis is None or len(rows) < len(node.inputs) - 1:
        return node.mixed("combines rows with a tensor that has a fixed number of rows")
    if axis[0] % len(first.shape) == first.axis:
        return node.mixed("puts rows behind each other")
    if any(state.layout != first.layout for state in rows):
        return node.mixed("combines rows: its inputs have the samples along different axes")
    at = axis[0] % len(first.shape)
    total = [state.shape[at].integer for state in rows]
    size = node.new_axis(at) if None in total else Size(sum(n for n in total if n is not None))
    return [replace(first, shape=(*first.shape[:at], size, *first.shape[at + 1 :]))]


@rule("Pack")
def stack(node: Node) -> list[State]:
    """Return the dependence of tensors of one shape, stacked along a new axis."""
    rows = samples(node)
    if not rows:
        return [node.independent()]
    first = rows[0]
    if len(rows) < len(node.inputs):
        return node.mixed("combines rows with a tensor that has a fixed number of rows")
    if any(state.layout != first.layout for state in rows):
        return node.mixed("combines rows: its inputs have the samples along different axes")
    axis = node.attribute("axis") % (len(first.shape) + 1)
    shape = (*first.shape[:axis], Size(len(rows)), *first.shape[axis:])
    return [replace(first, axis=first.axis + (axis <= first.axis), shape=shape)]


@rule("Unpack")
def unstack(node: Node) -> list[State]:
    """Return the dependence of the tensors along an axis."""
    x = node.inputs[0]
    if not isinstance(x, PerSample):
        return [node.independent(i) for i in range(len(node.op.outputs))]
    axis = node.attribute("axis") % len(x.shape)
    if axis == x.axis:
        return node.mixed("takes rows apart")
    shape = x.shape[:axis] + x.shape[axis + 1 :]
    return [replace(x, axis=x.axis - (axis < x.axis), shape=shape) for _ in node.op.outputs]


@rule("Pad", "PadV2", "MirrorPad")
def pad(node: Node) -> list[State]:
    """Return the dependence of a tensor with elements added at the ends of axes."""
    x, widths = node.inputs[0], node.values(1)
    if not samples(node):
        return [node.independent()]
    if not isinstance(x, PerSample) or len(samples(node)) > 1:
        return node.mixed("pads by values that depend on samples")
    if widths is None or [None if n is None else n.integer for n in widths[2 * x.axis : 2 * x.axis + 2]] != [0, 0]:
        return node.mixed("adds rows")
    return [replace(x, shape=tuple(s if i == x.axis else node.new_axis(i) for i, s in enumerate(x.shape)))]
