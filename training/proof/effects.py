"""Rules of operations with effects: variables, and random numbers."""

from __future__ import annotations

from dataclasses import replace

from matex_data.training.proof.axes import Independent, PerSample, State
from matex_data.training.proof.rules import Node, rule, samples
from matex_data.training.proof.shapes import constant

ASSIGNMENTS = (
    "AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "ResourceScatterUpdate",
    "ResourceScatterAdd", "ResourceScatterSub", "ResourceStridedSliceAssign",
)  # fmt: skip


@rule("VarHandleOp", "ReadVariableOp", "VariableShape", "VarIsInitializedOp", "HashTableV2", "LookupTableSizeV2")
def read(node: Node) -> list[State]:
    """Return the dependence of a variable: shards have it in common, since no rule lets samples be written."""
    return [node.independent()]


def write(node: Node) -> list[State]:
    """Return no output; what is written has to be the same for all shards."""
    if all(isinstance(state, Independent) for state in node.inputs):
        return [node.independent(i) for i in range(len(node.op.outputs))]
    return node.effect("writes to a variable what depends on the batch")


SILENT = ("NoOp", "Assert", "PrintV2")
"""Operations without outputs, which change nothing; an assertion that fails ends the run."""

DRAWS = (
    "RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal",
    "StatelessRandomUniform", "StatelessRandomUniformV2",
    "StatelessRandomUniformIntV2", "StatelessRandomUniformFullInt", "StatelessRandomUniformFullIntV2",
    "StatelessRandomNormal", "StatelessRandomNormalV2", "StatelessTruncatedNormal",
    "StatelessTruncatedNormalV2", "StatelessRandomUniformInt",
)  # fmt: skip


@rule(*DRAWS, sizes=(0,))
def draw(node: Node) -> list[State]:
    """Return the dependence of random numbers: of each row its own, if the shape has an axis of rows."""
    if samples(node):
        return node.mixed("draws numbers by parameters that depend on samples")
    out = constant(node, 0)
    node.draws = isinstance(out[0], PerSample)
    return node.mixed("draws numbers that all rows have in common") if isinstance(out[0], Independent) else out


@rule("StatelessRandomGammaV3", "StatelessRandomGammaV2", "RandomGamma", "StatelessRandomBinomial",
      "StatelessRandomPoisson", sizes=(0,))  # fmt: skip
def draw_by_parameters(node: Node) -> list[State]:
    """Return the dependence of random numbers of distributions whose parameters are the same for all."""
    parameters = node.inputs[-2:] if node.op.type == "StatelessRandomBinomial" else node.inputs[-1:]
    scalars = all(isinstance(state, Independent) and state.shape == () for state in parameters)
    return draw(node) if scalars else node.mixed("draws numbers by parameters that depend on rows")


@rule("StatelessMultinomial", "Multinomial")
def draw_classes(node: Node) -> list[State]:
    """Return the dependence of classes that are drawn for each row of probabilities."""
    x = node.inputs[0]
    if samples(node) != [x] or not isinstance(x, PerSample) or x.axis:
        return node.mixed("draws numbers that all rows have in common")
    node.draws = True
    return [replace(x, shape=(x.shape[0], node.new_axis(1)))]
