"""Rules of operations that reduce, sort, or accumulate along axes."""

from __future__ import annotations

from dataclasses import replace

from matex_data.training.proof.axes import Independent, PerSample, Shape, State, Total
from matex_data.training.proof.rules import Node, rule, samples
from matex_data.training.proof.sizes import ONE

REDUCTIONS = {
    "Sum": "sums", "Mean": "averages", "Prod": "multiplies", "Max": "takes the largest of", "Min": "takes the least of",
    "All": "combines", "Any": "combines", "EuclideanNorm": "takes the norm of",
}  # fmt: skip


@rule(*REDUCTIONS, linear=True)
def reduce(node: Node) -> list[State]:
    """Return the dependence of a reduction along axes; a sum or mean along that of the samples is a total."""
    x = node.inputs[0]
    if not isinstance(node.inputs[1], Independent):
        return node.mixed("reduces along axes that depend on samples")
    if isinstance(x, Independent):
        return [node.independent()]
    why = f"{REDUCTIONS[node.op.type]} rows"
    linear = node.op.type in ("Sum", "Mean")
    if isinstance(x, Total):
        return [replace(x, shape=node.new_shape())] if linear else node.uses(x)
    assert isinstance(x, PerSample)
    axes = _axes(node, 1, len(x.shape))
    if axes is None:
        return node.mixed("reduces along axes that are not known")
    if x.axis in axes:
        linear = node.op.type == "Sum" or (linear and node.op.outputs[0].dtype.is_floating)
        return [Total(node.new_shape(), node.op.type == "Mean", node.reason(why))] if linear else node.mixed(why)
    keep = bool(node.attribute("keep_dims"))
    shape = tuple(ONE if i in axes else size for i, size in enumerate(x.shape) if keep or i not in axes)
    return [replace(x, axis=x.axis if keep else x.axis - sum(axis < x.axis for axis in axes), shape=shape)]


@rule("ArgMax", "ArgMin")
def select_extreme(node: Node) -> list[State]:
    """Return the dependence of the position of the largest or least element along an axis."""
    x = node.inputs[0]
    axes = _axes(node, 1, len(x.shape)) if isinstance(x, PerSample) else None
    if not isinstance(x, PerSample):
        return [node.independent()] if not samples(node) else node.mixed("has an axis that depends on samples")
    if axes is None or x.axis in axes:
        return node.mixed("compares rows")
    (axis,) = axes
    return [replace(x, axis=x.axis - (axis < x.axis), shape=_without(x.shape, axis))]


def _without(shape: Shape, axis: int) -> Shape:
    return shape[:axis] + shape[axis + 1 :]


def _axes(node: Node, position: int, rank: int) -> set[int] | None:
    """Return axes, each from 0; None if they are not known."""
    axes = node.integers(position)
    return None if axes is None else {axis % rank for axis in axes if rank}


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2", "Reverse")
def along_axes(node: Node) -> list[State]:
    """Return the dependence of a result of the same shape that mixes elements along the given axes alone."""
    x = node.inputs[0]
    if not isinstance(x, PerSample):
        return [node.independent()] if not samples(node) else node.mixed("has an axis that depends on samples")
    axes = _axes(node, 1, len(x.shape))
    known = axes is not None and x.axis not in axes and node.op.type != "Reverse"
    return [x] if known else node.mixed("combines rows, or depends on their order")


@rule("Roll")
def roll(node: Node) -> list[State]:
    """Return the dependence of a tensor that is shifted along axes."""
    x = node.inputs[0]
    if not isinstance(x, PerSample):
        return [node.independent()] if not samples(node) else node.mixed("has shifts that depend on samples")
    axes = _axes(node, 2, len(x.shape))
    known = axes is not None and x.axis not in axes and isinstance(node.inputs[1], Independent)
    return [x] if known else node.mixed("shifts rows, so it depends on their order")


@rule("Softmax", "LogSoftmax")
def along_last_axis(node: Node) -> list[State]:
    """Return the dependence of a result of the same shape that mixes elements along the last axis alone."""
    x = node.inputs[0]
    return [x] if not isinstance(x, PerSample) or x.from_right > 1 else node.mixed("normalizes over rows")


@rule("TopKV2", "TopK")
def top_k(node: Node) -> list[State]:
    """Return the dependence of the largest elements along the last axis, and of their positions."""
    x = node.inputs[0]
    if not isinstance(x, PerSample):
        return [node.independent(0), node.independent(1)]
    if x.from_right == 1 or samples(node) != [x]:
        return node.mixed("sorts rows")
    return [replace(x, shape=(*x.shape[:-1], node.new_axis(len(x.shape) - 1, i))) for i in (0, 1)]


@rule("InTopKV2", "InTopK")
def in_top_k(node: Node) -> list[State]:
    """Return the dependence of whether the class of each row is among its largest elements."""
    x, classes = node.inputs[:2]
    both = isinstance(x, PerSample) and isinstance(classes, PerSample) and isinstance(node.inputs[2], Independent)
    if not both or x.axis or classes.axis or x.layout[1:] != classes.layout[1:]:  # type: ignore[union-attr]
        return [node.independent()] if not samples(node) else node.mixed("combines rows")
    return [classes]


@rule("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits")
def cross_entropy(node: Node) -> list[State]:
    """Return the dependence of the loss of each row, and of its gradient with respect to the logits."""
    logits, labels = node.inputs
    if not isinstance(logits, PerSample) or not isinstance(labels, PerSample):
        rows = samples(node)
        return node.mixed("combines rows with a table") if rows else [node.independent(0), node.independent(1)]
    if logits.axis or labels.axis or logits.layout[1:] != labels.layout[1:]:
        return node.mixed("combines rows: its inputs have the samples along different axes")
    return [replace(logits, shape=logits.shape[:1]), logits]


@rule("DenseBincount")
def count(node: Node) -> list[State]:
    """Return the dependence of how often each integer occurs in each row."""
    x, size, weights = node.inputs
    if not samples(node):
        return [node.independent()]
    shaped = isinstance(x, PerSample) and len(x.shape) == 2 and not x.axis and isinstance(size, Independent)
    own = weights == x or (isinstance(weights, PerSample) and isinstance(x, PerSample) and weights.layout == x.layout)
    empty = isinstance(weights, Independent) and weights.shape is not None and weights.shape[0].integer == 0
    if not shaped or not (own or empty):
        return node.mixed("counts over rows")
    assert isinstance(x, PerSample)
    return [replace(x, shape=(x.shape[0], node.new_axis(1)))]
