"""Progress of ``fit`` in a terminal and in a log."""

from __future__ import annotations

import re
import sys

import keras
import numpy as np
import pytest

from matex_data.training import progress


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
