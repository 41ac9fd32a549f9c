"""Models whose weights are cut over ranks train as in one process."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.support.ranks import Pools
from tests.training.layouts import models


def _optimizer(name):
    return keras.optimizers.Adam(0.01) if name == "adam" else keras.optimizers.SGD(0.1, momentum=0.9)


def _train(comm, name, optimizer, model_ranks=1, deferred=True, epochs=2, **options):
    """Train on the global batches; return the weights by path, the history and the shapes held here."""
    import contextlib

    import tensorflow as tf

    from matex_data import training
    from matex_data.training.partition.parts import whole_on_all

    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    mesh = training.Mesh(model=model_ranks, comm=comm)
    layouts = mesh.layout_map(auto=name not in models.LAYOUTS)
    if model_ranks > 1:
        for key, axes in models.LAYOUTS.get(name, {}).items():
            layouts[key] = axes
    with training.deferred(layouts) if deferred else contextlib.nullcontext():
        model = getattr(models, name)()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(_optimizer(optimizer), loss, metrics=["accuracy"], jit_compile=False)
    x, y = models.arrays(name)
    rows = slice(mesh.data.rank * len(x) // 2 // mesh.data.size, (mesh.data.rank + 1) * len(x) // 2 // mesh.data.size)
    batches = [(x[:8][rows], y[:8][rows]), (x[8:][rows], y[8:][rows])]
    data = tf.data.Dataset.from_tensor_slices(tuple(np.stack(c) for c in zip(*batches, strict=True)))
    history = training.fit(model, data, epochs=epochs, mesh=mesh, verbose=0, **options)
    shapes = {v.path: tuple(v.shape) for v in model.variables}
    held = sum(int(np.prod(v.shape)) for v in model.optimizer.variables)
    return {v.path: whole_on_all(v) for v in model.variables}, history.history, shapes, held


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize(
    ("name", "optimizer", "tolerance"),
    [("mlp", "sgd", 1e-6), ("convolutions", "sgd", 1e-6), ("transformer", "adam", 1e-5)],
)
def test_weights_are_those_of_one_process(
    ranks: Pools, name: str, optimizer: str, tolerance: float, deferred: bool
) -> None:
    ((expected, history, _, held_whole),) = ranks(1).run(_train, name, optimizer)
    for weights, own_history, shapes, held in ranks(2).run(_train, name, optimizer, 2, deferred):
        assert weights.keys() == expected.keys()
        for path, value in expected.items():
            np.testing.assert_allclose(weights[path], value, atol=tolerance, rtol=0, err_msg=path)
        np.testing.assert_allclose(own_history["loss"], history["loss"], rtol=1e-5)
        assert own_history["accuracy"] == pytest.approx(history["accuracy"])
        cut = [path for path, shape in shapes.items() if shape != expected[path].shape]
        assert bool(cut) is deferred  # a model that was built whole is whole again
        assert (held < 0.8 * held_whole) is deferred
