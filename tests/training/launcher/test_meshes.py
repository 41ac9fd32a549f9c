"""``matex run --model`` and ``keras.distribution`` on scripts that know nothing of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.launch import run_script
from tests.support.ranks import Pools

LAUNCHER = "from matex_data.training.launcher.run import main; main()"
SCRIPTS = Path(__file__).parent / "scripts"


def _meshes(comm):
    """Return the errors of device meshes that do not fit two ranks."""
    import keras

    from matex_data.errors import PartitionError
    from matex_data.training.comm.channel import open_channel
    from matex_data.training.launcher.meshes import mesh_of

    found = []
    for shape, axes in (((1, 1, 2), ("batch", "other", "model")), ((1, 1), ("batch", "model"))):
        devices = [f"cpu:{i}" for i in range(int(np.prod(shape)))]
        layouts = keras.distribution.LayoutMap(keras.distribution.DeviceMesh(shape, axes, devices))
        with pytest.raises(PartitionError) as error:
            mesh_of(keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch"), open_channel(comm))
        found.append(str(error.value))
    return found


def test_device_meshes_that_do_not_fit_the_ranks(ranks: Pools) -> None:
    for texts in ranks(2).run(_meshes):
        assert all(text.startswith("this device mesh does not fit the ranks") for text in texts)


def _result(done):
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line[7:])


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(2, ("--model", "2"), marks=pytest.mark.slow),  # layouts/test_layouts.py has its weights
        pytest.param(4, ("--model", "2"), marks=pytest.mark.slow),
        pytest.param(4, ("--model", "2", "--shard-optimizer"), marks=pytest.mark.slow),
    ],
)
def test_a_transformer_has_the_losses_of_one_process(tmp_path: Path, ranks: int, options: tuple[str, ...]) -> None:
    for name in ("one", "cut"):
        (tmp_path / name).mkdir()
    one = _result(run_script(0, SCRIPTS / "transformer.py", str(tmp_path / "one"), timeout=180))
    script = str(SCRIPTS / "transformer.py")
    cut = _result(run_script(ranks, LAUNCHER, *options, script, str(tmp_path / "cut"), timeout=180))
    np.testing.assert_allclose(cut["loss"], one["loss"], rtol=1e-5)
    assert cut["val"] == pytest.approx(one["val"])
    assert cut["after"] == pytest.approx(one["after"], rel=1e-4)
    assert max(cut["held"]) < 0.75 * one["held"][0]


DISTRIBUTED = """
import keras, numpy as np
keras.utils.set_random_seed(2)
mesh = keras.distribution.DeviceMesh((1, 2), ("batch", "model"), keras.distribution.list_devices())
layouts = keras.distribution.LayoutMap(mesh)
layouts[".*up/kernel"] = (None, "model")
layouts[".*down/kernel"] = ("model", None)
keras.distribution.set_distribution(keras.distribution.{kind})
up, down = keras.layers.Dense(8, "relu", name="up"), keras.layers.Dense(2, name="down")
model = keras.Sequential([keras.Input((4,)), up, down])
model.compile("sgd", "mse")
held = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: print("HELD", model.count_params(), flush=True))
{train}
"""


OWNED = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(2)
model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])  # built by fit
model.compile("adam", "mse")
x, y = np.random.default_rng(0).normal(size=(2, 16, 4)).astype("float32")
held = []
count = keras.callbacks.LambdaCallback(
    on_epoch_end=lambda *_: held.append(sum(v.numpy().size for v in model.optimizer.variables)))
history = model.fit(x, y[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=[count])
for _ in range(2):  # a loop of its own
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y[:, :1]))
    model.optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
import json
print("RESULT", json.dumps({"losses": history.history["loss"] + [float(loss)], "held": held[-1]}))
"""


def test_the_state_of_optimizers_is_cut_in_fit_and_whole_in_a_loop_that_says_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(OWNED)
    one = _result(run_script(0, script, timeout=180))
    done = run_script(2, LAUNCHER, "--shard-optimizer", str(script), timeout=180)
    cut = _result(done)
    np.testing.assert_allclose(cut["losses"], one["losses"], rtol=1e-5)
    assert cut["held"] < 0.6 * one["held"]
    assert done.stderr.count("keeps the whole state of its optimizer on every rank") == 1


@pytest.mark.parametrize(
    ("kind", "train", "expected"),
    [
        (
            "ModelParallel(layout_map=layouts)",
            "model.fit(np.ones((8, 4)), np.ones((8, 2)), callbacks=[held])",
            "HELD 30",
        ),
        (
            "ModelParallel(layout_map=layouts)",
            "model.train_on_batch(np.ones((8, 4)), np.ones((8, 2)))",
            "train_on_batch() would train the whole model",
        ),
        (
            "ModelParallel(layout_map=layouts)",
            "model.optimizer.apply([np.ones(v.shape) for v in model.weights], model.weights)",
            "would train the whole model on every rank",
        ),
        (
            "ModelParallel(layout_map=layouts)",
            "keras.distribution.set_distribution(None)",
            "a distribution of models cannot end within a script",
        ),
        (
            "DataParallel(device_mesh=keras.distribution.DeviceMesh((2,), ('batch',), ['cpu:0', 'cpu:1']))",
            "model.fit(np.ones((8, 4)), np.ones((8, 2)), callbacks=[held])",
            "HELD 58",
        ),
        ("ModelParallel.__mro__[1](mesh)", "", "this kind of distribution does not exist on ranks"),
        ("ModelParallel(layout_map=layouts, batch_dim_name='model')", "", "a layout cuts a variable over the replicas"),
    ],
)
def test_distributions_of_keras_are_over_ranks_or_an_error(
    tmp_path: Path, kind: str, train: str, expected: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(DISTRIBUTED.format(kind=kind, train=train))
    done = run_script(2, LAUNCHER, str(script), timeout=90)
    assert expected in done.stdout + done.stderr, done.stderr
    assert (done.returncode == 0) == expected.startswith("HELD")


@pytest.mark.slow
def test_a_distribution_of_the_script_is_not_cut_into_stages(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(DISTRIBUTED.format(kind="ModelParallel(layout_map=layouts)", train=""))
    done = run_script(2, LAUNCHER, "--stages", "2", str(script), timeout=90)
    assert "which matex run --stages does not cut into stages" in done.stderr
    assert done.returncode != 0
