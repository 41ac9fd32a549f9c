"""The house keeps its order: who may import whom, and that the README tells the truth."""

from __future__ import annotations

import ast
import configparser
import graphlib
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

from sample_data.make import LENGTHS, write_digits
from tests.support.launch import ROOT, run_script

ROOMS = {"matex_data": "matex_data", "readers": "matex_data.readers", "training": "matex_data.training"}
SOURCES = sorted(path for folder in ROOMS for path in (ROOT / folder).rglob("*.py"))

BELOW: dict[str, set[str]] = {
    "_types": set(),
    "arguments": {"errors"},
    "declared": set(),
    "errors": {"locks", "paths"},
    "fields": {"_types", "declared", "errors", "locks"},
    "machine": {"errors", "words"},
    "locks": set(),
    "lru": {"locks"},
    "paths": set(),
    "storage": {"_types", "declared", "errors", "locks", "paths"},
    "timeline": {"machine"},
    "warning": {"locks", "paths"},
    "words": set(),
}
"""Packages, and modules beside them, with what each may import; every package may import all that is below it."""
for layer in (
    ["codecs"],
    ["index"],
    ["sampling"],
    ["samples", "memory", "display"],
    ["mpi"],
    ["io"],
    ["progress"],
    ["launching"],
    ["readers"],
    ["abc"],
    ["reading"],
    ["epochs"],
    ["transforms"],
    ["batching"],
    ["dataset"],
    ["torch"],
    ["opening"],
    ["combining", "compat"],
    ["training.replacements", "training.keras_api"],
    ["training.compat"],
    ["training.comm"],
    ["training.arguments"],
    ["training.reduction"],
    ["training.partition"],
    ["training.exact"],
    ["training.average"],
    ["training.zero"],
    ["training.distributed_model"],
    ["training.checking"],
    ["training.learning_rate"],
    ["training.progress"],
    ["training.restart"],
    ["training.model_parallel"],
    ["training.saving"],
    ["training.callbacks"],
    ["training.session"],
    ["training.trainer"],
    ["training.prediction_file"],
    ["training.inference"],
    ["training.launcher"],
    ["training"],
    ["doctor"],
    ["cli"],
    ["__main__", ""],
):
    below = set(BELOW)
    BELOW |= {name: below | {name} for name in layer}
BELOW["readers"] = {"_types", "arguments", "declared", "errors", "fields", "locks", "lru", "machine", "paths"}
BELOW["readers"] |= {"storage", "codecs", "index", "sampling", "readers", "warning"}
BELOW["abc"] = BELOW["readers"] | {"abc"}
for name in [name for name in BELOW if name.startswith("training")]:
    BELOW[name] -= {"readers", "transforms", "dataset", "opening", "compat", "codecs", "index"}
BELOW["training.launcher"] |= {"compat", "training"}


def _module(path: Path) -> str:
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([ROOMS[folder], *(part for part in rest if part != "__init__")])


@cache
def _modules() -> set[str]:
    return {_module(source) for source in SOURCES}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _imported_names(path: Path) -> set[str]:
    return set(_imports(_tree(path)))


def _imports(tree: ast.AST) -> Iterator[str]:
    """Yield every imported module, or name of one, except what only type checkers import."""
    if isinstance(tree, ast.Import):
        yield from (alias.name for alias in tree.names)
    elif isinstance(tree, ast.ImportFrom):
        yield f"{tree.module}"
        yield from (f"{tree.module}.{alias.name}" for alias in tree.names)
    elif not (isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING"):
        for node in ast.iter_child_nodes(tree):
            yield from _imports(node)


def _uses(path: Path, *packages: str) -> list[str]:
    """Return the names that a source imports of these packages or modules."""
    return sorted(
        n for n in _imported_names(path) if any(n == package or n.startswith(package + ".") for package in packages)
    )


def _sources(folder: str) -> list[Path]:
    return [path for path in SOURCES if path.relative_to(ROOT).parts[0] == folder]


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_imports_run_downwards(path: Path) -> None:
    own = _package(_module(path))
    used = {_package(name) for name in _imported_names(path) if name in _modules()} - {own}
    assert used - BELOW[own] - {"", "training"} == set()  # names of packages, in front of those of their modules


def _package(module: str) -> str:
    """Return the package of a module within ``matex_data``, for ``training`` that within it."""
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[:1] == ["training"] else 1])


def test_only_one_module_of_the_data_path_imports_tensorflow() -> None:
    users = {_id(path) for path in SOURCES if _uses(path, "tensorflow", "keras")}
    assert {user for user in users if not user.startswith("training/")} == {"matex_data/epochs/tfdata.py"}


PURE = ("_types", "fields", "index/model", "index/runs", "io/coalesce", "sampling/schedule")


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_know_no_mpi_and_no_files(name: str) -> None:
    assert _uses(ROOT / "matex_data" / f"{name}.py", "mpi4py", "h5py", "os", "io", "pathlib") == []


def test_every_package_is_listed() -> None:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    packages = {_module(path) for path in SOURCES if path.name == "__init__.py"} | {"matex_data._sample_data"}
    assert set(parser["options"]["packages"].split()) == packages  # a wheel leaves out what is not listed


def test_the_conda_recipe_agrees_with_the_package() -> None:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    options, scripts = parser["options"], parser["options.entry_points"]["console_scripts"]
    recipe = (ROOT / "docs" / "clusters" / "recipe.yaml").read_text()
    needed = re.search(r"  run:\n((?:    - .*\n)+)", recipe)
    assert needed is not None
    names = [line.strip("- ").replace(" ", "").lower() for line in needed[1].splitlines()]
    assert names == [f"python{options['python_requires']}", *options["install_requires"].lower().split()]
    assert re.findall(r"      - (matex = .*)", recipe) == scripts.strip().splitlines()
    assert f"summary: {parser['metadata']['description']}\n" in recipe


def test_private_names_of_keras_and_tensorflow_are_in_one_module() -> None:
    private = ("keras.src", "keras._tf_keras", "tensorflow.python", "tensorflow.core")
    assert [_id(path) for path in SOURCES if _uses(path, *private)] == []
    trees = {path: _tree(path) for path in _sources("training")}
    listed = {value for value in _texts(trees[ROOT / "training" / "keras_api.py"]) if value.startswith("_")}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    ours = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    ours |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    known = listed | ours | {"_asdict", "_getframe", "_replace"}  # of Python
    for path, tree in trees.items():
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} | _texts(tree)
        unknown = {name for name in used if re.fullmatch("_[a-z][a-z_]*", name) and not name.startswith("_matex")}
        assert unknown - known == set(), f"{_id(path)}: not in training/keras_api.py"


def test_shards_are_rows_of_a_batch_alone() -> None:
    """Parts are of layers, sections of optimizers."""
    paths = [path for path in _sources("training") if path.parts[-2] in ("model_parallel", "layouts", "stages", "zero")]
    paths += (ROOT / "training" / "partition").glob("*.py")
    lines = [line for path in paths for line in path.read_text().splitlines() if re.search("(?i)shard(?!_opt)", line)]
    assert len(paths) > 20 and lines == []


def _texts(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_docstrings_begin_with_a_verb_or_a_noun(path: Path) -> None:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    texts = [ast.get_docstring(node) or "" for node in ast.walk(_tree(path)) if isinstance(node, kinds)]
    assert [text for text in texts if re.match("(What|Who|Whether|Where|How|The same|It) ", text)] == []


ALIKE = {"Dataset": ["matex_data/dataset.py", "matex_data/torch.py", "training/launcher/openers.py"]}
"""Public names, the second that of PyTorch; the third replaces netCDF4's class, whose name it has."""


def test_no_two_classes_or_types_have_one_name() -> None:
    """Look at public ones. A type variable is none of them."""
    modules: dict[str, list[str]] = {}
    for path in SOURCES:
        tree = _tree(path)
        names = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        for node in tree.body:
            if isinstance(node, ast.Assign) and not ast.unparse(node.value).startswith("TypeVar("):
                names += [target.id for target in node.targets if isinstance(target, ast.Name)]
        for name in names:
            if re.match("[A-Z][a-z]", name):
                modules.setdefault(name, []).append(_id(path))
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == ALIKE


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_names_are_no_pronouns(path: Path) -> None:
    """Look at functions, classes, parameters, variables and attributes; ``in_place`` is a term of the field."""
    nodes = list(ast.walk(_tree(path)))
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    words = {word: name for name in names for word in name.lower().replace("in_place", "").split("_")}
    assert {words[word] for word in words.keys() & PRONOUNS} == set()


PRONOUNS = {"place", "places", "piece", "pieces", "some", "several", "together", "turn", "turns", "each"}


def test_mpi_files_are_opened_in_one_module() -> None:
    users = [_id(path) for path in SOURCES if "MPI.File" in path.read_text()]
    assert users == ["matex_data/io/collective.py"]


MAKERS = {"Create", "Create_group", "Dup", "Dup_with_info", "Idup", "Split", "Split_type"}


def test_warnings_are_given_in_one_function() -> None:
    """A number of frames to the user's line, counted by hand, is wrong as soon as a function comes between."""
    callers = [path for path in SOURCES if re.search(r"warnings\.(warn|warn_explicit)\(", path.read_text())]
    assert callers == [ROOT / "matex_data" / "warning.py"]


def test_filters_of_warnings_are_added_in_one_function() -> None:
    """To replace them for a while is to lose those that other threads set meanwhile, of programs that read."""
    changes = re.compile(r"warnings\.(catch_warnings|simplefilter|filterwarnings|resetwarnings)\(")
    changed = [_id(path) for path in SOURCES if changes.search(path.read_text())]
    assert [one for one in changed if "/cli/" not in one and "training/" not in one] == ["matex_data/warning.py"]


def test_communicators_are_made_in_one_function() -> None:
    """Look at calls: ``deadlines.derived`` gets such a method, and calls it with a deadline."""
    calls = [node for path in SOURCES for node in ast.walk(_tree(path)) if isinstance(node, ast.Call)]
    made = [ast.unparse(node) for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS]
    assert made == ["MPI.Info.Create(comm.agreed(hints))"]


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_imports_are_absolute(path: Path) -> None:
    nodes = [node for node in ast.walk(_tree(path)) if isinstance(node, ast.ImportFrom)]
    assert [ast.unparse(node) for node in nodes if node.level] == []


def test_no_module_imports_one_that_imports_it() -> None:
    """Look at what functions import, too, which Python would allow."""
    trees = {_module(path): _tree(path) for path in SOURCES}
    graph = {module: set(_imported(tree, trees.keys())) - {module} for module, tree in trees.items()}
    assert "matex_data.opening.open" in graph["matex_data.cli.commands"]  # within a function
    list(graphlib.TopologicalSorter(graph).static_order())


def _imported(tree: ast.AST, modules: Collection[str]) -> Iterator[str]:
    """Yield the modules of this package that a source imports; a package itself only for names of its own."""
    if isinstance(tree, ast.ImportFrom):
        names = [f"{tree.module}.{alias.name}" for alias in tree.names]
        yield from {name if name in modules else f"{tree.module}" for name in names} & set(modules)
    elif not (isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING"):
        for node in ast.iter_child_nodes(tree):
            yield from _imported(node, modules)


@pytest.mark.parametrize("name", ["readers", "training"])
def test_a_package_refuses_another_name(name: str) -> None:
    command = [sys.executable, "-c", f"import {name}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"ImportError: import this package as matex_data.{name}" in done.stderr


def test_sample_data_is_the_same_each_time(tmp_path: Path) -> None:
    first = write_digits(tmp_path / "first")
    second = write_digits(tmp_path / "second")
    assert len(first) == len(LENGTHS)
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_code_of_the_readme_runs(tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    done = run_script(2, code, timeout=180, env={"XDG_CACHE_HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout


def _missing_paths(line: str) -> list[str]:
    """Return the paths of a line that do not exist; one without folders is beside the one before it."""
    missing, folder = [], ROOT
    for name in re.findall(r"`([\w./-]+(?:\.py|\.toml|\.md|\.cfg|/))`", line):
        found = [base / name for base in (ROOT, folder, folder.parent, ROOT / "matex_data") if (base / name).exists()]
        missing += [] if found else [name]
        if found:
            folder = found[0] if found[0].is_dir() else found[0].parent
    return missing


def test_paths_in_contributing_and_architecture_exist() -> None:
    assert _missing_paths("`matex_data/sampling/schedule.py` or `permutation.py`, `nowhere.py`") == ["nowhere.py"]
    for name in ("CONTRIBUTING.md", "docs/architecture.md"):
        lines = (ROOT / name).read_text().replace("<format>", "csv").replace("readers/csv.py", "readers/idx.py")
        assert {line: missing for line in lines.splitlines() if (missing := _missing_paths(line))} == {}


def test_the_architecture_is_a_page_that_names_every_package() -> None:
    """Ten minutes: some two thousand words."""
    text = (ROOT / "docs/architecture.md").read_text()
    assert len(text.split()) < 2100
    rows = [
        line.split("|")[1]
        for line in text.partition("## Packages")[2].partition("## Glossary")[0].splitlines()[5:]
        if line
    ]
    named = {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    assert named == set(BELOW) - {"", "__main__", "training"}
