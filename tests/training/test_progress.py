"""Progress of ``fit`` and of checkpoints in a terminal and in a log."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import matex_data as md
from matex_data.training import progress
from tests.support.ranks import Pools


def _printed(capsys: pytest.CaptureFixture[str], verbose: str | int) -> str:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    bar = progress.ThroughputBar(lambda: 0)
    model.fit(np.ones((8, 3)), np.ones((8, 1)), batch_size=2, epochs=2, verbose=verbose, callbacks=[bar])
    return capsys.readouterr().out


def test_lines_in_a_log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    lines = _printed(capsys, "auto").splitlines()
    assert [line.split(",")[0] for line in lines if line.startswith("step")] == [
        f"step {i}/4" for i in (1, 2, 3, 4)
    ] * 2
    assert re.fullmatch(r"step 1/4, samples/s: 0, waiting for data %: \d+, \d+ s left", lines[1])
    assert sum(line.startswith("4/4") and "samples/s" in line for line in lines) == 2


def test_a_line_an_epoch_while_epochs_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    printed = _printed(capsys, "auto")
    assert "step 1/4" not in printed and "\r" not in printed and "\x1b" not in printed


def test_a_bar_in_a_terminal_and_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "━" in _printed(capsys, 1)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "━" in _printed(capsys, "auto")
    assert _printed(capsys, 0) == ""


def _fit(comm: Any, folder: Path, verbose: str | int) -> str:
    """Train with a checkpoint, whose progress is printed after each array; return the output."""
    output = io.StringIO()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((np.ones((8, 3)), np.ones((8, 1))))
    epochs = 1 + len(list(folder.glob("*.npz")))
    with mock.patch.multiple(progress, LINE_SECONDS=0.0, LONG_SECONDS=0.0), contextlib.redirect_stdout(output):
        md.training.fit(model, data, epochs=epochs, checkpoint=folder, verbose=verbose, comm=comm)
    return output.getvalue()


@pytest.mark.parametrize("verbose", ["auto", 0])
def test_checkpoints_have_lines_in_the_log_of_rank_0(ranks: Pools, tmp_path: Path, verbose: str | int) -> None:
    first, *others = ranks(2).run(_fit, tmp_path, verbose, timeout=60)
    resumed = ranks(2).run(_fit, tmp_path, verbose, timeout=60)[0]
    assert others == [""]
    if verbose == 0:
        assert first == resumed == ""
        return
    *parts, whole = [line for line in first.splitlines() if line.startswith("writing training.npz: ")]
    assert len(parts) >= 3 and re.fullmatch(r"writing training\.npz: [1-9]\d* B, 0 s", parts[0])
    assert re.fullmatch(r"writing training\.npz: [1-9]\d* B in 0 s", whole)
    for action in ("checking", "restoring", "writing"):  # the file has a size now
        assert re.search(rf"^{action} training\.npz: \d+ B of [\d.]+ kB, 0 s$", resumed, re.MULTILINE)


def test_a_long_checkpoint_is_shown_in_a_terminal_and_removed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress.CheckpointProgress("writing", Path("a.npz"), 4_000_000) as short:
        short.add(10)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(progress, "BAR_SECONDS", 0.0)
    with progress.CheckpointProgress("writing", Path("a.npz"), 4_000_000) as long:
        long.add(1_000_000)
    shown = capsys.readouterr().out
    assert shown.startswith("\r") and "writing a.npz" in shown and "1.0/4.0 MB" in shown
    assert shown.endswith("\x1b[2K")  # the line is erased
