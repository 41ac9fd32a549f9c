"""Training of the example of a signal among backgrounds, against uproot and awkward, on two ranks as on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import pytest
import uproot
from mpi4py import MPI

from sample_data.make import write_collisions
from tests.support.ranks import Pools

XSEC = {"signal": 0.9, "background_soft": 30.0, "background_hard": 8.0}


def _train(comm: MPI.Intracomm, folder: str, **options: Any) -> dict[str, Any]:
    import keras

    from examples.signal_search import train

    keras.backend.clear_session()
    return train(folder, epochs=4, **options)


@pytest.mark.slow  # an example as a whole
def test_two_ranks_train_as_one_process(ranks: Pools, tmp_path: Path) -> None:
    folder, picture = tmp_path / "collisions", tmp_path / "score.png"
    expected: dict[int, float] = {0: 0.0, 1: 0.0}
    selected = {0: 0, 1: 0}
    for path in write_collisions(folder):
        events = uproot.open(path)["Events"].arrays()
        weights = events.genWeight[ak.sum(events.Jet_pt > 30, axis=1) >= 2] * XSEC[path.stem] / len(events)
        expected[path.stem == "signal"] += ak.sum(weights)
        selected[path.stem == "signal"] += len(weights)
    (alone,) = ranks(1).run(_train, str(folder), picture=str(picture), timeout=120)
    for label in (0, 1):  # a fifth of each, with weights of 0.5 to 1.5 times the mean
        chosen = alone["label"] == label
        assert abs(chosen.sum() - selected[label] / 5) < 1
        assert alone["weight"][chosen].sum() == pytest.approx(expected[label] / 5, rel=0.1)
    assert alone["auc"] > 0.8 and picture.read_bytes()[:4] == b"\x89PNG"
    for found in ranks(2).run(_train, str(folder), timeout=120):
        np.testing.assert_allclose(found["weights"], alone["weights"], rtol=0, atol=1e-3)
        for name in ("auc", "val_auc", "loss", "score", "weight"):
            np.testing.assert_allclose(found[name], alone[name], rtol=1e-3)
