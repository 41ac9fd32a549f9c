"""Typical scripts: under ``matex run`` each has the weights and the printed numbers of plain Python.

Up to three selected scripts run in one job for each number of ranks, see `tests.support.script_driver`.
``fit`` has scripts that call ``fit``, which shards the data; ``loops`` has loops over a script's own data, which stays
whole on every rank; ``sharded`` has loops with ``training.shard``; ``planted`` has errors that the self-check finds.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.support.launch import ROOT, Hung, run_script

pytestmark = pytest.mark.shares_jobs("script")

SCRIPTS = Path(__file__).parent / "scripts"
DRIVER = ROOT / "tests" / "support" / "script_driver.py"
LAUNCHER = "from matex_data.training.launcher.run import main; main()"
PLAIN = 0  # in place of a number of ranks: Python without the launcher

WHOLE = r"runs with the whole batch on every rank"
SHARD = r"matex_data\.training\.shard\("
AGREES = r"self-check: .* (agree|is proven)"
DIFFERS = r"self-check: .* (differ|cannot be trained on shards)"

SCRIPTS_PER_JOB = 3
"""Scripts in one job; the first test of a job waits for all of them."""
SECONDS = 140.0
"""Time limit of a job, with those that continue after failures; twice this is within the limit of one test."""

FOLDERS = ("fit", "loops", "sharded", "planted")
MODULES = {"small_networks"}  # imported by a script
ALONE = {"loops/session_v1"}  # changes TensorFlow for good
NOISE = re.compile(r"^(WARNING: All log messages before absl|I0000 ).*\n", re.MULTILINE)  # of TensorFlow's start
RANK_DEPENDENT = {"planted/rank_branch"}  # no weights of plain Python can be expected
MENDED = {"planted/sum_function", "planted/table_of_batch_size"}  # may be made exact instead of being reported

LOOSER = {
    "fit/mixed_precision": 2e-2,  # gradients of shards are rounded to 16 bits before they are averaged
}
"""Tolerances, relative to the largest element of an array, for sums over shards that are not exact to 32 bits."""


def names(folder: str) -> list[str]:
    """Return the scripts of a folder, as ``folder/name``."""
    return [f"{folder}/{path.stem}" for path in sorted((SCRIPTS / folder).glob("*.py")) if path.stem not in MODULES]


@dataclass(frozen=True)
class Outcome:
    """Files of a script, and its error; None if it ended without error on all ranks."""

    folder: Path
    error: str | None

    def results(self) -> list[str]:
        """Return the lines of rank 0 that begin with RESULT."""
        return re.findall("^RESULT .*", (self.folder / "stdout").read_text(), re.MULTILINE)

    def stderr(self, rank: int | str = "*") -> str:
        """Return the standard error of one rank, or of all, while the script ran."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob(f"stderr.{rank}")))

    def weights(self) -> dict[str, Any]:
        """Return the arrays that the script saved, by name."""
        return {
            key: array
            for path in sorted(self.folder.iterdir())
            for key, array in _arrays(path).items()
            if path.name.startswith("x.weights.h5")
        }

    def variables(self) -> list[dict[str, Any]]:
        """Return the variables of each rank."""
        return [_arrays(path) for path in sorted(self.folder.glob("variables.*.npz"))]


@dataclass(frozen=True)
class Job:
    """Scripts of one folder run by one job; ``stderr`` has the output outside of the scripts."""

    outcomes: dict[str, Outcome]
    stderr: str

    def messages(self) -> str:
        """Return the standard error of all ranks and scripts."""
        return self.stderr + "".join(outcome.stderr() for outcome in self.outcomes.values())


class Jobs:
    """Jobs of this test session; each runs at its first use."""

    def __init__(self, folder: Path, selected: Sequence[str]) -> None:
        self._folder = folder
        self._selected = set(selected)
        self._done: dict[tuple[object, ...], Job] = {}

    def of(self, script: str, ranks: int) -> Job:
        """Return the job of a script and other selected ones."""
        if script in ALONE:
            return self.run([script], ranks)
        every = [name for folder in FOLDERS for name in names(folder)]
        selected = [name for name in every if name in self._selected and name not in ALONE]
        first = selected.index(script) // SCRIPTS_PER_JOB * SCRIPTS_PER_JOB
        return self.run(selected[first : first + SCRIPTS_PER_JOB], ranks)

    def run(self, scripts: list[str], ranks: int) -> Job:
        """Run scripts in one job, and in another after a script that ended the job."""
        key = (ranks, *scripts)
        if key not in self._done:
            folder = self._folder / f"{ranks}-{len(self._done)}"
            self._done[key] = _run(scripts, ranks, folder)
        return self._done[key]


def _run(scripts: list[str], ranks: int, folder: Path) -> Job:
    outcomes: dict[str, Outcome] = {}
    messages, waiting, end = "", list(scripts), time.monotonic() + SECONDS
    while waiting:
        stderr = _start(waiting, ranks, folder, max(5.0, end - time.monotonic()))
        messages += stderr
        while waiting:
            name = waiting.pop(0)
            done = len(list((folder / name).glob("done.*"))) == max(ranks, 1)
            failed = sorted((folder / name).glob("error.*"))
            text = failed[0].read_text() if failed else f"the job ended, or its {SECONDS:g} s:\n{stderr[-4000:]}"
            outcomes[name] = Outcome(folder / name, None if done else text)
            if not done and ranks != PLAIN and time.monotonic() < end:
                break  # the job ended here
    return Job(outcomes, messages)


def _start(scripts: list[str], ranks: int, folder: Path, limit: float) -> str:
    """Run the driver; return its standard error."""
    command, variables = [LAUNCHER, str(DRIVER)], {"MATEX_TIMEOUT": "30"}
    if ranks == PLAIN:
        command, variables = [DRIVER], {"MATEX_DRIVER_PLAIN": "1"}
    paths = [str(SCRIPTS / f"{name}.py") for name in scripts]
    try:
        stderr = run_script(ranks, *command, str(folder), *paths, timeout=limit, env=variables).stderr
    except Hung as error:
        stderr = str(error)
    return NOISE.sub("", stderr)


def _arrays(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if path.suffix == ".h5":
        with h5py.File(path) as file:
            file.visititems(lambda key, item: found.update({key: item[()]}) if isinstance(item, h5py.Dataset) else None)
    elif path.suffix == ".npz":
        with np.load(path) as arrays:
            found.update(arrays)
    return {key: array for key, array in found.items() if "seed_generator" not in key}


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Jobs:
    """Return the jobs of the scripts for which a test is selected."""
    own = [item for item in request.session.items if item.path == Path(__file__)]
    called = [getattr(item, "callspec", None) for item in own]
    selected = [call.params["script"] for call in called if call is not None and "script" in call.params]
    return Jobs(tmp_path_factory.mktemp("scripts"), selected)


QUICK = {
    *("fit/train_step_metrics", "fit/two_outputs"),
    *("loops/autograph_loop", "loops/batch_norm"),
    *("sharded/clip_by_hand", "sharded/fit_of_both", "sharded/uneven_last_batch"),
    *("planted/contrastive", "planted/rank_branch"),
}
"""Scripts that run by default, on two ranks; ``make test-all`` runs the others, and other numbers of ranks."""


def cases(*folders: str, ranks: Sequence[int] = (2, 3)) -> list[Any]:
    """Return the scripts of folders with numbers of ranks; mark those as slow that do not run by default."""
    return [
        pytest.param(name, size, marks=() if size == 2 and name in QUICK else pytest.mark.slow)
        for folder in folders
        for name in names(folder)
        for size in ranks
    ]


def check_equal(script: str, found: Outcome, expected: Outcome) -> None:
    """Compare printed numbers, saved arrays and the variables of all ranks with those of plain Python."""
    tolerance = LOOSER.get(script, 1e-5 if script.startswith("loops/") else 2e-4)
    assert expected.error is None, f"plain Python:\n{expected.error}"
    assert found.error is None, found.error
    lines, reference = found.results(), expected.results()
    assert lines
    assert len(lines) == len(reference), "rank 0 alone prints, once"
    for mine, its in zip(lines, reference, strict=True):
        assert mine.split()[1] == its.split()[1]
        numbers = [[float(word) for word in line.split()[2:]] for line in (mine, its)]
        np.testing.assert_allclose(*numbers, rtol=tolerance, atol=2e-6, err_msg=mine)
    weights, wanted = found.weights(), expected.weights()
    assert wanted
    _check_arrays(weights, wanted, tolerance)
    for rank, arrays in enumerate(found.variables()):
        _check_arrays(arrays, expected.variables()[0], tolerance, f"rank {rank}: ")


def _check_arrays(found: dict[str, Any], expected: dict[str, Any], tolerance: float, where: str = "") -> None:
    assert found.keys() == expected.keys(), where
    for key, array in expected.items():
        assert np.isfinite(found[key]).all(), f"{where}{key}"
        scale = np.abs(array).max(initial=0.0)
        np.testing.assert_allclose(
            found[key], array, rtol=tolerance, atol=tolerance / 4 * scale + 1e-7, err_msg=where + key
        )


@pytest.mark.parametrize(("script", "ranks"), cases("fit", "loops", "sharded", ranks=(1, 2, 3)))
def test_results_equal_plain_python(script: str, ranks: int, jobs: Jobs) -> None:
    found = jobs.of(script, ranks).outcomes[script]
    check_equal(script, found, jobs.of(script, PLAIN).outcomes[script])
    assert not re.search(DIFFERS, found.stderr())
    if not script.startswith("loops/"):
        assert not re.search(WHOLE, found.stderr())
    elif ranks > 1:
        assert re.search(WHOLE, jobs.of(script, ranks).messages())


@pytest.mark.parametrize(("script", "ranks"), cases("planted"))
def test_the_self_check_finds_a_planted_error(script: str, ranks: int, jobs: Jobs) -> None:
    """Training continues with whole batches, so the weights equal those of plain Python."""
    found = jobs.of(script, ranks).outcomes[script]
    if script in RANK_DEPENDENT:
        assert "the ranks have different weights" in str(found.error)
    else:
        check_equal(script, found, jobs.of(script, PLAIN).outcomes[script])
        assert found.error is None, found.error
    if script not in MENDED:
        assert re.search(DIFFERS, found.stderr(0)), found.stderr()
    assert not re.search("self-check", "".join(found.stderr(rank) for rank in range(1, ranks)))


@pytest.mark.parametrize(("script", "ranks"), [("fit/two_outputs", 2)])
def test_the_self_check_reports_equal_gradients(script: str, ranks: int, jobs: Jobs) -> None:
    job = jobs.of(script, ranks)
    assert len(re.findall(AGREES, job.messages())) >= 1
    assert not re.search("self-check", "".join(job.outcomes[script].stderr(rank) for rank in range(1, ranks)))


@pytest.mark.parametrize(
    ("script", "ranks"),
    [pytest.param(name, 2, marks=pytest.mark.slow) for name in names("loops")],
)
def test_a_loop_over_its_own_data_is_reported_once(script: str, ranks: int, jobs: Jobs) -> None:
    job = jobs.run([script], ranks)
    assert job.outcomes[script].error is None, job.outcomes[script].error
    messages = job.messages()
    assert len(re.findall(WHOLE, messages)) == 1, messages
    if not script.startswith("loops/session"):  # sessions have no dataset
        assert len(re.findall(SHARD, messages)) == 1, messages
    assert not re.search(WHOLE, "".join(job.outcomes[script].stderr(rank) for rank in range(1, ranks)))
