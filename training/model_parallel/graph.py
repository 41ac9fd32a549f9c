"""Graphs of models: one list of calls of layers, with the tensors that each takes and returns; and chains of calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras

from matex_data.errors import PartitionError
from matex_data.training.keras_api import Functional, operation_fn

_NESTED_ARGUMENTS = {"training", "mask"}
"""Arguments with which a nested model may be called, beside its inputs, to be taken apart."""


@dataclass(frozen=True)
class TensorNumber:
    """Number of a tensor, in place of the symbolic tensor among the arguments of a call."""

    number: int


@dataclass(frozen=True, eq=False)
class LayerCall:
    """Call of a layer, or of an operation of ``keras.ops``.

    Attributes
    ----------
    args, kwargs : its arguments, with a ``TensorNumber`` for each tensor.
    inputs, outputs : numbers of the tensors that it takes and returns.
    names : name of the operation, and of the nested models around it.
    """

    operation: Any
    args: Any
    kwargs: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    names: tuple[str, ...]

    def run(self, tensors: dict[int, Any], training: bool) -> None:
        """Call the operation, and add its results to the tensors, by number."""

        def value(leaf: Any) -> Any:
            return tensors[leaf.number] if isinstance(leaf, TensorNumber) else leaf

        args, kwargs = keras.tree.map_structure(value, (self.args, self.kwargs))
        results = operation_fn(self.operation, training=training)(*args, **kwargs)
        tensors.update(zip(self.outputs, keras.tree.flatten(results), strict=True))


@dataclass(frozen=True)
class ModelGraph:
    """Graph of a model.

    Attributes
    ----------
    functional : functional model that Keras runs; of ``Sequential``, the one within it.
    calls : in an order in which they can run.
    inputs, outputs : numbers of the tensors that the model takes and returns, flat.
    tensors : Keras's symbolic tensors, by number.
    """

    functional: Any
    calls: tuple[LayerCall, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    tensors: Sequence[Any]


def model_graph(model: Any) -> ModelGraph:
    """Return the graph of a built model; nested functional models are taken apart.

    Raises
    ------
    PartitionError : the model is neither functional nor ``Sequential``, or its class overrides ``call``.

    Examples
    --------
    >>> import keras
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="a"), keras.layers.ReLU(name="b")])
    >>> [call.names for call in model_graph(model).calls]
    [('a',), ('b',)]
    """
    functional = _functional(model)
    if functional is None:
        raise _not_a_graph(model)
    tensors = list(functional.inputs)
    known = {id(tensor): number for number, tensor in enumerate(tensors)}
    inputs = tuple(range(len(tensors)))
    calls = tuple(_calls(functional, known, tensors, ()))
    return ModelGraph(functional, calls, inputs, tuple(known[id(x)] for x in functional.outputs), tensors)


def check_graph(model: Any) -> None:
    """Raise ``PartitionError`` unless the class of a model, built or not, runs a graph of layers."""
    if not _runs_graph(model):
        raise _not_a_graph(model)


def _runs_graph(model: Any) -> bool:
    return any(isinstance(model, kind) and type(model).call is kind.call for kind in (keras.Sequential, Functional))


def _not_a_graph(model: Any) -> PartitionError:
    return PartitionError(
        f"the model {model.name} cannot be cut into stages: what it computes is code, not a graph of layers",
        expected="a functional model (keras.Model(inputs, outputs)), or a Sequential one with an Input",
        found=f"{type(model).__name__}, {'with a call of its own' if model.built else 'not built'}",
        remedy="build the model from inputs and outputs, or train it without stages",
    )


def _functional(model: Any) -> Any:
    """Return the functional model that Keras runs for a model; None if it is not built, or its ``call`` is another."""
    return getattr(model, "_functional", model) if _runs_graph(model) else None


def _nodes(functional: Any) -> list[Any]:
    """Return the calls of a functional model in Keras's order."""
    return [n for _, nodes in sorted(functional._nodes_by_depth.items(), reverse=True) for n in nodes if not n.is_input]


def _calls(functional: Any, known: dict[int, int], tensors: list[Any], around: tuple[str, ...]) -> Iterator[LayerCall]:
    """Yield the calls of a functional model; add its tensors to those of all, and their numbers to ``known``, by id.

    Parameters
    ----------
    around : names of the models around this one.
    """

    def numbered(leaf: Any) -> Any:
        return TensorNumber(known[id(leaf)]) if isinstance(leaf, keras.KerasTensor) else leaf

    for node in _nodes(functional):
        if any(id(tensor) not in known for tensor in node.input_tensors):
            continue
        names = (node.operation.name, *around)
        inner = _nested(node)
        if inner is not None:
            given = zip(inner.inputs, keras.tree.flatten(node.arguments.args[0]), strict=True)
            within = {id(own): known[id(tensor)] for own, tensor in given}
            yield from _calls(inner, within, tensors, names)
            known |= {id(x): within[id(own)] for x, own in zip(node.outputs, inner.outputs, strict=True)}
            continue
        args, kwargs = keras.tree.map_structure(numbered, (node.arguments.args, node.arguments.kwargs))
        taken = tuple(dict.fromkeys(known[id(tensor)] for tensor in node.input_tensors))
        outputs = tuple(range(len(tensors), len(tensors) + len(node.outputs)))
        tensors += node.outputs
        known |= {id(tensor): number for tensor, number in zip(node.outputs, outputs, strict=True)}
        yield LayerCall(node.operation, args, kwargs, taken, outputs, names)


def _nested(node: Any) -> Any:
    """Return the functional model that a node calls, if its calls can stand in place of it; otherwise None.

    A model that converts its inputs, to another dtype or rank, remains one call.
    """
    inner = _functional(node.operation)
    arguments = node.arguments
    if inner is None or len(arguments.args) != 1 or not set(arguments.kwargs) <= _NESTED_ARGUMENTS:
        return None
    given = keras.tree.flatten(arguments.args[0])
    if arguments.kwargs.get("mask") is not None or len(given) != len(inner.inputs):
        return None
    if any(_kind(a) != _kind(b) for a, b in zip(given, inner.inputs, strict=True)):
        return None
    return inner if inner.activity_regularizer is None and node.operation.activity_regularizer is None else None


def _kind(tensor: Any) -> tuple[str, int] | None:
    """Return dtype and rank of a symbolic tensor; None for anything else."""
    return (tensor.dtype, len(tensor.shape)) if isinstance(tensor, keras.KerasTensor) else None


class Link(NamedTuple):
    """Call of a layer, or of another operation, in a functional model.

    Attributes
    ----------
    sources : positions of the calls whose outputs it takes; -1 for an input of the model.
    users : positions of the calls that take its outputs; -1 if they are outputs of the model.
    """

    operation: Any
    sources: tuple[int, ...]
    users: tuple[int, ...]


class Container(NamedTuple):
    """Functional model, or stage of one, and the calls that it consists of, in the order in which they run.

    Attributes
    ----------
    owner : Keras's functional model, that within a ``Sequential``; or the layer that runs a stage.
    """

    owner: Any
    calls: list[Link]

    @classmethod
    def linked(
        cls, owner: Any, calls: Iterable[tuple[Any, Iterable[int], Iterable[int]]], outputs: Iterable[int]
    ) -> Container:
        """Return calls as a container.

        Parameters
        ----------
        calls : operations, each with the numbers of the tensors that it takes and returns.
        outputs : numbers of the tensors that leave the container.
        """
        given = [(operation, tuple(taken), tuple(made)) for operation, taken, made in calls]
        maker = {number: i for i, (_, _, made) in enumerate(given) for number in made}
        users: list[list[int]] = [[] for _ in given]
        uses = [(number, i) for i, (_, taken, _) in enumerate(given) for number in taken]
        for number, user in [*uses, *((number, -1) for number in outputs)]:
            if number in maker:
                users[maker[number]].append(user)
        linked = [
            Link(operation, tuple(maker.get(number, -1) for number in taken), tuple(users[i]))
            for i, (operation, taken, _) in enumerate(given)
        ]
        return cls(owner, linked)


def containers(layers: Sequence[Any]) -> list[Container]:
    """Return the functional models among layers, as far as they run as Keras made them."""
    found = []
    for functional in {id(f): f for f in map(_functional, layers) if f is not None}.values():
        calls = [(n.operation, map(id, n.input_tensors), map(id, n.outputs)) for n in _nodes(functional)]
        found.append(Container.linked(functional, calls, map(id, functional.outputs)))
    return found


def called_once(found: Sequence[Container]) -> set[int]:
    """Return the ids of the layers that all of these models together call once."""
    counts = Counter(id(call.operation) for container in found for call in container.calls)
    return {identity for identity, count in counts.items() if count == 1}


def chain(container: Container, position: int) -> Iterator[int]:
    """Yield the positions behind a call, as long as each output goes to a single call."""
    while True:
        users = container.calls[position].users
        if len(users) != 1 or users[0] < 0 or len(container.calls[users[0]].sources) != 1:
            return
        position = users[0]
        yield position
