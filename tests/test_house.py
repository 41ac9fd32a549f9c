"""The house keeps its order: who may import whom, and that the README tells the truth."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sample_data.make import LENGTHS, write_digits
from tests.support.launch import ROOT, run_script

ROOMS = {"matex_data": "matex_data", "readers": "matex_data.readers", "training": "matex_data.training"}
SOURCES = sorted(path for folder in ROOMS for path in (ROOT / folder).rglob("*.py"))

PURE = {"coalesce", "errors", "fields", "index", "partition", "runs"}
"""Rooms of the core without MPI, files and TensorFlow."""
MOVERS = {"collective", "dataset", "stream", "tfdata"}
"""Rooms of the core that readers know nothing of: readers only say where the bytes are."""


def _module(path: Path) -> str:
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([ROOMS[folder], *(part for part in rest if part != "__init__")])


def _imports(tree: ast.AST) -> Iterator[str]:
    """Every module, or name of a module, that is imported anywhere below; what only type checkers see is left out."""
    if isinstance(tree, ast.Import):
        yield from (alias.name for alias in tree.names)
    elif isinstance(tree, ast.ImportFrom):
        yield f"{tree.module}"
        yield from (f"{tree.module}.{alias.name}" for alias in tree.names)
    elif not (isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING"):
        for node in ast.iter_child_nodes(tree):
            yield from _imports(node)


def _uses(path: Path, *packages: str) -> list[str]:
    """What a source imports of these packages or modules."""
    names = set(_imports(ast.parse(path.read_text())))
    return sorted(n for n in names if any(n == package or n.startswith(package + ".") for package in packages))


def _sources(folder: str) -> list[Path]:
    return [path for path in SOURCES if path.relative_to(ROOT).parts[0] == folder]


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", _sources("matex_data"), ids=_id)
def test_core_knows_neither_training_nor_tensorflow(path: Path) -> None:
    allowed = {"tfdata": ("tensorflow",), "cli": ("matex_data.training",), "__init__": ("matex_data.training",)}
    found = _uses(path, "tensorflow", "keras", "matex_data.training")
    assert [name for name in found if not name.startswith(allowed.get(path.stem, ()))] == []


@pytest.mark.parametrize("name", sorted(PURE))
def test_pure_rooms_know_no_mpi_and_no_files(name: str) -> None:
    assert _uses(ROOT / "matex_data" / f"{name}.py", "mpi4py", "h5py", "os", "io", "pathlib") == []


@pytest.mark.parametrize("path", _sources("readers"), ids=_id)
def test_readers_move_no_bytes(path: Path) -> None:
    movers = [f"matex_data.{name}" for name in MOVERS]
    assert _uses(path, "mpi4py", "tensorflow", "keras", "matex_data.training", *movers) == []


@pytest.mark.parametrize("path", _sources("training"), ids=_id)
def test_training_knows_no_reader(path: Path) -> None:
    assert _uses(path, "matex_data.readers", "h5py", "netCDF4") == []


def test_private_names_of_keras_and_tensorflow_are_in_one_room() -> None:
    private = ("keras.src", "keras._tf_keras", "tensorflow.python", "tensorflow.core")
    assert [_id(path) for path in SOURCES if _uses(path, *private)] == []
    trees = {path: ast.parse(path.read_text()) for path in _sources("training")}
    listed = {value for value in _texts(trees[ROOT / "training" / "keras_api.py"]) if value.startswith("_")}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    ours = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    ours |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    known = listed | ours | {"_getframe", "_replace"}  # of Python
    for path, tree in trees.items():
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} | _texts(tree)
        unknown = {name for name in used if re.fullmatch("_[a-z][a-z_]*", name) and not name.startswith("_matex")}
        assert unknown - known == set(), f"{_id(path)}: not in training/keras_api.py"


def _texts(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_mpi_files_are_opened_in_one_room() -> None:
    users = [path.stem for path in SOURCES if "MPI.File" in path.read_text()]
    assert users == ["collective"]


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_imports_are_absolute(path: Path) -> None:
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    assert [ast.unparse(node) for node in nodes if node.level] == []


def test_no_module_imports_one_that_imports_it() -> None:
    modules = {_module(path): path for path in SOURCES}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        # What a function imports when it is called makes no circle.
        tree = ast.parse(path.read_text())
        top = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        graph[module] = {name for name in _imports(top) if name in modules and name != module}
    list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("name", ["readers", "training"])
def test_a_room_refuses_another_name(name: str) -> None:
    command = [sys.executable, "-c", f"import {name}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"ImportError: import this package as matex_data.{name}" in done.stderr


def test_import_is_light() -> None:
    code = "import sys, matex_data; print(sorted({'tensorflow', 'keras', 'netCDF4'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_sample_data_is_the_same_each_time(tmp_path: Path) -> None:
    first = write_digits(tmp_path / "first")
    second = write_digits(tmp_path / "second")
    assert len(first) == len(LENGTHS)
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_code_of_the_readme_runs(tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    write_digits(tmp_path / "sample_data" / "digits")
    done = run_script(2, f"import os\nos.chdir({str(tmp_path)!r})\n{code}", timeout=180)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
