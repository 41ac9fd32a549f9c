"""Random numbers of a shard are those that the whole batch draws for its rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support import problems
from tests.support.ranks import Pool


def _drawn(start: int, stop: int, total: int) -> list[Any]:
    import keras
    import tensorflow as tf

    from matex_data.training.checking.draws import draws_for_rows

    generator = keras.random.SeedGenerator(1)

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def draw(x: Any) -> Any:
        rows = tf.shape(x)[0]
        return (
            tf.random.uniform((rows, 3)),
            keras.random.uniform((2 * rows, 3), seed=generator),
            tf.random.normal(tf.shape(tf.concat([x, x, x], 0))),
            tf.nn.dropout(tf.concat([tf.ones_like(x), tf.ones_like(x)], 0), 0.5),
            tf.random.uniform((12, 2)),
            tf.random.uniform((rows + 1,)),
            keras.random.normal((rows, 3), seed=1),
            tf.random.stateless_uniform((rows, 3), (1, 2)),
        )

    with draws_for_rows((start, stop), total) as any_drawn:
        found = [numbers.numpy() for numbers in draw(np.zeros((stop - start, 3), np.float32))]
        assert any_drawn()
    return found


def test_several_rows_of_each_sample_lie_in_blocks() -> None:
    whole, shard = _drawn(0, 6, 6), _drawn(2, 4, 6)
    rows = np.arange(2, 4)
    np.testing.assert_array_equal(shard[0], whole[0][rows])
    np.testing.assert_array_equal(shard[1], whole[1][[*rows, *rows + 6]])
    np.testing.assert_array_equal(shard[2], whole[2][[*rows, *rows + 6, *rows + 12]])
    np.testing.assert_array_equal(shard[3], whole[3][[*rows, *rows + 6]])
    np.testing.assert_array_equal(shard[4], whole[4])  # twice the rows of the batch by chance: the size is fixed
    assert shard[5].shape == (3,) and whole[5].shape == (7,)
    for fixed in (6, 7):  # a rank draws what its first rows would get
        np.testing.assert_array_equal(shard[fixed], whole[fixed][:2])


def test_a_shard_without_rows_draws_none() -> None:
    empty = _drawn(6, 6, 6)
    assert [len(numbers) for numbers in empty] == [0, 0, 0, 0, 12, 1, 0, 0]


def _dropped(comm: Any, eager: bool, compiled: bool) -> Any:
    """Return what a layer draws in a step of ``fit``, and what dropout leaves in a call of the script afterwards."""
    import keras

    from matex_data import training

    class Drawing(keras.layers.Dropout):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.drawn = self.add_weight(shape=(3,), dtype="int32", initializer="zeros", trainable=False)

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.drawn.assign(keras.random.randint((3,), 0, 2**30, seed=self.seed_generator))
            return super().call(x, training=training)

    if compiled:
        import tensorflow as tf

        Drawing.call = tf.function(Drawing.call)
    keras.utils.set_random_seed(comm.rank)
    layer = Drawing(0.5)
    model = keras.Sequential([keras.Input((problems.FEATURES,)), layer, keras.layers.Dense(3)])
    model.compile("sgd", "mse", run_eagerly=eager)
    x, _ = problems.table(8)
    data = problems.shard((x, x[:, :3]), 4, comm.rank, comm.size)
    training.fit(model, data, comm=comm, verbose=0, verify="never")
    return layer.drawn.numpy(), model(x, training=True).numpy()


@pytest.mark.rank_counts(2)
@pytest.mark.parametrize(("eager", "compiled"), [(False, False), (True, False), (False, True)])
def test_random_layers_differ_between_ranks_in_steps_alone(pool: Pool, eager: bool, compiled: bool) -> None:
    (first, dropped), (second, also) = pool.run(_dropped, eager, compiled)
    assert not np.any(first == second)
    np.testing.assert_array_equal(dropped, also)
