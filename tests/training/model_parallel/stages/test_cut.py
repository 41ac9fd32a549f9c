"""Graphs of models and their cuts compute what Keras computes."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from matex_data.errors import PartitionError
from matex_data.training.model_parallel.graph import LayerCall, ModelGraph, model_graph
from matex_data.training.model_parallel.stages.cut import cut_after, cut_by_cost, estimated_costs, stage_plans
from tests.training.model_parallel.models import MODELS, chain, nested


def _inputs(model: Any) -> list[Any]:
    random = np.random.default_rng(0)
    return [random.normal(size=(5, *x.shape[1:])).astype("float32") for x in model.inputs]


def _outputs(graph: ModelGraph, ends: list[int], inputs: list[Any]) -> list[Any]:
    """Run the stages one after the other; each gets what the one before sends, and inputs of the model."""
    given = dict(zip(graph.inputs, map(keras.ops.convert_to_tensor, inputs), strict=True))
    sent: dict[int, Any] = {}
    tensors: dict[int, Any] = {}
    for plan in stage_plans(graph, ends):
        assert tuple(sent) == plan.receives
        tensors = {number: given[number] for number in plan.inputs} | sent
        for call in plan.calls:
            call.run(tensors, training=False)
        sent = {number: tensors[number] for number in plan.sends}
    return [tensors[number] for number in graph.outputs]


@pytest.mark.parametrize("name", MODELS)
def test_stages_compute_what_the_model_computes(name: str) -> None:
    model = MODELS[name]()
    graph, inputs = model_graph(model), _inputs(model)
    expected = keras.tree.flatten(model(dict(zip(("a", "b"), inputs, strict=True)) if name == "several" else inputs[0]))
    for cuts in itertools.combinations(range(1, len(graph.calls)), 2):
        found = _outputs(graph, [*cuts, len(graph.calls)], inputs)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_nested_models_are_taken_apart() -> None:
    names = [call.names for call in model_graph(nested()).calls]
    assert names[:3] == [("before",), ("inmost", "inner", "block"), ("inside", "block")]


def _graph(count: int) -> ModelGraph:
    """Return a chain of calls whose tensors have one element."""
    calls = tuple(LayerCall(None, (), {}, (i,), (i + 1,), (f"layer{i}",)) for i in range(count))
    return ModelGraph(None, calls, (0,), (count,), [keras.KerasTensor((None, 1))] * (count + 1))


@given(costs=st.lists(st.integers(0, 50), min_size=1, max_size=9), stages=st.integers(1, 4))
def test_the_largest_stage_is_nearly_as_small_as_can_be(costs: list[int], stages: int) -> None:
    if len(costs) < stages:
        with pytest.raises(PartitionError):
            cut_by_cost(_graph(len(costs)), costs, stages)
        return

    def largest(ends: tuple[int, ...]) -> int:
        return max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *ends, len(costs))))

    ends = cut_by_cost(_graph(len(costs)), costs, stages)
    assert len({0, *ends}) == stages + 1
    best = min(map(largest, itertools.combinations(range(1, len(costs)), stages - 1)))
    assert largest(tuple(ends[:-1])) <= best * 1.05 + 1e-6


def test_among_equal_cuts_the_one_that_sends_less_is_chosen() -> None:
    layers = [keras.layers.Dense(64, name="a"), keras.layers.Dense(2, name="b"), keras.layers.Dense(64, name="c")]
    graph = model_graph(keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(64, name="d")]))
    assert cut_by_cost(graph, [0, 1, 0, 1], 2) == [2, 4]
    assert cut_by_cost(graph, [1, 0, 0, 1], 2) == [2, 4]


def test_costs_follow_the_multiplications() -> None:
    image = keras.Input((8, 8, 3))
    y = keras.layers.Conv2D(4, 3, padding="same", use_bias=False)(image)
    text = keras.Input((10, 5))
    z = keras.layers.LSTM(6, use_bias=False)(text)
    (convolution,) = estimated_costs(model_graph(keras.Model(image, y)))
    (recurrence,) = estimated_costs(model_graph(keras.Model(text, z)))
    assert convolution == 32 * 8 * 8 * 4 + 8 * 8 * (3 * 3 * 3 * 4)
    assert recurrence == 32 * 6 + 10 * (5 + 6) * 24


def test_attention_costs_more_where_sequences_are_longer() -> None:
    def attention(length: int) -> float:
        x = keras.Input((length, 16))
        y = keras.layers.MultiHeadAttention(2, 8)(x, x)
        (cost,) = estimated_costs(model_graph(keras.Model(x, y)))
        return cost

    assert attention(64) - 2 * attention(32) == 2 * (64 * 64 - 2 * 32 * 32) * 16  # products of queries, keys and values


def test_a_normalization_costs_as_much_as_four_activations() -> None:
    layers = [keras.Input((8, 8, 3)), keras.layers.BatchNormalization(), keras.layers.ReLU()]
    normalization, activation = estimated_costs(model_graph(keras.Sequential(layers)))
    assert normalization == 4 * activation


def test_a_cut_follows_a_layer_or_a_nested_model() -> None:
    graph = model_graph(nested())
    (end, _) = cut_after(graph, ["block"], 2)
    assert graph.calls[end].names == ("middle",)
    assert cut_after(graph, ["middle", "before"], 3) == [1, end + 1, len(graph.calls)]


@pytest.mark.parametrize(
    ("names", "stages", "message"),
    [
        (["dense9"], 2, "no \\['dense9'\\]"),
        (["dense0"], 3, "expected: 2 names"),
        (["dense0", "dense0"], 3, "a stage would be empty"),
        (["head"], 2, "a stage would be empty"),
    ],
)
def test_wrong_names_are_errors(names: list[str], stages: int, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        cut_after(model_graph(chain()), names, stages)


def test_a_model_that_is_code_is_an_error() -> None:
    class Own(keras.Model):  # type: ignore[misc]  # Keras has no types
        def call(self, x: Any) -> Any:
            return x

    with pytest.raises(PartitionError, match="expected: a functional model"):
        model_graph(Own())
