"""The case of a store of objects, whose answers wait 20 ms, on one, two and four ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.cases.reading import Goal, Measured, Setup
from benchmarks.harness import data
from benchmarks.harness.measure import Reader, interleaved_afresh
from benchmarks.harness.object_server import ANSWER_SECONDS, served

MB = 10**6
RANKS = (1, 2, 4)
TITLE = f"Store of objects on this machine, {ANSWER_SECONDS * 1000:g} ms an answer: contiguous HDF5, shuffled"


def store(setup: Setup) -> Measured:
    """Measure a shuffled epoch on several ranks, against requests of the same size by obstore alone."""
    folder = setup.folder / "store"
    folder.mkdir(parents=True, exist_ok=True)
    task = data.contiguous(folder, setup.quick)
    readers = [Reader(f"matex_data, {ranks} ranks", "ours", "stores.ours", ranks=ranks) for ranks in RANKS]
    peers = [
        Reader(f"h5py + fsspec, {order}", "peer", "stores.h5py_fsspec", {"shuffled": shuffled})
        for order, shuffled in (("in order", False), ("shuffled", True))
    ]
    with served(folder) as url:
        task = replace(task, path=f"{url}/{Path(task.path).name}")
        found = interleaved_afresh(task, [*readers, *peers], setup.repetitions)
        size = round(found[0].figure("bytes") / found[0].figure("requests"))
        plain = Reader("obstore, 64 threads", "ceiling", "stores.ceiling", {"read_bytes": size})
        (ceiling,) = interleaved_afresh(task, [plain], setup.repetitions)
    needed = task.samples * (task.sample_bytes + 8)  # and its label
    bandwidth = ceiling.figure("bytes") / ceiling.figure("seconds")
    goals = [
        Goal("one rank / obstore, requests of the same size", needed / found[0].figure("seconds") / bandwidth, 0.8),
        *(
            Goal(f"{ranks} ranks: bytes sent / bytes of the samples", result.figure("bytes") / needed, 1.05, most=True)
            for ranks, result in zip(RANKS, found[: len(RANKS)], strict=True)
        ),
        *(
            Goal(f"one rank / {peer.reader.name}", peer.figure("seconds") / found[0].figure("seconds"), limit)
            for peer, limit in zip(found[len(RANKS) :], (1, 5), strict=True)
            if peer.answers
        ),
    ]
    columns = ["reader", "seconds of an epoch", "MB/s", "requests", "KB a request"]
    rows = [
        [
            *(result.reader.name, f"{result.figure('seconds'):.2f}"),
            *(f"{needed / result.figure('seconds') / MB:.0f}", f"{result.figure('requests'):,.0f}"),
            f"{result.figure('bytes') / result.figure('requests') / 1000:.0f}",
        ]
        for result in found
        if result.answers
    ]
    rows.append([plain.name, f"{ceiling.figure('seconds'):.2f}", f"{bandwidth / MB:.0f}", "", f"{size / 1000:.0f}"])
    return Measured(TITLE, [], goals, columns, rows)


CASES: dict[str, list[Callable[[Setup], Measured]]] = {"remote": [store]}
