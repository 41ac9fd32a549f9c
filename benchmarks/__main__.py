"""``python -m benchmarks [case ...]``: measure, show and save. The exit status is 1 if a limit is missed."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from benchmarks.cases import climate as climate_cases
from benchmarks.cases import end_to_end, reading, shuffling, sorted_training
from benchmarks.cases import files as file_cases
from benchmarks.cases import headlines as headline_cases
from benchmarks.cases import images as image_cases
from benchmarks.cases import latency as latency_cases
from benchmarks.cases import layouts as layout_cases
from benchmarks.cases import parquet as parquet_case
from benchmarks.cases import particles as particle_cases
from benchmarks.cases import scale as scale_cases
from benchmarks.cases import stages as stage_cases
from benchmarks.cases import start as start_case
from benchmarks.cases import steps as step_cases
from benchmarks.cases import stores as store_cases
from benchmarks.cases import text as text_cases
from benchmarks.cases import zarr as zarr_cases
from benchmarks.cases.reading import Measured, Setup
from benchmarks.harness.report import save, show

CASES = (
    reading.CASES
    | climate_cases.CASES
    | text_cases.CASES
    | parquet_case.CASES
    | zarr_cases.CASES
    | particle_cases.CASES
    | image_cases.CASES
    | shuffling.CASES
    | sorted_training.CASES
    | step_cases.CASES
    | layout_cases.CASES
    | stage_cases.CASES
    | headline_cases.CASES
    | scale_cases.CASES
    | file_cases.CASES
    | latency_cases.CASES
    | store_cases.CASES
    | start_case.CASES
    | end_to_end.CASES
)


def main() -> int:
    """Run the cases that are named, or all."""
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 130)
    load = os.getloadavg()[0]
    console.print(f"{len(os.sched_getaffinity(0))} cores, load {load:.1f}, {options.repetitions} repetitions, medians")
    if load > 0.5:
        console.print("[yellow]Other programs are running: the ratios are less certain than they could be[/yellow]")
    begin = time.perf_counter()
    measured: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="matex-bench-") as scratch:
        setup = Setup(Path(options.data or scratch).resolve(), options.repetitions, options.quick)
        for name in options.cases or CASES:
            for case in CASES[name]:
                measured.append(case(setup))
                show(console, measured[-1])
                save(options.out, options.picture or options.out / "benchmarks.png", measured)
    missed = sum(not goal.holds for case in measured for goal in case.goals)
    console.print(f"\n{missed} limits missed; {time.perf_counter() - begin:.0f} s; tables in {options.out}")
    return int(missed > 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure against other readers.")
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of: {', '.join(CASES)}; default: all")
    parser.add_argument("--repetitions", type=int, default=3, help="passes of each reader (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="files of a quarter of the size")
    parser.add_argument("--data", type=Path, help="folder for the files, which stay there; default: a temporary one")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"), help="folder of results (%(default)s)")
    parser.add_argument("--picture", type=Path, help="file of the picture; default: benchmarks.png beside the results")
    options = parser.parse_args()
    unknown = sorted(set(options.cases) - set(CASES))
    if unknown or options.repetitions < 1:
        parser.error(f"no such case: {', '.join(unknown)}" if unknown else "at least one repetition")
    return options


if __name__ == "__main__":
    sys.exit(main())
