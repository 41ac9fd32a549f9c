"""Data sets for PyTorch: each sample once over ranks and workers, in the batches of ``Dataset.batches``."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path

import h5py
import numpy as np
import pytest

from matex_data import open_dataset
from matex_data.errors import ArgumentError
from tests.support.frameworks import needs
from tests.support.launch import environment, run_script

SAMPLES, BATCH = 72, 12


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("torch") / "x.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(2.0 * SAMPLES).reshape(SAMPLES, 2)
        file["y"] = np.arange(SAMPLES)
        file["name"] = np.array([f"sample {i}" for i in range(SAMPLES)], object)
    return path


SCRIPT = """
import json, sys
import torch
from torch.utils.data import DataLoader, DistributedSampler
import matex_data as md
import matex_data.torch

def epochs(loader, count):
    return [[y.tolist() for x, y in loader] for _ in range(count)]

if __name__ == "__main__":
    world = md.training.world()
    data = md.open_dataset(sys.argv[1], inputs="x", targets="y")
    found = {}
    for workers, method, persistent in ((0, None, False), (2, "fork", False), (2, sys.argv[2], sys.argv[2] == "fork")):
        batches = md.torch.IterableDataset(data, 12, shuffle=True, seed=1)
        options = {"num_workers": workers, "multiprocessing_context": method, "persistent_workers": persistent}
        loader = DataLoader(batches, batch_size=None, **options)
        found[f"{workers} {method} {persistent}"] = epochs(loader, 2)
        assert len(loader) == 6
    start = batches.state(8)  # in the middle of the second epoch
    batches = md.torch.IterableDataset(data, 12, start=start, shuffle=True)
    loader = DataLoader(batches, batch_size=None, num_workers=2, multiprocessing_context="fork")
    found["resumed"], lengths = [], []
    for _ in range(2):
        lengths.append(len(loader))
        found["resumed"] += epochs(loader, 1)
    assert lengths == [4, 6], lengths
    samples = md.torch.Dataset(data)
    sampler = DistributedSampler(samples, world.size, world.rank, shuffle=False)
    loader = DataLoader(samples, batch_size=6, sampler=sampler, num_workers=2, multiprocessing_context="fork")
    found["map"] = epochs(loader, 1)
    print("found", json.dumps([world.rank, found]), flush=True)
"""


def _run(path: Path, ranks: int, method: str) -> list[dict[str, list[list[list[int]]]]]:
    script = path.parent / "loader.py"
    script.write_text(SCRIPT)
    done = run_script(ranks, script, str(path), method, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = [line[6:] for line in done.stdout.splitlines() if line.startswith("found ")]
    return [found for _, found in sorted(map(json.loads, lines), key=lambda pair: pair[0])]


def _check(path: Path, by_rank: list[dict[str, list[list[list[int]]]]]) -> None:
    """Compare what the loaders of all ranks yield with the batches of one process without PyTorch."""
    ranks = len(by_rank)
    one = open_dataset(path, inputs="x", targets="y").batches(BATCH, shuffle=True, seed=1)
    epochs = [[y.tolist() for _, y in one] for _ in range(3)]
    for name in by_rank[0]:
        of_ranks = [found[name] for found in by_rank]
        if name == "map":
            samples = [sorted(chain.from_iterable(of_rank[0])) for of_rank in of_ranks]
            assert samples == [list(range(rank, SAMPLES, ranks)) for rank in range(ranks)]
            continue
        expected = [epochs[1][2:], epochs[2]] if name == "resumed" else epochs[:2]
        for number, epoch in enumerate(expected):
            joined = map(chain.from_iterable, zip(*(of_rank[number] for of_rank in of_ranks), strict=True))
            assert list(map(sorted, joined)) == list(map(sorted, epoch)), name


@needs("torch")
@pytest.mark.slow  # each rank, and each spawned worker, imports PyTorch; test_processes.py has a quick test
def test_loaders_with_workers_that_stay(path: Path) -> None:
    _check(path, _run(path, 2, "fork"))


@needs("torch")
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_loaders_with_spawned_workers(path: Path, ranks: int) -> None:
    _check(path, _run(path, ranks, "spawn"))


@needs("torch")
def test_tensors_and_texts(path: Path) -> None:
    import torch
    from torch.utils.data import DataLoader

    import matex_data.torch

    data = open_dataset(path)
    batch = next(iter(DataLoader(matex_data.torch.IterableDataset(data, 8), batch_size=None)))
    assert batch["x"].dtype == torch.float64 and tuple(batch["x"].shape) == (8, 2)
    assert batch["name"][7] == b"sample 7"
    batch = next(iter(DataLoader(matex_data.torch.Dataset(data), sampler=[70, 3], batch_size=2)))
    assert batch["x"].tolist() == [[140.0, 141.0], [6.0, 7.0]] and batch["name"] == [b"sample 70", b"sample 3"]
    numbers = matex_data.torch.Dataset(open_dataset({"number": np.array([3, 2**64 - 1], "u8")}))
    assert next(iter(DataLoader(numbers, batch_size=2)))["number"].tolist() == [3, 2**64 - 1]


DISTRIBUTED = """
import sys
from torch import distributed
from torch.utils.data import DataLoader
import matex_data as md
import matex_data.torch

if __name__ == "__main__":
    data = md.open_dataset(sys.argv[1], inputs="x", targets="y")
    early = md.torch.IterableDataset(data, 12)
    ranks, rank = map(int, sys.argv[3:])
    distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", world_size=ranks, rank=rank)
    for attempt in (lambda: next(iter(early)), lambda: md.torch.IterableDataset(data, 12, shuffle=True)):
        try:
            attempt()
        except md.PartitionError as error:
            print(error)
    batches = md.torch.IterableDataset(data, 12, shuffle=True, seed=1)
    for workers in (0, 2):
        method = "fork" if workers else None
        loader = DataLoader(batches, batch_size=None, num_workers=workers, multiprocessing_context=method)
        print("rows", [y.tolist() for x, y in loader])
"""


@needs("torch")
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_of_torch_distributed(path: Path, tmp_path: Path, ranks: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(DISTRIBUTED)
    common = environment(MATEX_ALLOW_SINGLETONS="1", WORLD_SIZE=str(ranks))
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(path), str(tmp_path / "store"), str(ranks), str(rank)],
            env=common | {"LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    printed = [process.communicate(timeout=200)[0] for process in started]
    assert [process.returncode for process in started] == [0] * ranks, printed
    one = open_dataset(path, inputs="x", targets="y").batches(BATCH, shuffle=True, seed=1)
    epochs = [[sorted(y.tolist()) for _, y in one] for _ in range(2)]
    for number, epoch in enumerate(epochs):
        lines = ([line[5:] for line in output.splitlines() if line.startswith("rows ")] for output in printed)
        of_ranks = [json.loads(rows[number]) for rows in lines]
        assert [sorted(chain(*batch)) for batch in zip(*of_ranks, strict=True)] == epoch
    assert all("make the data set after torch.distributed.init_process_group()" in output for output in printed)
    assert all("or with a seed" in output for output in printed)


@needs("torch")
def test_other_ranks_than_torch_distributed(path: Path) -> None:
    code = (
        "import sys, torch.distributed as group, matex_data as md, matex_data.torch\n"
        "group.is_initialized, group.get_world_size, group.get_rank = lambda: True, lambda: 3, lambda: 0\n"
        "md.torch.IterableDataset(md.open_dataset(sys.argv[1]), 12)\n"
    )
    done = run_script(2, code, str(path))
    assert done.returncode and "torch.distributed has another number of ranks than this data set" in done.stderr
    assert "expected: 2 of the data set" in done.stderr and "found: 3 of torch.distributed" in done.stderr


@needs("torch")
def test_what_is_no_data_set_is_refused(path: Path) -> None:
    import matex_data.torch

    for make in (matex_data.torch.Dataset, lambda data: matex_data.torch.IterableDataset(data, 12)):
        with pytest.raises(ArgumentError, match=r"takes no dataset= of this kind\n  expected: Dataset\n  found: '"):
            make(str(path))


def test_without_pytorch(path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import matex_data as md, matex_data.torch\n"
        f"data = md.open_dataset({str(path)!r})\n"
        "for make in (lambda: md.torch.Dataset(data), lambda: md.torch.IterableDataset(data, 8)):\n"
        "    try: make()\n"
        "    except ModuleNotFoundError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.count("(the extra matex_data[torch])") == 2, done.stderr
