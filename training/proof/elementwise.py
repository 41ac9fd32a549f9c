"""Rules of operations that compute each element from those at the same position of their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from matex_data.training.proof.axes import (
    Independent,
    PerSample,
    RowCount,
    Shape,
    State,
    Total,
    axis_size,
)
from matex_data.training.proof.rules import Node, rule, samples, unaligned
from matex_data.training.proof.sizes import ONE, ROWS, Size

UNARY = (
    "Abs", "Acos", "Acosh", "Angle", "Asin", "Asinh", "Atan", "Atanh", "BesselI0", "BesselI0e", "BesselI1",
    "BesselI1e", "BesselJ0", "BesselJ1", "BesselK0", "BesselK0e", "BesselK1", "BesselK1e", "BesselY0",
    "BesselY1", "Ceil", "CheckNumerics", "CheckNumericsV2", "ComplexAbs", "Conj", "Cos", "Cosh", "Digamma",
    "Elu", "Erf", "Erfc", "Erfinv", "Exp", "Expm1", "FakeQuantWithMinMaxArgs", "Floor", "Imag", "Inv",
    "Invert", "IsFinite", "IsInf", "IsNan", "Lgamma", "Log", "Log1p", "LogicalNot", "Ndtri", "OnesLike",
    "PopulationCount", "Real", "Reciprocal", "Relu", "Relu6", "Rint", "Round", "Rsqrt", "Selu", "Sigmoid",
    "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Square", "Tan", "Tanh", "ZerosLike", "Bucketize",
    "LeakyRelu", "StringLower", "StringUpper", "StringStrip", "StringToHashBucket", "StringToHashBucketFast",
    "StringToHashBucketStrong", "StringToNumber", "AsString", "StaticRegexReplace", "StaticRegexFullMatch",
    "Dawsn", "Expint", "FresnelCos", "FresnelSin", "Spence",
)  # fmt: skip
BINARY = (
    "Atan2", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Complex", "Equal", "FloorDiv", "FloorMod", "Greater",
    "GreaterEqual", "Igamma", "Igammac", "LeftShift", "Less", "LessEqual", "LogicalAnd", "LogicalOr",
    "Maximum", "Minimum", "Mod", "MulNoNan", "NextAfter", "NotEqual", "Polygamma", "Pow", "RightShift",
    "SquaredDifference", "TruncateDiv", "TruncateMod", "Xdivy", "Xlog1py", "Xlogy", "Zeta",
    "ApproximateEqual", "Betainc", "ClipByValue", "SelectV2",
)  # fmt: skip
GRADIENTS = (
    "EluGrad", "InvGrad", "LeakyReluGrad", "ReciprocalGrad", "Relu6Grad", "ReluGrad", "RsqrtGrad", "SeluGrad",
    "SigmoidGrad", "SoftplusGrad", "SoftsignGrad", "SqrtGrad", "TanhGrad",
)  # fmt: skip


def broadcast(node: Node, positions: Sequence[int] | None = None, output: int = 0) -> list[State]:
    """Return the dependence of the result of an operation that broadcasts its inputs against each other.

    Samples have to be along one axis, counted from the right. A tensor that all shards have in common must not have
    more than one element along that axis: it would depend on the position in the batch.

    Parameters
    ----------
    positions : inputs to broadcast; all by default.
    """
    states = [node.inputs[i] for i in (range(len(node.inputs)) if positions is None else positions)]
    rows = [state for state in states if isinstance(state, PerSample)]
    if not rows:
        return [node.independent(output)]
    if len({state.layout for state in rows}) > 1:
        return unaligned(node)
    first = rows[0]
    shapes: list[Shape] = []
    for state in states:
        shape = state.shape if isinstance(state, Independent | PerSample) else None
        if shape is None:
            return node.mixed("has an input of unknown rank")
        if isinstance(state, Independent) and len(shape) >= first.from_right and shape[-first.from_right] != ONE:
            return node.mixed("combines rows with a tensor that has a fixed number of rows, by their position")
        shapes.append(shape)
    rank = max(len(shape) for shape in shapes)
    axis = rank - first.from_right
    sizes = [
        axis_size(first) if at == axis else _broadcast_size([s[at - rank] for s in shapes if len(s) >= rank - at])
        for at in range(rank)
    ]
    shape = tuple(node.new_axis(at, output) if size is None else size for at, size in enumerate(sizes))
    return [PerSample(axis, shape, first.before, first.after)]


def _broadcast_size(sizes: list[Size]) -> Size | None:
    """Return the size of an axis of the result; None if it is not known which of the sizes are 1."""
    other = set(sizes) - {ONE}
    return next(iter(other), ONE) if len(other) <= 1 else None


@rule(*UNARY, *BINARY, *GRADIENTS)
def elementwise(node: Node) -> list[State]:
    """Return the dependence of a result whose elements depend on those at the same position."""
    return broadcast(node)


@rule("Identity", "StopGradient", "Cast", "Neg", "EnsureShape", "PreventGradient", "PlaceholderWithDefault",
      "Snapshot", "IdentityN", linear=True, lists=True)  # fmt: skip
def unchanged(node: Node) -> list[State]:
    """Return the dependences of the inputs."""
    kept = node.op.type in ("Identity", "StopGradient", "IdentityN", "EnsureShape", "Snapshot")
    if isinstance(node.inputs[0], Total) and not kept and not node.op.outputs[0].dtype.is_floating:
        return node.uses(node.inputs[0])
    return [
        state if kept or not isinstance(state, Independent) else node.independent(i)
        for i, state in enumerate(node.inputs[: len(node.op.outputs)])
    ]


@rule("Add", "AddV2", "Sub", "AddN", linear=True)
def add(node: Node) -> list[State]:
    """Return the dependence of a sum; the sum of means over rows is such a mean."""
    totals = [state for state in node.inputs if isinstance(state, Total)]
    if not totals:
        return broadcast(node)
    constants = [i for i, state in enumerate(node.inputs) if isinstance(state, Independent)]
    added = any(set(node.integers(i) or (1,)) != {0} for i in constants)
    if samples(node) or len({state.mean for state in totals}) > 1 or (added and not totals[0].mean):
        return node.uses(totals[0])
    return [replace(totals[0], shape=node.new_shape())]


@rule("Mul", linear=True)
def multiply(node: Node) -> list[State]:
    """Return the dependence of a product, which is linear in a sum over rows if the other factor is independent."""
    totals = [state for state in node.inputs if isinstance(state, Total)]
    if not totals:
        return broadcast(node)
    if len(totals) > 1 or samples(node):
        return node.uses(totals[0])
    return [replace(totals[0], shape=node.new_shape())]


@rule("RealDiv", "Div", "DivNoNan", linear=True, sizes=(1,))
def divide(node: Node) -> list[State]:
    """Return the dependence of a quotient; a sum over rows, divided by a multiple of their number, is a mean."""
    numerator, divisor = node.inputs
    if isinstance(numerator, Total) and not node.op.outputs[0].dtype.is_floating:
        return node.uses(numerator)
    if isinstance(divisor, RowCount):
        per_row = [None if value is None else value / ROWS for value in divisor.values or (None,)]
        multiple = all(value is not None and not value.has_rows for value in per_row)
        if isinstance(numerator, Total) and not numerator.mean and multiple:
            return [replace(numerator, shape=node.new_shape(), mean=True)]
        return node.mixed("lets the number of rows enter the values")
    if isinstance(divisor, Total):
        return node.uses(divisor)
    return [replace(numerator, shape=node.new_shape())] if isinstance(numerator, Total) else broadcast(node)


@rule("Select")
def select(node: Node) -> list[State]:
    """Return the dependence of a choice between two tensors, by a condition of their shape, or for all of them."""
    ranks = {len(s.shape) if isinstance(s, Independent | PerSample) and s.shape is not None else None
             for s in node.inputs}  # fmt: skip
    condition = node.inputs[0]
    scalar = isinstance(condition, Independent) and condition.shape == ()
    return broadcast(node) if len(ranks) == 1 or scalar else node.mixed("broadcasts its condition from the left")


@rule("LookupTableFind", "LookupTableFindV2")
def look_up(node: Node) -> list[State]:
    """Return the dependence of the values of keys in a table."""
    if not isinstance(node.inputs[2], Independent):
        return node.mixed("has a default that depends on samples")
    return broadcast(node, [1])


@rule("FakeQuantWithMinMaxVars", "FakeQuantWithMinMaxVarsPerChannel")
def quantize(node: Node) -> list[State]:
    """Return the dependence of values that are rounded within limits: scalars, or one for each of the last axis."""
    x = node.inputs[0]
    if not isinstance(x, PerSample) or len(samples(node)) > 1 or x.from_right == 1:
        return node.mixed("has limits that depend on samples") if samples(node) else [node.independent()]
    return [x]


@rule("BiasAdd")
def add_bias(node: Node) -> list[State]:
    """Return the dependence of a sum with one number for each channel."""
    x, bias = node.inputs
    if isinstance(bias, PerSample):
        return node.mixed("combines rows: its bias is per sample")
    if not isinstance(x, PerSample):
        return [node.independent()]
    channel = 1 if node.attribute("data_format").startswith("NC") else len(x.shape) - 1
    return node.mixed("has one bias for each row") if x.axis == channel else [replace(x)]
