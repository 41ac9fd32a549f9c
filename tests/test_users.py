"""Short scripts of users in eight fields, with data that their libraries write: they learn, and alike on two ranks."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest

from examples.users.make import MAKERS
from tests.support.launch import run_script

ROOT = Path(__file__).parent.parent / "examples" / "users"
LAUNCHER = "from matex_data.training.launcher.run import main; main()"
LEARNED = {
    "lcls": lambda found: found["accuracy"] > 0.95,
    "era5": lambda found: found["error"] < found["persistence"],
    "atoms": lambda found: found["error"] < 0.6 * found["deviation"],
    "microscopy": lambda found: found["accuracy"] > 0.9,
    "churn": lambda found: found["auc"] > 0.7,
    "nanoaod": lambda found: found["accuracy"] > 0.7,
    "photos": lambda found: found["accuracy"] > 0.9,
}


def _result(output: str) -> dict[str, float]:
    (line,) = [line for line in output.splitlines() if line.startswith("RESULT")]
    words = line.split()[1:]
    return dict(zip(words[::2], map(float, words[1::2]), strict=True))


def _written(folder: Path) -> pd.DataFrame | None:
    """Return the predictions that a script has written back."""
    if (folder / "hits.h5").exists():
        with h5py.File(folder / "hits.h5") as file:
            return pd.DataFrame({name: np.ravel(file[name]) for name in ("event_time", "gmd/energy", "prediction")})
    if (folder / "scores.csv").exists():
        return pd.read_csv(folder / "scores.csv")
    return pd.read_parquet(folder / "scores.parquet") if (folder / "scores.parquet").exists() else None


@pytest.mark.slow  # networks as a whole; tests/test_loops.py has those of Lightning and Flax
@pytest.mark.parametrize("kind", LEARNED)
def test_a_script_learns_and_two_ranks_train_as_one(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    MAKERS[kind](tmp_path / "data")
    results, tables = [], []
    for ranks in (0, 2):
        launched = (LAUNCHER, str(ROOT / f"{kind}.py")) if kind == "photos" and ranks else (ROOT / f"{kind}.py",)
        done = run_script(ranks, *launched, str(tmp_path / "data"), timeout=200)
        assert done.returncode == 0, done.stderr
        results.append(_result(done.stdout))
        tables.append(_written(tmp_path / "data"))
    assert LEARNED[kind](results[0]), results
    for name, value in results[0].items():
        assert results[1][name] == pytest.approx(value, rel=0.02, abs=0.02)
    if tables[0] is not None:
        pd.testing.assert_frame_equal(*tables, atol=1e-3)
        assert tables[0].iloc[:, 0].is_unique or kind == "nanoaod"  # whose files number events alike
