"""Arguments of another kind: the same error on all ranks, which names them, before anything is done."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import matex_data as md
from tests.support.ranks import Pool

ROWS = {"x": np.arange(24.0).reshape(12, 2), "y": np.arange(12.0)[:, None]}


def _cases(comm: Any, folder: str) -> dict[str, Callable[[], Any]]:
    """Return calls by the words of their errors."""
    import keras
    import tensorflow as tf

    fit, evaluate, predict = md.training.fit, md.training.evaluate, md.training.predict
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = md.open_dataset(ROWS, inputs="x", targets="y", comm=comm)
    rows = data.tf_dataset(6)
    endless = tf.data.Dataset.from_tensor_slices((ROWS["x"], ROWS["y"])).batch(6).repeat()
    path, sgd = Path(folder, "a.keras"), keras.optimizers.SGD
    return {
        "takes no model=": lambda: fit(None, rows, comm=comm),
        "model that is compiled": lambda: fit(other, rows, comm=comm),
        "takes no data": lambda: fit(model, (ROWS["x"], ROWS["y"]), comm=comm),
        "takes no epochs=": lambda: fit(model, rows, epochs="2", comm=comm),
        "takes no callbacks=": lambda: fit(model, rows, callbacks=[keras.callbacks.TerminateOnNaN], comm=comm),
        "takes no checkpoint=": lambda: fit(model, rows, checkpoint=3, comm=comm),
        "save_every= is a number of steps": lambda: fit(model, rows, checkpoint=folder, save_every=0, comm=comm),
        "record the position": lambda: fit(model, endless, steps_per_epoch=3, checkpoint=folder, comm=comm, verbose=0),
        "fit() takes no comm=": lambda: fit(model, rows, comm=1),
        "takes no mesh=": lambda: fit(model, rows, mesh=(1, 1)),
        "takes no verify=": lambda: fit(model, rows, verify=True, comm=comm),
        "takes no wire_dtype=": lambda: fit(model, rows, wire_dtype="float8", comm=comm),
        "takes no micro_batches=": lambda: fit(model, rows, micro_batches="many", comm=comm),
        "takes no steps_per_epoch=": lambda: fit(model, rows, steps_per_epoch="2", comm=comm),
        "different numbers": lambda: fit(model, rows, validation_data=(ROWS["x"], ROWS["y"][:5]), comm=comm, verbose=0),
        "evaluate() takes a model": lambda: evaluate(other, rows, comm=comm),
        "evaluate() takes no data": lambda: evaluate(model, ROWS["x"], comm=comm),
        "predict() takes no data": lambda: predict(model, ROWS["x"], comm=comm),
        "takes no gather=": lambda: predict(model, rows, gather="yes", comm=comm),
        "takes no to=": lambda: predict(model, data, to=3, comm=comm),
        "takes no optimizer=": lambda: md.training.distribute(sgd, comm=comm),
        "takes no bucket_bytes=": lambda: md.training.distribute(sgd(), bucket_bytes="1MB", comm=comm),
        "takes no strategy=": lambda: md.training.distribute(sgd(), strategy="ring", comm=comm),
        "takes no op=": lambda: md.training.allreduce(tf.ones(3), op="avg", comm=comm),
        "takes no variables=": lambda: md.training.broadcast(model, comm=comm),
        "takes variables alone": lambda: md.training.broadcast([tf.ones(3)], comm=comm),
        "no such rank": lambda: md.training.broadcast(model.variables, root=9, comm=comm),
        "broadcast_object() takes no root=": lambda: md.training.broadcast_object(1, root="0", comm=comm),
        "takes no remainder=": lambda: md.training.shard(rows, remainder="pad", comm=comm),
        "takes no stages=": lambda: md.training.Mesh(stages="2", comm=comm),
        "takes no layouts=": lambda: md.training.deferred({"kernel": (None, "model")}).__enter__(),
        "takes no path=": lambda: md.training.save(model, 3, comm=comm),
        "save() takes no model=": lambda: md.training.save(None, path, comm=comm),
        "takes no factor=": lambda: md.training.ScaledLearningRate("2"),
    }


def _told(comm: Any, folder: str) -> dict[str, str]:
    found = {}
    for words, call in _cases(comm, folder).items():
        try:
            call()
            found[words] = "no error"
        except (TypeError, ValueError, md.PartitionError) as error:
            found[words] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.rank_counts(2, slow=(1, 3))
def test_arguments_of_another_kind_are_named(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(_told, str(tmp_path), timeout=60):
        for words, text in found.items():
            assert words in text and text.startswith(("ArgumentError: ", "PartitionError: ")), (words, text)


def _warned(comm: Any) -> dict[str, list[str]]:
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = md.open_dataset(ROWS, inputs="x", targets="y", comm=comm)
    rows, given = data.tf_dataset(6), {"comm": comm, "verbose": 0}
    calls: dict[str, Callable[[], Any]] = {
        "fit(): batch_size=3": lambda: md.training.fit(model, rows, batch_size=3, **given),
        "fit(): shuffle=True": lambda: md.training.fit(model, rows, shuffle=True, **given),
        "evaluate(): batch_size=3": lambda: md.training.evaluate(model, rows, batch_size=3, **given),
        "predict(): batch_size=3": lambda: md.training.predict(model, rows, batch_size=3, **given),
        "": lambda: md.training.fit(model, rows, shuffle=False, **given),
    }
    found = {}
    for words, call in calls.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            call()
        found[words] = [str(one.message) for one in said if "does not apply" in str(one.message)]
    for words in list(calls)[:3]:
        with warnings.catch_warnings(), pytest.raises(UserWarning, match="does not apply"):  # on all ranks
            warnings.simplefilter("error", UserWarning)
            calls[words]()
    return found


@pytest.mark.rank_counts(2)
def test_options_that_data_with_batches_ignore_are_said_once(pool: Pool) -> None:
    of_root, of_other = pool.run(_warned, timeout=60)
    assert not any(of_other.values())
    for words, said in of_root.items():
        assert len(said) == bool(words) and all(words in text for text in said), (words, said)
