"""Run the examples in the docstrings, and compare their output."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import h5py
import numpy as np
import pytest

import matex_data
from tests.support.launch import ROOT

MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("matex_data.").removesuffix(".__init__")
    for top in ("matex_data", "readers", "training")
    for path in ROOT.glob(f"{top}/**/*.py")
    if ">>>" in path.read_text() and (path.stem not in ("torch", "jax") or find_spec(path.stem))
)
EXAMPLES = [
    test
    for name in MODULES
    for test in doctest.DocTestFinder().find(import_module(f"matex_data.{name}"))
    if test.examples
]
OF_KERAS = ("ScaledLearningRate.",)
"""Methods that Keras calls, not the user."""


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


def _public() -> Iterator[tuple[str, object]]:
    """Yield the public functions, classes and properties, by name; of layouts, not the methods that they override."""
    for module in (matex_data, matex_data.training, matex_data.torch, matex_data.abc):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value) or (inspect.isclass(value) and value.__module__.startswith("matex_data")):
                yield name, value
            if inspect.isclass(value) and not issubclass(value, matex_data.abc.Layout | matex_data.abc.Table):
                yield from ((f"{name}.{key}", member) for key, member in vars(value).items() if key[0] != "_")


def test_every_public_name_has_an_example() -> None:
    members = {name: getattr(value, "fget", value) for name, value in _public()}
    callables = {name: inspect.unwrap(value) for name, value in members.items() if callable(value)}
    without = [name for name, value in callables.items() if ">>>" not in (value.__doc__ or "")]
    assert [name for name in without if not name.startswith(OF_KERAS)] == []
    assert len(callables) > 100
