"""Errors of Keras about data that do not fit the model say how to open the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from mpi4py import MPI

import matex_data as md

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "texts": ({"inputs": "x", "targets": "species"}, 'dtype={"species": "category"}'),
    "no targets": ({"inputs": "x"}, "inputs= and targets="),
    "a dict of inputs": ({"inputs": ["a", "b"], "targets": "b"}, "keras.Input(shape, name=field)"),
    "a dict of targets": ({"inputs": "x", "targets": ["a", "b"]}, "keras.Model(inputs, {field: output})"),
    "a number": ({"inputs": "a", "targets": "b"}, "stack=True for rows of shape (1,)"),
}


@pytest.mark.parametrize("case", CASES)
def test_data_that_do_not_fit_the_model(tmp_path: Path, case: str) -> None:
    options, remedy = CASES[case]
    numbers = np.arange(8.0)
    np.savez(
        tmp_path / "a.npz", x=numbers[:, None], a=numbers, b=numbers, species=np.array(["setosa", "virginica"] * 4)
    )
    data = md.open_dataset(tmp_path / "a.npz", comm=MPI.COMM_SELF, **options)
    model = keras.Sequential([*([] if case == "a number" else [keras.Input((1,))]), layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(Exception, match=r".") as caught:
        md.training.fit(model, data, batch_size=4, comm=MPI.COMM_SELF, verbose=0)
    (note,) = caught.value.__notes__
    assert note.startswith("remedy: ") and remedy in note
