"""What a step decides by variables alone is known before it: terms that act in certain steps are checked in these."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import problems
from tests.support.ranks import Pool, Pools

BATCH = 12


def _new(kinds: Any) -> list[int]:
    """Return the steps, from 0, in which a step of these kinds decides in a new way."""
    import tensorflow as tf

    from matex_data.training.checking.decisions import Decisions

    count, flag = tf.Variable(0), tf.Variable(False)

    @tf.function
    def step(x: Any) -> Any:
        if "counts" in kinds:
            count.assign_add(1)
        chosen = {
            "tenth": lambda: tf.cond(count % 10 == 7, lambda: tf.reduce_sum(x), lambda: 0.0),
            "where": lambda: tf.where(count > 20, 1.0, 0.0),
            "cases": lambda: tf.switch_case(count // 15, [lambda: 1.0, lambda: 2.0]),
            "rows": lambda: tf.cond(tf.reduce_sum(x) + tf.cast(count, tf.float32) > 5, lambda: 1.0, lambda: 2.0),
            "own": lambda: tf.cond(flag, lambda: 1.0, lambda: 2.0),
        }
        return [chosen[kind]() for kind in kinds if kind in chosen]

    traced = step.get_concrete_function(tf.TensorSpec([None]))
    inner = {id(outer): inner for outer, inner in traced.graph.captures}
    own = [traced.inputs[0], *(inner[id(v.handle)] for v in (flag,) if id(v.handle) in inner)]
    decisions, found = Decisions(traced.graph, own, [count, flag]), []
    for i in range(30):
        if decisions.new():
            found.append(i)
            decisions.note()
        assert count.numpy() == i
        count.assign_add(1)
        flag.assign(i == 3)
    return found


@pytest.mark.parametrize(
    ("kinds", "steps"),
    [
        (["tenth"], [0, 7]),
        (["counts", "tenth"], [0, 6]),
        (["where"], [0, 21]),
        (["cases"], [0, 15]),
        (["tenth", "where"], [0, 7, 21]),
        (["rows"], []),
        (["own"], []),
        ([], []),
    ],
    ids=str,
)
def test_steps_that_decide_in_a_new_way(kinds: list[str], steps: list[int]) -> None:
    assert _new(kinds) == steps


def _fit(comm: Any, kind: str, distributed: bool) -> Any:
    import keras
    import tensorflow as tf
    from keras import ops

    from matex_data import training

    class Own(keras.Sequential):  # type: ignore[misc]
        def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
            step, spread = self.optimizer.iterations, ops.var(y_pred, axis=0)
            terms = {
                "tenth": lambda: tf.cond(step % 10 == 5, lambda: tf.reduce_sum(spread), lambda: 0.0),
                "later": lambda: tf.where(step >= 26, tf.reduce_sum(spread), 0.0),
            }
            return ops.mean(ops.square(ops.one_hot(y, 3) - y_pred)) + terms[kind]()

    keras.utils.set_random_seed(1)
    model = Own([keras.Input((problems.FEATURES,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1))
    arrays = problems.table(8 * BATCH)
    if distributed:
        training.fit(model, problems.shard(arrays, BATCH, comm.rank, comm.size), epochs=4, comm=comm, verbose=0)
    else:
        problems.one_process(model, arrays, BATCH, 4)
    return problems.weights(model)


@pytest.mark.rank_counts(3, slow=(1, 2))
@pytest.mark.parametrize("kind", ["tenth", "later"])
def test_a_term_that_acts_in_certain_steps_is_that_of_one_process(ranks: Pools, pool: Pool, kind: str) -> None:
    expected, *_ = ranks(1).run(_fit, kind, False)
    problems.assert_same_weights(pool.run(_fit, kind, True, timeout=120), expected)
