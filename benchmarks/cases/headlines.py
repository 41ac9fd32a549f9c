"""The networks of the papers on MaTEx, MXNet-MPI and HyPar-Flow, as plain Keras scripts under ``matex run``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cases.reading import Goal, Measured, Setup
from benchmarks.harness.measure import Reader, Result, interleaved_afresh
from benchmarks.readers import headlines

LIMIT = 1800.0  # seconds to build and trace a network and take its steps
OF_ONE = 0.9
LEAST_SIDE = 75  # pixels that InceptionV3 takes
OURS, ONE = "matex run, ranks: {}, open_dataset", "one process, all threads"


@dataclass(frozen=True)
class Network:
    """Network of a paper.

    Parameters
    ----------
    name : as of ``benchmarks.readers.headlines``.
    side : pixels of its images.
    quick : name of the network that stands for it with --quick.
    of_files : it trains on JPEGs.
    batch : rows of a batch.
    """

    name: str
    side: int = 224
    quick: str = ""
    of_files: bool = True
    batch: int = 32


NETWORKS = {
    network.name: network
    for network in (
        Network("alexnet"),
        Network("googlenet"),
        Network("inceptionv3", 299),
        Network("resnet50"),
        Network("resnet-v2-110", 32, "resnet-v2-20", False, 128),
    )
}


def rank_counts(cores: int) -> list[int]:
    """Return the numbers of ranks to measure: powers of two up to the cores, and these.

    >>> rank_counts(12)
    [1, 2, 4, 8, 12]
    """
    return [*(1 << power for power in range(cores.bit_length()) if 1 << power < cores), cores]


def measure(setup: Setup, name: str) -> Measured:
    """Measure a network in one process, and under ``matex run`` on as many ranks as there are cores, and on fewer."""
    network = NETWORKS[name]
    cores = len(os.sched_getaffinity(0))
    options = {"network": name, "side": network.side}
    batch = network.batch
    if setup.quick:
        options = {"network": network.quick or name, "side": min(LEAST_SIDE, network.side)}
        batch = max(2 * cores, batch // 4)
    task = headlines.task_of(setup.folder, network.of_files, batch, setup.quick)
    with tempfile.TemporaryDirectory(prefix="matex-timeline-") as folder:
        readers = _readers(options, network.of_files, cores, setup.quick, folder)
        results = interleaved_afresh(task, readers, setup.repetitions)
    one, fastest = results[0], max(results[1:], key=lambda result: result.rate)
    goals = [Goal(f"{fastest.reader.name} / {ONE}", fastest.over(one), OF_ONE)] if not setup.quick else []
    columns = ["", "samples/s", "ms a step", "of one process", "averaging", "its data alone"]
    title = f"{options['network']}, {options['side']} x {options['side']}, batch {batch}, {cores} cores"
    return Measured(title, [], goals, columns, [_row(result, one) for result in results])


def _readers(options: dict[str, Any], of_files: bool, cores: int, quick: bool, folder: str) -> list[Reader]:
    def launched(name: str, ranks: int, **more: Any) -> Reader:
        environment = {"MATEX_TIMELINE": str(Path(folder) / "steps.json")}
        pinned = ranks == cores
        return Reader(
            name.format(ranks),
            "ours",
            "headlines.fit",
            options | more,
            ranks=ranks,
            pinned=pinned,
            launcher=("run",),
            environment=environment,
            limit=LIMIT,
        )

    readers = [Reader(ONE, "ceiling", "headlines.fit", options, limit=LIMIT)]
    readers += [launched("matex run, ranks: {}", ranks) for ranks in ([cores] if quick else rank_counts(cores))]
    if of_files:
        readers.append(launched(OURS, cores, ours=True))
    if quick:
        return readers
    readers.append(launched("matex run, ranks: {}, a batch each", cores, times=cores))
    for name, function in (("MultiWorkerMirroredStrategy", "mirrored"), ("Horovod", "horovod")):
        readers.append(
            Reader(name, "peer", f"headlines.{function}", options, ranks=cores, pinned=True, limit=LIMIT, polls=True)
        )
    return readers


def _row(result: Result, one: Result) -> list[str]:
    if result.missing:
        return [result.reader.name, f"not measured: {result.missing}", "", "", "", ""]
    seconds = result.figure("seconds")
    shares = [
        f"{result.figure(key) / seconds:.0%}" if key in result.answers[0] else "" for key in ("averaging", "data")
    ]
    step = 1e3 * seconds / (headlines.STEPS - 1)
    return [result.reader.name, f"{result.rate:.3g}", f"{step:.0f}", f"{result.over(one):.2f}", *shares]


CASES: dict[str, list[Callable[[Setup], Measured]]] = {"headlines": [partial(measure, name=name) for name in NETWORKS]}
