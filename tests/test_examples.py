"""Run the examples in the docstrings, and compare their output."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import h5py
import numpy as np
import pytest

import matex_data

MODULES = (
    *("dataset", "opening", "combining", "samples", "compat", "errors", "fields"),
    *(f"index.{name}" for name in ("model", "runs", "strided", "joined")),
    *(f"sampling.{name}" for name in ("permutation", "schedule", "sizing", "split", "mixing")),
    *("cli.planning", "launching.library", "launching.slurm", "machine", "training.launcher.arguments"),
    *("transforms.names", "transforms.pad", "transforms.strata", "transforms.where"),
    *(f"training.proof.{name}" for name in ("model", "propagate", "shapes", "sizes")),
)
EXAMPLES = [
    test
    for name in MODULES
    for test in doctest.DocTestFinder().find(import_module(f"matex_data.{name}"))
    if test.examples
]
PUBLIC = [
    matex_data.open_dataset,
    matex_data.concat,
    matex_data.merge,
    matex_data.mix,
    matex_data.sample_data,
    matex_data.Dataset,
    *(value for name, value in vars(matex_data.Dataset).items() if not name.startswith("_")),
    matex_data.DataSet,
]
"""Functions, classes and properties that have to have an example."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of the examples."""
    folder, rng = tmp_path_factory.mktemp("examples"), np.random.default_rng(0)
    image, label = rng.integers(0, 256, (100, 8, 8), np.uint8), np.arange(100) % 10
    for name in ("events.h5", "digits.h5"):
        with h5py.File(folder / name, "w") as file:
            file["image"], file["label"] = image, label
            if name == "events.h5":
                file["energy"] = rng.normal(5.0, 2.0, 100).astype("f4")
    return folder


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name.removeprefix("matex_data."))
def test_example(example: doctest.DocTest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    example.globs.update(md=matex_data, np=np)
    output: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)  # whatever -v of pytest
    runner.run(example, out=output.append)
    assert output == []


def test_every_public_name_has_an_example() -> None:
    documented = [getattr(value, "fget", value).__doc__ for value in PUBLIC]
    assert all(">>>" in (text or "") for text in documented)
