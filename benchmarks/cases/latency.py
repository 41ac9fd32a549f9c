"""The case of a remote storage: a file system in user space whose reads take 5 ms, and operations on metadata 1 ms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.cases.reading import Goal, Measured, Setup
from benchmarks.harness import data
from benchmarks.harness.data import Task
from benchmarks.harness.measure import Reader, Result, interleaved_afresh
from benchmarks.harness.slow_files import METADATA_SECONDS, READ_SECONDS, mounted
from benchmarks.readers import images, latency

MB = 10**6
IMAGES = 2000  # whose seconds are limited
TITLE = f"Storage with {READ_SECONDS * 1000:g} ms a read and {METADATA_SECONDS * 1000:g} ms an operation on metadata"


def remote(setup: Setup) -> Measured:
    """Measure contiguous HDF5, small JPEGs and CSV on a storage that keeps readers waiting."""
    folder = setup.folder / "remote"
    folder.mkdir(parents=True, exist_ok=True)
    tasks = {
        "contiguous HDF5": data.contiguous(folder, setup.quick),
        "JPEGs in folders": images.photographs(folder, setup.quick),
        "CSV": latency.table(folder, setup.quick),
    }
    try:
        with mounted(folder, setup.folder / "mounted") as mount:
            return _measured(mount, {text: _moved(task, folder, mount) for text, task in tasks.items()}, setup)
    except (OSError, ImportError) as error:
        return Measured(f"{TITLE}: not measured, {error}")


def _moved(task: Task, folder: Path, mount: Path) -> Task:
    return replace(task, path=str(mount / Path(task.path).relative_to(folder)))


def _measured(mount: Path, tasks: dict[str, Task], setup: Setup) -> Measured:
    reader = Reader("matex_data", "ours", "latency.ours", {"mount": str(mount)})
    results = {text: interleaved_afresh(task, [reader], setup.repetitions)[0] for text, task in tasks.items()}
    hdf5, jpegs, csv = results.values()
    size = round(hdf5.figure("bytes") / hdf5.figure("reads"))
    plain = Reader("16 threads", "ceiling", "latency.ceiling", {"read_bytes": size})
    (ceiling,) = interleaved_afresh(hdf5.task, [plain], setup.repetitions)
    bandwidth = _rate(ceiling)
    part = IMAGES / jpegs.task.samples
    file_bytes = Path(csv.task.path).stat().st_size
    goals = [
        Goal(f"contiguous HDF5 / 16 threads, reads of {size // 1000} KB", _rate(hdf5) / bandwidth, 0.8),
        Goal(f"seconds to open {IMAGES:,} JPEGs", jpegs.figure("open") * part, 3, most=True, unit=" s"),
        Goal(f"seconds of an epoch of {IMAGES:,} JPEGs", jpegs.figure("seconds") * part, 2.5, most=True, unit=" s"),
        Goal("CSV: bytes of an epoch / file", csv.figure("bytes") / file_bytes, 1.2, most=True),
        Goal("CSV: bytes to open / file", csv.figure("opening_bytes") / file_bytes, 1.2, most=True),
    ]
    columns = ["files", "seconds to open", "seconds of an epoch", "MB/s", "reads", "operations on metadata"]
    rows = [
        [text, f"{r.figure('open'):.2f}", f"{r.figure('seconds'):.2f}", f"{_rate(r) / MB:.0f}"]
        + [f"{r.figure(name):,.0f}" for name in ("reads", "metadata")]
        for text, r in results.items()
    ]
    rows.append(
        ["16 threads that read the HDF5 file", "", f"{ceiling.figure('seconds'):.2f}", f"{bandwidth / MB:.0f}", "", ""]
    )
    return Measured(TITLE, [], goals, columns, rows)


def _rate(result: Result) -> float:
    return result.figure("bytes") / result.figure("seconds")


CASES: dict[str, list[Callable[[Setup], Measured]]] = {"latency": [remote]}
