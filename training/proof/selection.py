"""Rules of operations that select elements: slices, splits, gathered elements, one-hot vectors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from matex_data.training.proof.axes import Independent, PerSample, Shape, State, axis_size
from matex_data.training.proof.rules import Node, rule, samples
from matex_data.training.proof.sizes import ONE, Size

SELECTS_ROWS = "selects rows by their position in the batch"

MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")


@dataclass(frozen=True)
class _Slicing:
    """Slicing of one axis, by the masks of ``tf.strided_slice``.

    Parameters
    ----------
    kind : "slice", "index", "new" or "ellipsis".
    at : position in ``begin``, ``end`` and ``strides``.
    """

    kind: str
    at: int = 0
    from_start: bool = True
    to_end: bool = True


def slicings(node: Node, count: int, rank: int) -> list[_Slicing]:
    """Return one slicing for each axis of the input, and one for each new axis, in order.

    Parameters
    ----------
    count : length of ``begin``.
    rank : number of axes of the input.
    """
    bits = {name: node.op.get_attr(name) for name in MASKS}
    out = []
    for at in range(count):
        is_set = {name: bool(mask >> at & 1) for name, mask in bits.items()}
        kind = "ellipsis" if is_set["ellipsis_mask"] else "new" if is_set["new_axis_mask"] else "slice"
        kind = "index" if kind == "slice" and is_set["shrink_axis_mask"] else kind
        out.append(_Slicing(kind, at, is_set["begin_mask"], is_set["end_mask"]))
    whole = [_Slicing("slice", -1)] * (rank - sum(s.kind in ("slice", "index") for s in out))
    where = next((i for i, s in enumerate(out) if s.kind == "ellipsis"), len(out))
    return out[:where] + whole + out[where + 1 :]


@rule("StridedSlice", sizes=(1, 2, 3))
def strided_slice(node: Node) -> list[State]:
    """Return the dependence of slices; the axis of the samples has to stay whole."""
    x = node.inputs[0]
    limits = node.inputs[1:]
    if samples(node) != [x] or not isinstance(x, PerSample):
        known = all(isinstance(state, Independent) for state in node.inputs)
        return [node.independent()] if known else node.mixed("selects by numbers that depend on rows")
    count = node.op.inputs[1].shape.num_elements()
    if count is None:
        return node.mixed("selects along axes that are not known")
    out: list[Size | None] = []
    old, axis = 0, -1
    for one in slicings(node, count, len(x.shape)):
        if one.kind == "new":
            out.append(ONE)
            continue
        whole = _is_whole(node, one, x.shape[old])
        if old == x.axis:
            if not whole:
                return node.mixed(SELECTS_ROWS)
            axis = len(out)
        elif not whole and any(_has_rows(state, one.at) for state in limits):
            return node.mixed("selects by the number of rows")
        if one.kind == "slice":
            out.append(x.shape[old] if whole else None)
        old += 1
    shape = tuple(node.new_axis(i) if size is None else size for i, size in enumerate(out))
    return [replace(x, axis=axis, shape=shape)]


def _is_whole(node: Node, one: _Slicing, size: Size) -> bool:
    """Return whether a slicing keeps all elements of an axis in their order."""
    if one.kind != "slice" or one.at < 0:
        return one.kind == "slice"
    begin, end, stride = (_value(node, position, one.at) for position in (1, 2, 3))
    return stride == ONE and (one.from_start or begin == Size(0)) and (one.to_end or end == size)


def _value(node: Node, position: int, at: int) -> Size | None:
    values = node.values(position)
    return None if values is None else values[at]


def _has_rows(state: State, at: int) -> bool:
    """Return whether an element of a small tensor may depend on the number of rows."""
    if isinstance(state, Independent):
        return False
    values: Any = getattr(state, "values", None)
    return values is None or values[at] is None or values[at].has_rows


@rule("Slice", sizes=(1, 2))
def slice_(node: Node) -> list[State]:
    """Return the dependence of a slice; the axis of the samples has to stay whole."""
    x, *limits = node.inputs
    if samples(node) != [x] or not isinstance(x, PerSample):
        known = all(isinstance(state, Independent) for state in node.inputs)
        return [node.independent()] if known else node.mixed("selects by numbers that depend on rows")
    if _value(node, 1, x.axis) != Size(0) or _value(node, 2, x.axis) not in (Size(-1), axis_size(x)):
        return node.mixed(SELECTS_ROWS)
    others = [axis for axis in range(len(x.shape)) if axis != x.axis]
    if any(_has_rows(state, axis) for state in limits for axis in others):
        return node.mixed("selects by the number of rows")
    shape = tuple(size if axis == x.axis else node.new_axis(axis) for axis, size in enumerate(x.shape))
    return [replace(x, shape=shape)]


@rule("Split")
def split(node: Node) -> list[State]:
    """Return the dependence of equal sections along an axis."""
    return _sections(node, node.inputs[1], 0)


@rule("SplitV")
def split_by_sizes(node: Node) -> list[State]:
    """Return the dependence of sections of given sizes along an axis."""
    return _sections(node, node.inputs[0], 2)


def _sections(node: Node, x: State, position: int) -> list[State]:
    if not samples(node):
        return [node.independent(i) for i in range(len(node.op.outputs))]
    axis = node.integers(position)
    if not isinstance(x, PerSample) or len(samples(node)) > 1 or axis is None or axis[0] % len(x.shape) == x.axis:
        return node.mixed("splits the batch")
    at = axis[0] % len(x.shape)
    shapes = [(*x.shape[:at], node.new_axis(at, i), *x.shape[at + 1 :]) for i in range(len(node.op.outputs))]
    return [replace(x, shape=shape) for shape in shapes]


@rule("GatherV2")
def gather(node: Node) -> list[State]:
    """Return the dependence of elements at positions along an axis."""
    axis = node.integers(2)
    if axis is None:
        return node.mixed("selects along an axis that is not known")
    return _gathered(node, node.inputs[0], node.inputs[1], axis[0], node.op.get_attr("batch_dims"))


@rule("Gather")
def gather_first(node: Node) -> list[State]:
    """Return the dependence of elements at positions along the first axis."""
    return _gathered(node, node.inputs[0], node.inputs[1], 0, 0)


@rule("ResourceGather")
def gather_of_variable(node: Node) -> list[State]:
    """Return the dependence of rows of a variable."""
    return _gathered(node, Independent(None), node.inputs[1], 0, node.op.get_attr("batch_dims"))


def _gathered(node: Node, table: State, indices: State, axis: int, batch_axes: int) -> list[State]:
    if isinstance(table, Independent) and isinstance(indices, Independent):
        return [node.independent()]
    rank = node.op.outputs[0].shape.rank
    if rank is None:
        return node.mixed("selects elements of a tensor of unknown rank")
    if isinstance(table, PerSample) and isinstance(indices, Independent):
        at = axis % len(table.shape)
        if at == table.axis:
            return node.mixed(SELECTS_ROWS)
        if batch_axes or indices.shape is None:
            return node.mixed("selects elements for each row, by a table")
        out = replace(table, axis=table.axis + (len(indices.shape) - 1) * (at < table.axis))
        shape = (*table.shape[:at], *indices.shape, *table.shape[at + 1 :])
        return [replace(out, shape=shape)]
    if isinstance(table, Independent) and isinstance(indices, PerSample):
        if batch_axes:
            return node.mixed("selects elements for each row, of a table")
        if axis < 0 and table.shape is None:
            return node.mixed("selects elements of a tensor of unknown rank")
        left = axis if axis >= 0 else axis % len(table.shape or ())
        return [_with_rows(node, indices, left + indices.axis, rank)]
    assert isinstance(table, PerSample)
    assert isinstance(indices, PerSample)
    at, batch_axes = axis % len(table.shape), batch_axes % len(indices.shape) if batch_axes < 0 else batch_axes
    aligned = (table.axis, table.before, table.after) == (indices.axis, indices.before, indices.after)
    if aligned and table.axis < batch_axes <= at:
        return [_with_rows(node, table, table.axis, rank)]
    return node.mixed("selects rows by values of rows")


def _with_rows(node: Node, like: PerSample, axis: int, rank: int) -> PerSample:
    """Return the dependence of an output with the samples along an axis, and sizes of TensorFlow elsewhere."""
    shape: Shape = tuple(axis_size(like) if i == axis else node.new_axis(i) for i in range(rank))
    return replace(like, axis=axis, shape=shape)


@rule("GatherNd")
def gather_nd(node: Node) -> list[State]:
    """Return the dependence of elements at positions along several axes of a table."""
    return _gathered_nd(node, node.inputs[0], node.inputs[1])


@rule("ResourceGatherNd")
def gather_nd_of_variable(node: Node) -> list[State]:
    """Return the dependence of elements of a variable."""
    return _gathered_nd(node, Independent(None), node.inputs[1])


def _gathered_nd(node: Node, table: State, indices: State) -> list[State]:
    if not samples(node):
        return [node.independent()]
    rank = node.op.outputs[0].shape.rank
    known = isinstance(table, Independent) and isinstance(indices, PerSample) and rank is not None
    if not known or not isinstance(indices, PerSample) or indices.from_right == 1 or rank is None:
        return node.mixed(SELECTS_ROWS)
    return [_with_rows(node, indices, indices.axis, rank)]


@rule("OneHot")
def one_hot(node: Node) -> list[State]:
    """Return the dependence of vectors that are 1 at one position."""
    x = node.inputs[0]
    if not samples(node):
        return [node.independent()]
    if samples(node) != [x] or not isinstance(x, PerSample):
        return node.mixed("has limits that depend on samples")
    axis = node.op.get_attr("axis") % (len(x.shape) + 1)
    shape = (*x.shape[:axis], node.new_axis(axis), *x.shape[axis:])
    return [replace(x, axis=x.axis + (axis <= x.axis), shape=shape)]


@rule("ReverseSequence")
def reverse_sequences(node: Node) -> list[State]:
    """Return the dependence of sequences that are reversed up to their lengths."""
    x, lengths = node.inputs
    if not samples(node):
        return [node.independent()]
    if not isinstance(x, PerSample) or node.op.get_attr("seq_dim") == x.axis:
        return node.mixed("reverses the order of rows")
    by_row = isinstance(lengths, PerSample) and node.op.get_attr("batch_dim") == x.axis
    same = isinstance(lengths, PerSample) and (lengths.before, lengths.after) == (x.before, x.after)
    constant = isinstance(lengths, Independent) and node.op.get_attr("batch_dim") != x.axis
    return [x] if (by_row and same) or constant else node.mixed("reverses rows by a table")
