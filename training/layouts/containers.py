"""Functional models as chains of layers: who gets the output of whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras

from matex_data.training.keras_api import Functional


class Call(NamedTuple):
    """Call of a layer, or of another operation, in a functional model.

    Attributes
    ----------
    operation : the layer.
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
    calls : calls of the model.
    """

    owner: Any
    calls: list[Call]

    @classmethod
    def of(cls, functional: Any) -> Container:
        """Return a functional model as a container."""
        nodes = [node for _, group in sorted(functional._nodes_by_depth.items(), reverse=True) for node in group]
        calls = [(n.operation, map(id, n.input_tensors), map(id, n.outputs)) for n in nodes if not n.is_input]
        return cls.linked(functional, calls, map(id, functional.outputs))

    @classmethod
    def linked(
        cls, owner: Any, calls: Iterable[tuple[Any, Iterable[int], Iterable[int]]], outputs: Iterable[int]
    ) -> Container:
        """Return calls as a container.

        Parameters
        ----------
        owner : see above.
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
            Call(operation, tuple(maker.get(number, -1) for number in taken), tuple(users[i]))
            for i, (operation, taken, _) in enumerate(given)
        ]
        return cls(owner, linked)


def containers(layers: Sequence[Any]) -> list[Container]:
    """Return the functional models among layers, as far as they run as Keras made them."""
    found = [layer._functional if isinstance(layer, keras.Sequential) else layer for layer in layers]
    unique = {id(f): f for f in found if isinstance(f, Functional) and type(f).call is Functional.call}
    return [Container.of(functional) for functional in unique.values()]


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
