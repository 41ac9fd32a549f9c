"""Training of the example of jets: ragged, padded and flattened particles, and a table, on two ranks as on one."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from matex_data import FieldNotFound, open_dataset
from sample_data.make import JETS, write_jets
from tests.support.launch import ROOT
from tests.support.ranks import Pools

PIPELINES = ("ragged", "padded", "flattened", "table")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_jets(tmp_path_factory.mktemp("jets"))[0].parent / "*.h5")


def _train(comm: MPI.Intracomm, files: str, pipeline: str) -> dict[str, Any]:
    import keras

    from examples.particles import train

    keras.backend.clear_session()
    return train(files, pipeline, epochs=2)


QUICK = ("ragged",)


@pytest.mark.parametrize(
    "pipeline", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PIPELINES]
)
def test_two_ranks_train_as_one_process(files: str, ranks: Pools, pipeline: str) -> None:
    if pipeline == "table":
        _need_members(files)
    (alone,) = ranks(1).run(_train, files, pipeline, timeout=240)
    assert np.abs(alone["weights"]).max() > 0.1
    for found in ranks(2).run(_train, files, pipeline, timeout=240):
        np.testing.assert_allclose(
            found["weights"], alone["weights"], rtol=0, atol=1e-4 * np.abs(alone["weights"]).max()
        )
        for name in ("loss", "val_loss", "val_accuracy"):
            np.testing.assert_allclose(found[name], alone[name], rtol=1e-4)


def _need_members(files: str) -> None:
    try:
        open_dataset(files, inputs="jets/pt", comm=MPI.COMM_SELF)
    except FieldNotFound:
        pytest.skip("members of compound tables are no fields")


def test_the_jets_are_the_same_each_time(files: str, tmp_path: Path) -> None:
    second = write_jets(tmp_path)
    assert len(second) == len(JETS)
    assert [(Path(files).parent / path.name).read_bytes() for path in second] == [path.read_bytes() for path in second]


def test_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jets(tmp_path / "sample_data" / "jets")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "variable_length.md").read_text()
    code = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    output: list[str] = []
    example = doctest.DocTestParser().get_doctest(code, {}, "variable_length.md", None, None)
    assert len(example.examples) > 10
    doctest.DocTestRunner().run(example, out=output.append)
    assert output == []
