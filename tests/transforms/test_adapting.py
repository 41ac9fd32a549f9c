"""Preprocessing layers of Keras, adapted to a data set of all ranks, compared with Keras on all samples."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import matex_data as md
from tests.support.launch import run_script
from tests.support.ranks import Pool

ROWS = 203
RNG = np.random.default_rng(5)
X, V = RNG.normal(3.0, 2.0, ROWS), RNG.normal(size=(ROWS, 3)).astype(np.float32)
NAMES = np.array([f"class {n}" for n in RNG.integers(0, 7, ROWS) ** 2 % 6])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of numbers, vectors and texts."""
    path = tmp_path_factory.mktemp("adapting") / "a.h5"
    with h5py.File(path, "w") as file:
        file["x"], file["v"], file["name"] = X, V, NAMES.astype(object)
        file["y"] = np.arange(ROWS)
    return path


def _layers() -> dict[str, tuple[Any, str]]:
    import keras

    return {
        "normalization": (keras.layers.Normalization(), "v"),
        "one number": (keras.layers.Normalization(axis=None), "x"),
        "scalars": (keras.layers.Normalization(), "x"),
        "lookup": (keras.layers.StringLookup(), "name"),
        "text": (keras.layers.TextVectorization(output_mode="multi_hot"), "name"),
        "bins": (keras.layers.Discretization(num_bins=5), "x"),
    }


def _space() -> Any:
    from keras.utils import FeatureSpace

    features = {"x": FeatureSpace.float_normalized(), "name": FeatureSpace.string_categorical()}
    return FeatureSpace(features, output_mode="concat")


def _outputs(layers: dict[str, tuple[Any, str]], space: Any) -> dict[str, Any]:
    values = {"x": X[:50], "v": V[:50], "name": NAMES[:50], "column": X[:50, None]}
    found = {k: np.asarray(layer(values["column" if k == "scalars" else name])) for k, (layer, name) in layers.items()}
    return {**found, "space": np.asarray(space({"x": values["x"], "name": values["name"]}))}


def _adapted(comm: Any, path: Path) -> dict[str, Any]:
    layers, space = _layers(), _space()
    for layer, name in layers.values():
        data = md.open_dataset(path, inputs=name, targets="y", comm=comm)
        data.adapt(layer)
    md.open_dataset(path, inputs=["x", "name"], comm=comm).adapt(space)
    return _outputs(layers, space)


def _of_keras(comm: Any) -> dict[str, Any]:
    import tensorflow as tf

    layers, space = _layers(), _space()
    for key, (layer, name) in layers.items():
        values = {"x": X, "v": V, "name": NAMES}[name]
        layer.adapt(values[:, None] if key == "scalars" else values)
    space.adapt(tf.data.Dataset.from_tensors({"x": X, "name": NAMES}))
    return _outputs(layers, space)


@pytest.mark.rank_counts(1, 3)
def test_layers_are_those_of_keras_on_all_samples(pool: Pool, path: Path) -> None:
    expected, *_ = pool.run(_of_keras, timeout=60)
    for found in pool.run(_adapted, path, timeout=60):
        for key, values in expected.items():
            np.testing.assert_allclose(found[key], values, rtol=1e-5, atol=1e-5, err_msg=key)


def _refused(comm: Any, path: Path) -> None:
    import keras

    data = md.open_dataset(path, inputs=["x", "v"], comm=comm)
    with pytest.raises(md.FormatError, match="adapted to one field"):
        data.adapt(keras.layers.Normalization())
    with pytest.raises(md.FieldNotFound):
        data.adapt(keras.layers.Normalization(), "w")
    data.adapt(layer := keras.layers.StringLookup(), "name")  # of the file, not of the batches
    assert len(layer.get_vocabulary()) == 1 + len(set(NAMES))
    with pytest.raises(Exception, match=r"string|dtype|cast|type"):
        data.adapt(keras.layers.Discretization(num_bins=2), "name")


FIRST_CALL = """
import keras
import matex_data as md

data = md.open_dataset({"x": [0.0, 1.0, 2.0, 3.0]}, inputs="x")
try:
    keras.layers.Normalization(axis=None).adapt(data.tf_dataset(2))
except md.PartitionError as error:
    print(error)
"""


def test_a_layer_refuses_the_first_dataset_of_a_script_that_has_the_rows_of_one_rank() -> None:
    assert run_script(2, FIRST_CALL).stdout.count("adapt it to the samples of all ranks") == 2


@pytest.mark.rank_counts(2)
def test_what_does_not_fit_is_an_error_on_all_ranks(pool: Pool, path: Path) -> None:
    pool.run(_refused, path, timeout=60)


def _loaded(comm: Any, path: Path) -> Any:
    _, test = md.open_dataset(path, inputs="v", comm=comm).split(0.75, 0.25, seed=2)
    found = test.load(fields=["y", "v", "x"])
    return found["y"], found["v"], found["x"], test.load()["v"]


@pytest.mark.rank_counts(1, 3)
def test_ids_of_samples_are_loaded_beside_them(pool: Pool, path: Path) -> None:
    y, v, x, alone = (np.concatenate(parts) for parts in zip(*pool.run(_loaded, path), strict=True))
    assert len(set(y.tolist())) == len(y) == 51
    np.testing.assert_array_equal(v, V[y])
    np.testing.assert_array_equal(x, X[y])
    np.testing.assert_array_equal(alone, V[y])


def _trained(comm: Any, path: Path, collective: bool, use: str) -> Any:
    import keras

    data = md.open_dataset(path, inputs="name", targets="x", comm=comm)
    lookup = keras.layers.StringLookup(output_mode="one_hot")
    if collective:
        data.adapt(lookup)
    else:
        lookup.adapt(np.array([name.decode() for name in data.load()["name"]]))
    model = keras.Sequential(
        [keras.Input((), dtype="string"), lookup, keras.layers.Dense(1, kernel_initializer="ones")]
    )
    model.compile("sgd", "mse")
    rows = data.tf_dataset(6, remainder="drop")
    if use == "fit":
        return md.training.fit(model, rows, comm=comm, verbose=0).history["loss"]
    return md.training.evaluate(model, rows, comm=comm, verbose=0)


@pytest.mark.rank_counts(3)
@pytest.mark.parametrize("use", ["fit", "evaluate"])
def test_a_layer_that_was_adapted_to_rows_of_a_rank_is_an_error(pool: Pool, path: Path, use: str) -> None:
    assert len({str(loss) for loss in pool.run(_trained, path, True, use, timeout=60)}) == 1
    for outcome in pool.outcomes(_trained, path, False, use, timeout=60):
        assert isinstance(outcome, md.PartitionError) and "data.adapt(layer)" in str(outcome)


def _adapted_to_own_rows(comm: Any, path: Path, way: str) -> None:
    import keras
    import tensorflow as tf

    data = md.open_dataset(path, inputs=["name", "x"], targets="y", comm=comm)
    layer: Any = keras.layers.StringLookup() if way != "space" else _space()
    if way == "shard":
        names = tf.data.Dataset.from_tensor_slices(["a", "b", "c"]).batch(3)
        layer.adapt(md.training.shard(names, comm=comm))
    else:
        rows = data.tf_dataset(6).map(lambda fields, y: fields)
        layer.adapt(rows if way == "space" else rows.map(lambda fields: fields["name"]).prefetch(2))


@pytest.mark.rank_counts(1, 3)
@pytest.mark.parametrize("way", ["map", "space", "shard"])
def test_an_adapt_over_the_rows_of_a_rank_is_an_error_at_once(pool: Pool, path: Path, way: str) -> None:
    if pool.size == 1:
        pool.run(_adapted_to_own_rows, path, way, timeout=60)
        return
    for outcome in pool.outcomes(_adapted_to_own_rows, path, way, timeout=60):
        assert isinstance(outcome, md.PartitionError) and "data.adapt(layer)" in str(outcome)


class _Encoder:
    def __init__(self, layer: Any) -> None:
        self.parts = [layer]

    def encoded(self, names: Any, x: Any) -> Any:
        return self.parts[0](names), x


def _encoded(layer: Any, names: Any, x: Any) -> Any:
    return layer(names), x


def _mapped(comm: Any, path: Path, collective: bool, way: str, use: str) -> Any:
    import keras
    import tensorflow as tf

    data = md.open_dataset(path, inputs=["name", "x"] if way == "space" else "name", targets="x", comm=comm)
    rows = data.tf_dataset(6, remainder="drop")
    layer: Any = keras.layers.StringLookup(output_mode="one_hot", max_tokens=8)
    if way == "space":
        layer = _space()
    if collective:
        data.adapt(layer)
    else:
        own = data.load()
        names = np.array([name.decode() for name in own["name"]])
        layer.adapt(
            tf.data.Dataset.from_tensor_slices({"name": names, "x": own["x"]}).batch(6) if way == "space" else names
        )
    ways = {
        "lambda": lambda names, x: (layer(names), x),
        "method": _Encoder(layer).encoded,
        "partial": functools.partial(_encoded, layer),
        "space": lambda fields, x: (layer(fields), x),
    }
    encoded = rows.map(ways[way])
    model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse")
    if use == "validation_data":
        whole = np.zeros((12, *encoded.element_spec[0].shape[1:]), np.float32), np.zeros(12)
        training = md.training.shard(tf.data.Dataset.from_tensor_slices(whole).batch(6), comm=comm)
        return md.training.fit(model, training, validation_data=encoded, comm=comm, verbose=0).history["loss"]
    if use == "fit":
        return md.training.fit(model, encoded, comm=comm, verbose=0).history["loss"]
    if use == "evaluate":
        return md.training.evaluate(model, encoded, comm=comm, verbose=0)
    return md.training.predict(model, encoded.map(lambda names, x: names), comm=comm, gather=True, verbose=0).sum()


@pytest.mark.rank_counts(3, slow=(2,))
@pytest.mark.parametrize(
    ("way", "use"),
    [
        ("lambda", "fit"),
        ("method", "evaluate"),
        ("partial", "predict"),
        pytest.param("space", "fit", marks=pytest.mark.slow),
        ("lambda", "validation_data"),
    ],
)
def test_a_layer_of_the_pipeline_that_was_adapted_to_rows_of_a_rank_is_an_error(
    pool: Pool, path: Path, way: str, use: str
) -> None:
    assert len({str(loss) for loss in pool.run(_mapped, path, True, way, use, timeout=60)}) == 1
    for outcome in pool.outcomes(_mapped, path, False, way, use, timeout=60):
        assert isinstance(outcome, md.PartitionError) and "data.adapt(layer)" in str(outcome)


SCRIPT = """
import sys
import keras
import matex_data as md

path, place = sys.argv[1:]
rows = md.open_dataset(path, inputs="name", targets="x").tf_dataset(8)
lookup = keras.layers.StringLookup(output_mode="one_hot", max_tokens=8)
lookup.adapt(rows.map(lambda names, x: names))
within = [keras.Input((), dtype="string"), lookup] if place == "model" else []
model = keras.Sequential([*within, keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(rows if within else rows.map(lambda names, x: (lookup(names), x)), verbose=0)
print("trained")
"""


@pytest.mark.parametrize("place", ["map", pytest.param("model", marks=pytest.mark.slow)])
def test_matex_run_refuses_a_layer_that_was_adapted_to_rows_of_a_rank(place: str, path: Path) -> None:
    launcher = "from matex_data.training.launcher.run import main; main()"
    script = path.with_name("adapt.py")
    script.write_text(SCRIPT)
    done = run_script(2, launcher, str(script), str(path), place, timeout=60)
    assert done.returncode != 0 and "data.adapt(layer)" in done.stderr and "trained" not in done.stdout
