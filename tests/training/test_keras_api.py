"""Private names of Keras and TensorFlow exist, and a version without one of them is an error before training."""

from __future__ import annotations

import configparser
import importlib.metadata
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import ROOT, run_script
from tests.support.ranks import Pools

FEATURES = ("training", "models in parts", "checkpoints", "matex run")
LAUNCHER = "from matex_data.training.launcher.run import main; main()"


def _missing(comm: Any) -> list[str]:
    from matex_data.training import keras_api

    return [name for feature in FEATURES for name in keras_api.missing(feature)]


def _missing_on_objects(comm: Any) -> list[str]:
    """Return listed attributes that objects lack after an epoch of training."""
    import keras
    import numpy as np
    import tensorflow as tf

    from matex_data.training import keras_api

    layers = [keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    model = keras.Sequential([*layers, keras.layers.Dropout(0.5)])
    model.compile(keras.optimizers.SGD(use_ema=True, gradient_accumulation_steps=2), "mse")
    dataset = tf.data.Dataset.from_tensors((np.zeros((2, 4), "float32"), np.zeros((2, 2), "float32")))
    callbacks = keras.callbacks
    watching = [callbacks.EarlyStopping(monitor="loss"), callbacks.ReduceLROnPlateau(monitor="loss")]
    model.fit(dataset, verbose=0, callbacks=[*watching, callbacks.SwapEMAWeights()])
    steps, saved = tf.Variable(0), tf.train.Checkpoint()
    objects = [model, *model.layers, model.optimizer, model._compile_loss, dataset, iter(dataset), *watching]
    objects += [keras.metrics.MeanAbsoluteError(), callbacks.ModelCheckpoint("x.keras"), callbacks.ProgbarLogger()]
    objects += [callbacks.SwapEMAWeights(), tf.train.CheckpointManager(saved, "x", 1, None, "c", steps, 1)]
    objects.append(keras_api.EpochIterator(tf.distribute.get_strategy(), x=dataset))
    objects.append(keras_api.FuncGraph("graph"))
    devices = keras.distribution.DeviceMesh((1, 1), ("batch", "model"), ["cpu:0"])
    layouts = keras.distribution.LayoutMap(devices)
    can_cut = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 15)  # older ones cannot with TensorFlow
    if can_cut:
        objects.append(keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch"))
    attention = keras.layers.MultiHeadAttention(1, 2)
    attention.build((2, 3, 4), (2, 3, 4))
    objects += [model._functional, attention, *model.weights, keras_api.tensorflow_context()]
    objects += dataset.map(lambda x, y: (x, y))._functions()
    found = {}
    listed = [*keras_api.ATTRIBUTES.values(), *keras_api.OBJECT_ATTRIBUTES.values()]
    for owner, names in (entry for entries in listed for entry in entries):
        if owner is keras.distribution.ModelParallel and not can_cut:
            continue
        selected = [one for one in objects if isinstance(owner, type) and isinstance(one, owner)] or [owner]
        found.update({f"{owner}: {name}": hasattr(one, name) for one in selected for name in names})
    return [name for name, exists in found.items() if not exists]


def test_all_names_exist(ranks: Pools) -> None:
    assert ranks(1).run(_missing) == [[]]


def test_objects_have_the_listed_attributes(ranks: Pools) -> None:
    assert ranks(1).run(_missing_on_objects) == [[]]


def _script(folder: Path, code: str) -> str:
    path = folder / "script.py"
    path.write_text(code)
    return str(path)


def _assert_refused(done: Any, name: str) -> None:
    assert done.returncode != 0
    assert f"this needs {name}, which this Keras or TensorFlow does not have" in done.stderr
    assert f"found: keras {importlib.metadata.version('keras')}, tensorflow " in done.stderr
    assert re.search(r"expected: keras [\d.]+ to [\d.]+, tensorflow [\d.]+ to [\d.]+\n", done.stderr)
    assert done.stderr.count("this needs") == 1
    assert "reached" not in done.stdout


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("keras.src.trainers.trainer.Trainer", "Model._symbolic_build"),
        pytest.param("keras.src.losses.loss", "keras.src.losses.loss.apply_mask", marks=pytest.mark.slow),
    ],
)
def test_a_missing_name_ends_the_launcher_with_one_error(owner: str, name: str, tmp_path: Path) -> None:
    code = f"import keras; del {owner}.{name.split('.')[-1]}; {LAUNCHER}"
    done = run_script(2, code, _script(tmp_path, "print('reached')"), timeout=120)
    _assert_refused(done, name)


def _missing_of_objects(comm: Any) -> list[str]:
    from unittest import mock

    import keras

    from matex_data.training import keras_api

    renamed = {"training": ((keras.optimizers.Optimizer, ("_rate_of_old", "_learning_rate")),)}
    with mock.patch.object(keras_api, "OBJECT_ATTRIBUTES", renamed):
        return keras_api.missing("training")


def test_a_missing_attribute_of_objects_is_named(ranks: Pools) -> None:
    assert ranks(1).run(_missing_of_objects) == [["Optimizer._rate_of_old"]]


MISSING = """
import keras, tensorflow as tf
from tensorflow.python.client import session
del session.BaseSession  # of matex run
from matex_data import training
from matex_data.training import keras_api

keras_api.ATTRIBUTES[{feature!r}] += ((tf.data.Dataset, ("_gone", "_inputs")),)
model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
data = tf.data.Dataset.from_tensors((tf.zeros((2, 1)), tf.zeros((2, 1))))
training.fit(model, data, verbose=0, steps_per_epoch=1)
print("reached")
"""


@pytest.mark.parametrize(
    ("size", "feature"), [(1, "training"), (2, "models in parts"), pytest.param(2, "training", marks=pytest.mark.slow)]
)
def test_a_missing_name_ends_what_needs_it_on_several_ranks(size: int, feature: str) -> None:
    done = run_script(size, MISSING.format(feature=feature), timeout=120)
    if (size, feature) == (2, "training"):
        _assert_refused(done, "DatasetV2._gone")
        return
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("reached") == size
    assert done.stderr.count("this needs DatasetV2._gone, which") == (feature == "training")


@pytest.mark.parametrize(
    ("version", "warned"),
    [("3.99.1", 1), *(pytest.param(*more, marks=pytest.mark.slow) for more in (("3.6.0", 1), ("3.9.0", 0)))],
)
def test_a_version_that_was_not_tested_gives_one_line(version: str, warned: int, tmp_path: Path) -> None:
    code = f"import keras; keras.__version__ = {version!r}; {LAUNCHER}"
    done = run_script(2, code, _script(tmp_path, "print('reached')"), timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("reached") == 1
    lines = re.findall(rf"keras {version}: matex_data was tested with keras [\d.]+ to [\d.]+, .*", done.stderr)
    assert len(lines) == warned, done.stderr


def _tested(comm: Any) -> dict[str, tuple[str, str]]:
    from matex_data.training import keras_api

    return keras_api.TESTED


def test_setup_and_makefile_allow_what_was_tested(ranks: Pools) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    required = setup["options"]["install_requires"].split()
    makefile = (ROOT / "Makefile").read_text()
    for name, (oldest, newest) in ranks(1).run(_tested)[0].items():
        major, minor = map(int, newest.split("."))
        assert f"{name}>={oldest},<{major}.{minor + 1}" in required
        assert f"'{name}=={oldest}.*'" in makefile
