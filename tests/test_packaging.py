"""The package that users install: its version, its files, what it imports, and how it works without this repository."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import matex_data
from sample_data.make import write_digits
from tests.support import machine_speed
from tests.support.launch import ROOT, environment, mpiexec

VERSION = matex_data.__version__
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
IMPORT = """
import sys
before = set(sys.modules)
import matex_data
names = {name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names
print(sorted(name for name in names if not name.startswith("_")))
"""
WARNINGS = """
import runpy, sys, traceback, warnings
def show(message, category, *place, **options):
    stack = [frame for frame in traceback.extract_stack() if "matex_data" in frame.filename]
    print(f"warning: {message} {stack}" if stack else "")
warnings.showwarning = show
warnings.simplefilter("always")
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("setup.cfg", "version = attr: matex_data.__version__"),
        ("CITATION.cff", f"version: {VERSION}"),
        ("CHANGELOG.md", f"## {VERSION} "),
        ("SECURITY.md", f"The latest release, {VERSION}, is mended"),
        ("docs/conf.py", "version = release = matex_data.__version__"),
        ("docs/clusters/recipe.yaml", f'  version: "{VERSION}"'),
    ],
)
def test_all_files_say_one_version(name: str, line: str) -> None:
    text = (ROOT / name).read_text()
    assert line in text
    if name == "CHANGELOG.md":
        assert re.findall(r"^## .*", text, re.MULTILINE)[0].startswith(line)  # the newest one


def test_the_command_says_the_version() -> None:
    told = subprocess.run([sys.executable, "-m", "matex_data", "--version"], capture_output=True, text=True, check=True)
    assert told.stdout == f"matex_data {VERSION}\n"


def test_the_import_needs_two_packages() -> None:
    told = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout == "['matex_data', 'mpi4py', 'numpy']\n"


def test_no_requirement_is_said_twice() -> None:
    extras = SETUP["options.extras_require"]
    required = [line for line in SETUP["options"]["install_requires"].split("\n") if line]
    lowest: dict[str, set[str]] = {}
    for line in [*required, *(line for text in extras.values() for line in text.split("\n") if line)]:
        name, bounds = re.fullmatch(r"([\w.-]+(?:\[[\w,]*\])?)(.*)", line).groups()  # type: ignore[union-attr]
        lowest.setdefault(name.lower(), set()).add(bounds)
    assert {name: bounds for name, bounds in lowest.items() if len(bounds) > 1} == {}
    for name, text in extras.items():
        given = _requirements(name) if "matex_data[" in text else required
        own = [line for line in text.split("\n") if line and "matex_data[" not in line]
        assert (name, set(own) & {*given, *required}) == (name, set())


def _requirements(extra: str) -> set[str]:
    """Return the requirements of the extras that an extra names, and of those that they name."""
    lines: set[str] = set()
    for names in re.findall(r"matex_data\[(.*)\]", SETUP["options.extras_require"][extra]):
        for name in names.split(","):
            lines |= set(SETUP["options.extras_require"][name].split("\n")) | _requirements(name)
    return lines - {""}


def test_the_page_of_versions_has_the_lower_bounds() -> None:
    sections = [SETUP["options"]["install_requires"], *SETUP["options.extras_require"].values()]
    bounds = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(sections), re.MULTILINE))
    said = re.findall(r"^\| `([\w-]+)` \| ([\d.]+)", (ROOT / "docs" / "versions.md").read_text(), re.MULTILINE)
    assert dict(said) == {name: bounds[name] for name, _ in said}
    needed = "\n".join([sections[0], *_requirements("all")])
    assert set(re.findall(r"^([\w-]+)>=", needed, re.MULTILINE)) <= dict(said).keys()


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Return the unpacked source distribution, the wheel made of it, and the tree that both were made of.

    Setuptools runs without isolation, as there may be no network.
    """
    folder = tmp_path_factory.mktemp("distributions")
    tree = folder / "tree"
    tree.mkdir()
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=False)
    if listed.returncode or not listed.stdout:
        pytest.skip("no git repository here, which knows the files of the source distribution")
    for name in filter(lambda name: (ROOT / name).exists(), listed.stdout.strip("\0").split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    (tree / "sample_data" / "digits").mkdir()
    (tree / "sample_data" / "digits" / "made.h5").touch()  # by make demo
    (tree / "stray.bin").touch()
    with tarfile.open(_build("sdist", tree, folder)) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"matex_data-{VERSION}", _build("wheel", folder / f"matex_data-{VERSION}", folder), tree


def _build(kind: str, tree: Path, folder: Path) -> Path:
    code = f"import sys\nfrom setuptools import build_meta\nprint(build_meta.build_{kind}(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=machine_speed.scaled(120))
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


def test_the_source_distribution_has_all_files_and_no_others(distributions: tuple[Path, Path, Path]) -> None:
    source, _, tree = distributions
    tracked = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    held = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    made = ("PKG-INFO", "matex_data.egg-info/", "build/")  # by setuptools
    assert {name for name in held - tracked if not name.startswith(made)} == set()
    assert tracked - held == {".gitignore", "sample_data/digits/made.h5", "stray.bin"}


def test_the_wheel_has_the_package_and_no_more(distributions: tuple[Path, Path, Path]) -> None:
    source, wheel, _ = distributions
    assert wheel.name == f"matex_data-{VERSION}-py3-none-any.whl"
    rooms = {"matex_data": "matex_data", "readers": "matex_data/readers", "training": "matex_data/training"}
    rooms["sample_data"] = "matex_data/_sample_data"
    wanted = {
        f"{room}/{path.relative_to(source / folder).as_posix()}"
        for folder, room in rooms.items()
        for path in (source / folder).rglob("*")
        if path.suffix in (".py", ".typed", ".toml", ".npz")
    }
    about = f"matex_data-{VERSION}.dist-info/"
    wanted |= {about + name for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt")}
    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) == wanted | {f"{about}licenses/LICENSE"}
        metadata = Parser().parsestr(archive.read(f"{about}METADATA").decode())
        assert archive.read(f"{about}top_level.txt") == b"matex_data\n"
    assert (metadata["Version"], metadata["License-Expression"]) == (VERSION, "Apache-2.0")
    assert len(metadata["Summary"]) < 120


@pytest.mark.slow  # 60 s: an environment of its own, where TensorFlow starts in three processes
def test_the_wheel_trains_without_a_compiler(distributions: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Install the wheel beside the other packages, without this repository; the folder has a blank in its name."""
    source, wheel, _ = distributions
    folder = tmp_path / "an environment"
    venv.create(folder, with_pip=True, symlinks=True)
    python, bin_ = folder / "bin" / "python", folder / "bin"
    variables = {**environment(), "PATH": str(bin_), "HOME": str(tmp_path), "CC": "no-compiler", "CXX": "no-compiler"}
    variables.pop("PYTHONPATH")
    variables.setdefault("LD_LIBRARY_PATH", str(Path(sys.prefix, "lib")))  # MPI may be installed beside the packages

    def run(*command: str | Path) -> str:
        text = [str(part) for part in command]
        done = subprocess.run(
            text, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=machine_speed.scaled(300)
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    beside = [path for path in sys.path if path.endswith("-packages")]
    (packages / "beside.pth").write_text("\n".join(beside))  # of a path that is added so, no .pth file is read
    assert run(bin_ / "matex", "--version") == f"matex_data {VERSION}\n"
    assert run(python, "-c", "import matex_data; print(matex_data.__file__)").startswith(str(packages))
    write_digits(tmp_path / "digits")
    launcher, two = mpiexec(), ("-n", "2", python)
    example = (source / "examples" / "digits.py", "--files", tmp_path / "digits" / "*.h5", "--epochs", "8")
    told = run(launcher, *two, *example)
    assert float(told.rpartition("held-out accuracy: ")[2]) > 0.9
    (tmp_path / "warnings.py").write_text(WARNINGS)
    code = re.findall(r"```python\n(.*?)```", (source / "README.md").read_text(), re.DOTALL)[0]
    (tmp_path / "train.py").write_text(code)
    told = run(launcher, *two, "-X", "dev", tmp_path / "warnings.py", tmp_path / "train.py")
    assert "accuracy" in told
    assert "warning: " not in told
    assert "self-check" not in told  # of a model of Keras's own layers nothing has to be checked
