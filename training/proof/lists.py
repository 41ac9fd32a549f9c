"""Rules of lists of tensors, in which loops over time steps keep their inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from matex_data.training.proof.axes import Independent, Listed, Mixed, PerSample, State, join
from matex_data.training.proof.rules import Node, rule


@rule("TensorListReserve", "EmptyTensorList", sizes=(0,))
def reserve(node: Node) -> list[State]:
    """Return a list without elements; an element that is read before it is set is zero."""
    return [Listed()] if isinstance(node.inputs[1], Independent) else node.mixed("has a length that depends on rows")


@rule("TensorListFromTensor", sizes=(1,))
def from_tensor(node: Node) -> list[State]:
    """Return the list of the slices along the first axis."""
    x = node.inputs[0]
    if isinstance(x, Independent):
        return [Listed(Independent(None if x.shape is None else x.shape[1:]))]
    if not isinstance(x, PerSample) or x.axis == 0:
        return node.mixed("loops over rows")
    return [Listed(replace(x, axis=x.axis - 1, shape=x.shape[1:]))]


@rule("TensorListSetItem", "TensorListPushBack", lists=True)
def set_item(node: Node) -> list[State]:
    """Return the list with another element."""
    lists, *index, item = node.inputs
    if not isinstance(lists, Listed) or not all(isinstance(state, Independent) for state in index):
        return node.mixed("puts an element at a position that depends on rows")
    return [lists if lists.element == item else Listed(_joined(node, lists.element, item))]


def _joined(node: Node, old: State | None, new: State) -> State:
    reason = node.reason("puts elements into one list of which only some are per sample")
    return new if old is None else join(old, new, node.new_axis, reason)


@rule("TensorListGetItem", lists=True, sizes=(2,))
def get_item(node: Node) -> list[State]:
    """Return an element of a list."""
    lists, index = node.inputs[:2]
    if not isinstance(lists, Listed) or not isinstance(index, Independent):
        return node.mixed("selects an element of a list by a number that depends on rows")
    return _element(node, lists, lambda state: state)


@rule("TensorListStack", lists=True, sizes=(1,))
def stack(node: Node) -> list[State]:
    """Return the elements of a list, stacked along a new first axis."""
    (lists, _) = node.inputs
    if not isinstance(lists, Listed):
        return node.mixed("is no list")

    def stacked(state: State) -> State:
        if isinstance(state, PerSample):
            return replace(state, axis=state.axis + 1, shape=(node.new_axis(0), *state.shape))
        return node.independent()

    return _element(node, lists, stacked)


def _element(node: Node, lists: Listed, change: Callable[[State], State]) -> list[State]:
    element = lists.element
    if isinstance(element, Mixed):
        return [element]
    if isinstance(element, PerSample | Independent):
        return [change(element)]
    return node.mixed("reads an element that was not set")


@rule("TensorListLength", lists=True)
def length(node: Node) -> list[State]:
    """Return the length of a list, which shards have in common."""
    return [node.independent()]
