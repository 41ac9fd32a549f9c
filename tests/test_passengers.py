"""Training of the example of a table in stratified folds, against scikit-learn's folds, on two ranks as on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from mpi4py import MPI
from sklearn.model_selection import StratifiedKFold

from sample_data.make import write_passengers
from tests.support.ranks import Pools


def _train(comm: MPI.Intracomm, files: str, **options: Any) -> list[dict[str, Any]]:
    import keras

    from examples.passengers import train

    keras.backend.clear_session()
    return list(train(files, epochs=5, folds=2, **options))


@pytest.mark.slow  # an example as a whole; test_text_table.py has a table on ranks
def test_two_ranks_train_as_one_process(ranks: Pools, tmp_path: Path) -> None:
    table = pd.concat([pd.read_csv(path) for path in write_passengers(tmp_path / "ship")])
    folds = StratifiedKFold(2).split(table, table.survived)
    picture = tmp_path / "passengers.png"
    (alone,) = ranks(1).run(_train, str(tmp_path / "ship" / "*.csv"), picture=str(picture), timeout=120)
    for (_, held_out), found in zip(folds, alone, strict=True):
        expected = np.bincount(table.survived.iloc[held_out])
        assert np.abs(np.bincount(found["survived"]) - expected).max() <= 1
        assert found["accuracy"] > max(expected) / sum(expected) + 0.04
    assert picture.read_bytes()[:4] == b"\x89PNG"
    for found in ranks(2).run(_train, str(tmp_path / "ship" / "*.csv"), timeout=120):
        for fold, other in zip(found, alone, strict=True):
            np.testing.assert_allclose(fold["score"], other["score"], atol=1e-4)
            np.testing.assert_array_equal(fold["survived"], other["survived"])
