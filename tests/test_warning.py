"""Warnings name the line of the user's own code, whatever lies between."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.io
from mpi4py import MPI

import matex_data as md
from matex_data.warning import quiet, warn
from tests.support.ranks import Pool


@contextmanager
def _warning_at_its_end() -> Iterator[None]:
    yield
    warn("at the end")


def test_frames_of_libraries_are_passed_over() -> None:
    with pytest.warns(UserWarning, match="in a library") as seen:
        sorted([2, 1], key=lambda _: warn("in a library") or 0)
        np.apply_along_axis(lambda row: warn("in a library") or row, 0, np.zeros((1, 1)))
    assert {one.filename for one in seen} == {__file__}
    with pytest.warns(UserWarning, match="at the end") as seen, _warning_at_its_end():
        pass
    assert seen[0].filename == __file__


def test_what_opening_says_is_said_where_the_user_opens(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,n\n1,a\n")
    (tmp_path / "b.csv").write_text("x\n2\n")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(2):
            md.open_dataset(tmp_path)
            line = sys._getframe().f_lineno - 1
    assert [(one.filename, one.lineno) for one in seen] == [(__file__, line)]
    assert "fields that files or samples lack" in str(seen[0].message)


def _opened_strictly(comm: MPI.Intracomm, path: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            md.open_dataset(path, comm=comm)
        except UserWarning as error:
            return str(error)
    return ""


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.rank_counts(3)
def test_a_warning_that_is_an_error_is_one_on_all_ranks(pool: Pool, suffix: str, tmp_path: Path) -> None:
    for name, frame in {"a": pd.DataFrame({"x": [1], "n": ["a"]}), "b": pd.DataFrame({"x": [2]})}.items():
        path = tmp_path / f"{name}.{suffix}"
        frame.to_csv(path, index=False) if suffix == "csv" else frame.to_parquet(path)
    said = pool.run(_opened_strictly, str(tmp_path), timeout=30)
    assert len(set(said)) == 1 and "'n' in 1 of 2 files" in said[0]


def _in_a_thread(function: Any, *arguments: Any) -> None:
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    thread.join()


def test_what_other_threads_filter_and_say_meanwhile_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: Any, load: Any = scipy.io.loadmat, **options: Any) -> Any:
        _in_a_thread(warnings.filterwarnings, "ignore", "of the user")
        return load(*arguments, **options)

    scipy.io.savemat(tmp_path / "x.mat", {"x": np.arange(3.0)[:, None]})
    monkeypatch.setattr(scipy.io, "loadmat", load)
    assert md.open_dataset(tmp_path / "x.mat").load()["x"].tolist() == [0, 1, 2]
    assert any(message and message.pattern == "of the user" for _, message, *_ in warnings.filters)
    with pytest.warns(UserWarning) as seen, quiet():
        warn("said before")
        _in_a_thread(warn, "of another thread")
    assert [str(one.message) for one in seen] == ["of another thread"]
