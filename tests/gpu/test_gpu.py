"""The script behind ``make test-gpu``, as far as it runs without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.gpu import __main__ as script
from tests.support.launch import ROOT


def test_without_a_gpu_it_says_so_in_a_line_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "_gpus", lambda: 0)
    assert script.main([]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert re.fullmatch("make test-gpu: TensorFlow sees no GPU here, so nothing was tested;.*\n", found.err)


@pytest.mark.parametrize(("error", "code"), [(1e-3, 0), (0.5, 1), (np.nan, 1)])
def test_wrong_weights_are_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: float, code: int
) -> None:
    def job(ranks: int, environment: dict[str, str], name: str, *arguments: str, transport: str = "mpi") -> str:
        if arguments[-1].endswith(".npz"):
            assert ("CUDA_VISIBLE_DEVICES" in environment) == (ranks == 0)
            with Path(arguments[-1]).open("wb") as file:
                np.savez(file, np.array([1.0, 1.0 + (error if transport == "tensorflow" else 0.0)]))
        return "1 ms"

    monkeypatch.setattr(script, "_gpus", lambda: 1)
    monkeypatch.setattr(script, "_job", job)
    assert script.main(["--steps", "2"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("WRONG") for line in lines) == 2 * code


@pytest.mark.slow
def test_all_measurements_run_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--device", "cpu", "--steps", "2", "--width", "16"]) == 0
    assert "tensorflow" in capsys.readouterr().out


def test_the_target_is_in_the_makefile_and_explained() -> None:
    assert re.search("^test-gpu:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert "`make test-gpu`" in (ROOT / "CONTRIBUTING.md").read_text()
