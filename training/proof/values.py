"""Elements of small tensors of integers, as of shapes, which are computed in the graph."""

from __future__ import annotations

import itertools
import math

import tensorflow as tf

from matex_data.training.proof.axes import Independent, PerSample, RowCount, Total, Values
from matex_data.training.proof.rules import MOST_VALUES, Node, static_values, values_of
from matex_data.training.proof.selection import slicings
from matex_data.training.proof.sizes import ONE, Size, product

EXACT = (tf.int32, tf.int64, tf.float32, tf.float64)


@values_of("Const")
def constant(node: Node) -> Values | None:
    """Return the elements of a constant."""
    proto = node.op.get_attr("value")
    if math.prod(d.size for d in proto.tensor_shape.dim) > MOST_VALUES or not (
        node.op.outputs[0].dtype.is_integer or node.op.outputs[0].dtype.is_floating
    ):
        return None
    return static_values(tf.make_ndarray(proto))


@values_of("Shape", "ShapeN", "Size", "Rank")
def shape(node: Node) -> Values | None:
    """Return the sizes of the axes of a tensor, their product, or their number."""
    state = node.inputs[0]
    sizes = state.shape if isinstance(state, PerSample | Independent | Total) else None
    if sizes is None or len(node.inputs) > 1:
        return None
    if node.op.type == "Rank":
        return (Size(len(sizes)),)
    return (product(sizes),) if node.op.type == "Size" else sizes


@values_of("Identity", "Cast", "StopGradient", "Reshape", "ExpandDims", "Squeeze", "EnsureShape")
def same(node: Node) -> Values | None:
    """Return the elements of the first input; None after a cast to a type that cannot hold every number of rows."""
    return node.values(0) if node.op.outputs[0].dtype in EXACT else None


@values_of("Pack", "ConcatV2")
def joined(node: Node) -> Values | None:
    """Return the elements of tensors, one behind the other along the first axis."""
    concatenates = node.op.type == "ConcatV2"
    count = len(node.inputs) - concatenates
    vector = node.op.outputs[0].shape.rank == 1
    first = node.integers(-1) == (0,) or (vector and node.integers(-1) == (-1,))
    first = first if concatenates else node.op.get_attr("axis") == 0
    parts = [node.values(i) for i in range(count)]
    known = [values for values in parts if values is not None]
    return tuple(v for values in known for v in values) if first and len(known) == count else None


@values_of("StridedSlice")
def sliced(node: Node) -> Values | None:
    """Return the elements of a slice of a vector."""
    values = node.values(0)
    limits = [node.integers(i) for i in (1, 2, 3)]
    if values is None or node.op.inputs[0].shape.rank != 1 or any(x is None or len(x) != 1 for x in limits):
        return None
    (begin,), (end,), (stride,) = (x or (0,) for x in limits)
    (one, *others) = slicings(node, 1, 1)
    if others or one.kind not in ("slice", "index"):
        return None
    if one.kind == "index":
        return (values[begin],) if -len(values) <= begin < len(values) else None
    return values[slice(None if one.from_start else begin, None if one.to_end else end, stride)]


@values_of("Slice")
def section(node: Node) -> Values | None:
    """Return the elements of a section of a vector."""
    values, begin, size = node.values(0), node.integers(1), node.integers(2)
    if values is None or node.op.inputs[0].shape.rank != 1 or begin is None or size is None:
        return None
    return values[begin[0] :] if size[0] == -1 else values[begin[0] : begin[0] + size[0]]


@values_of("GatherV2")
def gathered(node: Node) -> Values | None:
    """Return elements of a vector."""
    values, positions = node.values(0), node.integers(1)
    if values is None or positions is None or node.op.inputs[0].shape.rank != 1 or node.op.get_attr("batch_dims"):
        return None
    return tuple(values[i] for i in positions) if all(0 <= i < len(values) for i in positions) else None


@values_of("ZerosLike", "OnesLike")
def filled(node: Node) -> Values | None:
    """Return zeros, or ones."""
    count = node.op.outputs[0].shape.num_elements()
    known = count is not None and count <= MOST_VALUES and node.op.outputs[0].dtype in EXACT
    return (Size(int(node.op.type == "OnesLike")),) * count if known and count is not None else None


@values_of("Prod", "Max", "Min", "Sum")
def reduced(node: Node) -> Values | None:
    """Return the product, the sum, or an extreme of the elements of a vector."""
    values = node.values(0)
    if values is None or node.op.inputs[0].shape.rank != 1 or node.integers(1) not in ((0,), (-1,)):
        return None
    if node.op.type == "Prod":
        return (product(v for v in values if v is not None),) if None not in values else (None,)
    integers = [v.integer for v in values if v is not None and v.integer is not None]
    if not integers or len(integers) < len(values):
        return values if len(values) == 1 else (None,)
    return (Size({"Max": max(integers), "Min": min(integers), "Sum": sum(integers)}[node.op.type]),)


@values_of("Mul", "FloorDiv", "RealDiv", "AddV2", "Add", "Sub", "Maximum", "Minimum", "FloorMod")
def arithmetic(node: Node) -> Values | None:
    """Return the results of an operation on two vectors, or a vector and a number."""
    first, second = node.values(0), node.values(1)
    if first is None or second is None or max(t.shape.rank or 0 for t in node.op.inputs) > 1:
        return None
    length = max(len(first), len(second))
    if {len(first), len(second)} - {1, length}:
        return None
    first, second = (v * length if len(v) == 1 else v for v in (first, second))
    return tuple(_result(node.op.type, a, b) for a, b in zip(first, second, strict=True))


def _result(kind: str, a: Size | None, b: Size | None) -> Size | None:
    if a is None or b is None:
        return None
    if kind == "Mul":
        return a * b
    if kind in ("FloorDiv", "RealDiv") and b != Size(0):
        return a / b if b != Size(0) else None
    if a.integer is not None and b.integer is not None:
        return _integer_result(kind, a.integer, b.integer)
    if a == b and kind in ("Maximum", "Minimum"):
        return a
    if kind in ("AddV2", "Add", "Sub") and b == Size(0):
        return a
    return ONE * b if kind in ("AddV2", "Add") and a == Size(0) else None


def _integer_result(kind: str, a: int, b: int) -> Size | None:
    if kind == "FloorMod":
        return Size(a % b) if b else None
    results = {"AddV2": a + b, "Add": a + b, "Sub": a - b, "Maximum": max(a, b), "Minimum": min(a, b)}
    return Size(results[kind]) if kind in results else None


@values_of("Range")
def counted(node: Node) -> Values | None:
    """Return the integers of a range."""
    start, limit, step = (node.integers(i) for i in range(3))
    if start is None or limit is None or step is None or not step[0]:
        return None
    numbers = range(start[0], limit[0], step[0])
    return tuple(Size(n) for n in numbers) if len(numbers) <= MOST_VALUES else None


@values_of("Fill")
def repeated(node: Node) -> Values | None:
    """Return the elements of a tensor of one value."""
    sizes, value = node.integers(0), node.values(1)
    if sizes is None or value is None or math.prod(sizes) > MOST_VALUES:
        return None
    return value * math.prod(sizes)


SECTIONS = ("Unpack", "Split", "SplitV")
"""Operations with more outputs than one whose elements are followed."""


def sections(node: Node) -> list[Values] | None:
    """Return the elements of sections of a vector."""
    position = {"Unpack": 0, "Split": 1, "SplitV": 0}[node.op.type]
    values, counts = node.values(position), [t.shape.num_elements() for t in node.op.outputs]
    if values is None or node.op.inputs[position].shape.rank != 1 or None in counts or sum(counts) != len(values):
        return None
    ends = list(itertools.accumulate(counts))
    return [values[end - count : end] for count, end in zip(counts, ends, strict=True)]


def evaluate(node: Node, values: Values, output: int = 0) -> Independent | RowCount:
    """Return the dependence of a small tensor with these elements."""
    shape = node.new_shape(output)
    rows = any(value is not None and value.has_rows for value in values)
    unknown = None in values and any(isinstance(state, RowCount) for state in node.inputs)
    if rows or unknown:
        return RowCount(shape, values)
    names = node.independent(output)
    filled = tuple(v if v is not None else (names.values[i] if names.values else None) for i, v in enumerate(values))
    return Independent(shape, filled)
