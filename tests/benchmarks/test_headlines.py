"""The case ``headlines`` runs: each network in one process and under ``matex run``, at small sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cases import headlines as case
from benchmarks.cases.reading import Setup
from benchmarks.readers import headlines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("photographs")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", case.NETWORKS)
def test_a_network_is_measured(folder: Path, name: str) -> None:
    measured = case.measure(Setup(folder, 1, True), name)
    assert [row[0].split(",")[0] for row in measured.rows] == ["one process", *["matex run"] * (len(measured.rows) - 1)]
    assert len(measured.rows) == (3 if case.NETWORKS[name].of_files else 2)
    batch = int(measured.title.split("batch ")[1].split(",")[0])
    for row in measured.rows:
        assert float(row[1]) * float(row[2]) / 1e3 == pytest.approx(batch, rel=0.02) and row[-1].endswith("%")
    assert measured.rows[-1][-2] != "0%"  # ranks average


@pytest.mark.parametrize(("name", "weights"), [("alexnet", 58_322_314), ("googlenet", 5_983_802)])
def test_networks_have_the_weights_of_the_papers(name: str, weights: int) -> None:
    """Compare with sums by hand: those of 1,000 classes are 62.4 million without groups, and 7.0 million."""
    assert getattr(headlines, name)(224).count_params() == weights
