"""``matex run`` imports TensorFlow when the script does, and patches it then."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from matex_data.training.launcher.imports import after_import
from tests.support.launch import run_script

LAUNCHER = "from matex_data.training.launcher.run import main; main()"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make ``outer``, which imports ``inner``, and ``broken``."""
    (tmp_path / "outer_package").mkdir()
    (tmp_path / "outer_package" / "__init__.py").write_text("import inner_module\nready = True\n")
    (tmp_path / "outer_package" / "sub.py").touch()
    (tmp_path / "inner_module.py").touch()
    (tmp_path / "broken_module.py").write_text("import inner_module\n1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    yield
    assert sys.meta_path == finders  # a finder that has called is gone
    for name in ("outer_package", "outer_package.sub", "inner_module", "broken_module"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("statement", ["import outer_package", "from outer_package import sub"])
def test_the_call_comes_after_the_outermost_import_and_before_the_next_statement(statement: str) -> None:
    calls: list[str] = []
    after_import(("inner_module", "outer_package"), lambda: calls.append(f"first {sys.modules['outer_package'].ready}"))
    after_import(("inner_module", "outer_package"), lambda: calls.append("second"))
    namespace = {"calls": calls}
    exec(f"{statement}\nnumber = len(calls)\nimport inner_module", namespace)
    assert namespace["number"] == 2 and sorted(calls) == ["first True", "second"]
    after_import(("inner_module",), lambda: calls.append("at once"))
    assert calls[-1] == "at once"


@pytest.mark.usefixtures("packages")
def test_an_import_that_fails_leaves_the_call_to_the_next_one() -> None:
    calls: list[str] = []
    after_import(("broken_module", "outer_package"), lambda: calls.append("called"))
    with pytest.raises(ZeroDivisionError):
        import broken_module  # noqa: F401
    assert calls == []
    import outer_package  # noqa: F401

    assert calls == ["called"]


WITHOUT_TENSORFLOW = """
import os, random, sys, time
from pathlib import Path
import numpy as np
import pandas
import matex_data as md
loaded = "tensorflow" in sys.modules or "keras" in sys.modules
numbers = random.random(), np.random.rand(), np.random.default_rng().random(), time.time()
Path("result.txt").write_text(repr(numbers))
print("LOADED", loaded)
from mpi4py import MPI
assert len(set(MPI.COMM_WORLD.allgather(numbers))) == 1
assert md.open_dataset({"x": np.arange(10)}).statistics("x").count == 10
assert "tensorflow" not in sys.modules
assert pandas.Timestamp("2020-01-01").isoformat()[:4] == "2020"
"""


def test_a_script_that_never_imports_tensorflow_runs_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(WITHOUT_TENSORFLOW)
    done = run_script(2, LAUNCHER, str(tmp_path / "script.py"), forked=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("LOADED False") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.txt", "script.py"]


AFTER_ANOTHER_LIBRARY = """
import sys
sys.path.insert(0, sys.argv[1])
import other_library
import keras
import numpy as np
keras.utils.set_random_seed(1)
x = np.random.rand(16, 3)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, x.sum(axis=1), batch_size=4, epochs=2, verbose=0)
model.save("model.keras")
from mpi4py import MPI
same = len({str(w) for w in MPI.COMM_WORLD.allgather(model.get_weights())})
print("RESULT", same, *(f"{w:.5f}" for w in np.ravel(model.get_weights()[0])))
"""
NOT_AFTER_TENSORFLOW = "import sys\nassert not {'tensorflow', 'keras'} & set(sys.modules), 'loaded before'\n"


def test_libraries_of_the_script_are_loaded_before_tensorflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other_library.py").write_text(NOT_AFTER_TENSORFLOW)
    (tmp_path / "script.py").write_text(AFTER_ANOTHER_LIBRARY)
    (tmp_path / "any").mkdir()
    (tmp_path / "any" / "other_library.py").write_text("# may be loaded at any time\n")
    done = run_script(2, LAUNCHER, str(tmp_path / "script.py"), str(tmp_path), forked=False, timeout=200)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    alone = run_script(0, AFTER_ANOTHER_LIBRARY, str(tmp_path / "any"), timeout=200)
    (expected,) = [line for line in alone.stdout.splitlines() if line.startswith("RESULT")]
    np.testing.assert_allclose(*(np.array(text.split()[1:], float) for text in (line, expected)), atol=1e-4)


ON_RANK_0_ALONE = """
import matex_data as md
if md.training.world().rank == 0:
    import tensorflow
md.training.world()
print("ENDED")
"""


@pytest.mark.slow  # another start of TensorFlow
@pytest.mark.parametrize("strategy", ["chained", "concurrent"])  # whose threads have communicators of their own
def test_one_rank_alone_may_import_tensorflow(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "script.py").write_text(ON_RANK_0_ALONE)
    options = ["--strategy", strategy, "--all-output", str(tmp_path / "script.py")]
    done = run_script(2, LAUNCHER, *options, forked=False, timeout=100)
    assert done.returncode == 0 and done.stdout.count("ENDED") == 2, done.stderr


def test_an_error_of_the_patches_ends_the_job_also_where_the_script_handles_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("try:\n    import keras\nexcept Exception:\n    print('WENT ON')\n")
    code = "from matex_data.training.launcher import run\nrun._add_matex_data_set = lambda: 1 / 0\nrun.main()"
    done = run_script(1, code, str(tmp_path / "script.py"), timeout=100)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr and "WENT ON" not in done.stdout
