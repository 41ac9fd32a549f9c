"""The command line."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image
from rich.table import Table

import matex_data as md
from matex_data.cli import planning
from matex_data.cli.commands import _plain_speed, main
from matex_data.cli.report import report
from tests.support.launch import run_script

CALL = "import sys; from matex_data.cli.commands import main; sys.argv[0] = 'matex'; main()"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("cli") / "events.h5"
    with h5py.File(path, "w") as file:
        energy = np.arange(500, dtype="f4")
        energy[7] = np.nan
        file["energy"] = energy
        file["energy"].attrs["units"] = "GeV"
        file.create_dataset("hits", data=np.ones((500, 30)), chunks=(50, 30), fletcher32=True)
    return str(path)


def test_output_that_goes_to_a_file_has_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table("field", "description")
    table.add_row("energy", "of each photon, " * 10)
    for columns, width in (("40", 80), ("100", 100)):
        monkeypatch.setenv("COLUMNS", columns)
        with report() as made:
            made.print(table)
        assert max(map(len, capsys.readouterr().out.splitlines())) == width


def test_inspect(path: str) -> None:
    done = run_script(1, CALL, "inspect", path)
    assert done.returncode == 0, done.stderr
    for text in ("hdf5: 500 samples in 1 file;", "energy", "float32", "(30,)", "GeV", "blocks a window", "first sam"):
        assert text in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if line[:1] in "│┃") <= 80


def test_inspect_shows_the_tree_of_a_file_that_is_no_data_set_yet(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["run/image"], file["run/edges"] = np.zeros((10, 4)), np.zeros(11)
    done = run_script(2, CALL, "inspect", str(tmp_path / "a.h5"))
    assert done.returncode == 1 and "different numbers of samples" in done.stderr
    assert done.stdout.count("image  (10, 4) float64") == 1 and "edges  (11,) float64" in done.stdout


def test_inspect_writes_pictures_pages_and_json(path: str, tmp_path: Path) -> None:
    picture, page = tmp_path / "samples.png", tmp_path / "page.html"
    done = run_script(2, CALL, "inspect", path, "--plot", str(picture), "--html", str(page))
    assert done.returncode == 0, done.stderr
    with Image.open(picture) as image:
        assert image.width > 500
    text = page.read_text()
    assert "500 samples" in text and "<img alt=" in text and "http" not in text
    done = run_script(1, CALL, "inspect", path, "--json", "--option", "names=energy")
    assert done.returncode == 1 and "option" in done.stderr
    done = run_script(1, CALL, "inspect", path, "--json")
    facts = json.loads(done.stdout)
    assert (facts["samples"], facts["bytes_per_sample"], facts["format"]) == (500, 244, "hdf5")
    assert facts["first"]["energy"] == ["0.0", "1.0", "2.0"]


def test_stats_are_those_of_numpy(path: str) -> None:
    done = run_script(3, CALL, "stats", path, "--json")
    assert done.returncode == 0, done.stderr
    energy = json.loads(done.stdout)["energy"]
    expected = np.delete(np.arange(500.0), 7)
    assert energy["mean"] == pytest.approx(expected.mean()) and energy["std"] == pytest.approx(expected.std())
    assert (energy["count"], energy["missing"], energy["max"]) == (499, 1, 499)


def test_statistics_without_values_are_null(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["none"], file["infinite"] = np.full(4, np.nan), np.array([1.0, 2.0, 3.0, np.inf])
    done = run_script(1, CALL, "stats", str(tmp_path / "a.h5"), "--json")
    assert done.returncode == 0, done.stderr

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    found = json.loads(done.stdout, parse_constant=refuse)
    assert found["none"] == dict.fromkeys(("mean", "std", "min", "max")) | {"count": 0, "missing": 4}
    assert (found["infinite"]["min"], found["infinite"]["max"]) == (1, None)


def test_plan(path: str, tmp_path: Path) -> None:
    options = ("--ranks", "20", "--batch-size", "100", "--ranks-per-node", "4")
    done = run_script(2, CALL, "plan", path, *options, "--json", "--plot", str(tmp_path / "plan.png"))
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["steps"] == 5 and figures["bytes_per_node"] == 4 * figures["bytes_per_rank"]
    assert figures["amplification"] >= 1
    with Image.open(tmp_path / "plan.png") as picture:
        assert picture.width > picture.height
    done = run_script(1, CALL, "plan", path, *options, "--shuffle", "all")
    assert done.returncode == 1 and "unknown shuffle" in done.stderr


@pytest.mark.parametrize("unknown", [0.0, np.nan])
def test_figures_that_are_unknown_are_drawn(path: str, unknown: float) -> None:
    known = md.open_dataset(path, inputs="energy").read_plan(100, ranks=1)
    costs = [replace(known, ranks=ranks, amplification=unknown, mean_read_bytes=0) for ranks in (1, 64)]
    figure = planning.draw(costs)
    figure.savefig(io.BytesIO())
    assert [axis.get_yscale() for axis in figure.axes] == ["linear"] * 3
    figure = planning.draw([known, replace(known, ranks=64, amplification=5 * known.amplification)])
    assert figure.axes[0].get_yscale() == "log"


@pytest.mark.parametrize("size", [1, 3])
def test_validate_counts_missing_values(path: str, size: int) -> None:
    done = run_script(size, CALL, "validate", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("500 samples without damage") == 1
    assert "499" in done.stdout and "1" in done.stdout


@pytest.mark.parametrize(("size", "damaged"), [(3, [2, 3, 5]), (1, range(10))])
def test_validate_lists_all_damage(path: str, tmp_path: Path, size: int, damaged: Sequence[int]) -> None:
    content = bytearray(Path(path).read_bytes())
    with h5py.File(path) as file:
        for number in damaged:
            content[file["hits"].id.get_chunk_info(number).byte_offset + 5] ^= 4
    (tmp_path / "flipped.h5").write_bytes(content)
    done = run_script(size, CALL, "validate", str(tmp_path / "flipped.h5"))
    assert done.returncode == 1 and not done.stderr, done.stderr
    rows = [(0, 499)] if size == 1 else [(100, 199), (250, 299)]  # chunks of the same content have the same problem
    for first, last in rows:
        assert done.stdout.count(f"flipped.h5', field 'hits', rows {first} to {last}: ") == 1
    assert f"{500 - 50 * len(damaged)} samples without damage" in done.stdout
    assert ("mean" in done.stdout) == (size == 3)


def test_validate_reads_all_samples(path: str) -> None:
    done = run_script(1, CALL, "validate", path, "--option", "where=energy > 3")
    assert done.returncode == 1 and "all samples are read" in done.stderr and "leave it out" in done.stderr


def test_bench(path: str) -> None:
    done = run_script(2, CALL, "bench", path, "--epochs", "2")
    assert done.returncode == 0, done.stderr
    assert "samples/s" in done.stdout and "MB/s on a rank" in done.stdout
    assert done.stdout[:1].strip()  # without the empty line of a progress bar
    assert done.stdout.count("shuffle: ") == 1
    for epochs in ("0", "-2"):
        done = run_script(1, CALL, "bench", path, "--epochs", epochs)
        assert done.returncode == 2 and "--epochs" in done.stderr


@pytest.mark.parametrize("command", ["validate", "bench", "plan"])
def test_options_of_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Files whose errors ask for an option; of HDF5, the process that probes them needs it, too."""
    (tmp_path / "a.csv").write_text("1,2\n3,4\n5,6\n")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["one/x"], file["two/x"] = np.zeros(3), np.ones(4)
    job = ("--ranks", "1", "--batch-size", "2") if command == "plan" else ()
    for name, option in (("a.csv", "header=None"), ("a.h5", "sample=group")):
        monkeypatch.setattr("sys.argv", ["matex", command, str(tmp_path / name), *job, "--option", option])
        with pytest.raises(SystemExit) as done:
            main()
        assert not done.value.code, capsys.readouterr().err


def test_plain_reads_are_those_of_all_files_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "0").write_bytes(bytes(1000))  # a chunk of Zarr 3
    assert _plain_speed((str(tmp_path),)) > 0


def test_a_missing_file(path: str) -> None:
    done = run_script(1, CALL, "inspect", path + "x")
    assert done.returncode == 1
    assert "no such file" in done.stderr and "events.h5" in done.stderr


def test_run_passes_the_scripts_own_flags(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:], __name__)")
    done = run_script(1, CALL, "run", str(script), "--epochs", "3", "--help")
    assert done.returncode == 0, done.stderr
    assert "['--epochs', '3', '--help'] __main__" in done.stdout


def test_python_m_is_the_same() -> None:
    code = f"import subprocess; subprocess.run([{sys.executable!r}, '-m', 'matex_data', '--help'], check=True)"
    done = run_script(1, code)
    assert all(word in done.stdout for word in ("inspect", "plan", "validate", "bench", "run"))
