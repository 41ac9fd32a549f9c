"""``python -m tests.fuzz``: damaged files of each format, in child processes under limits of memory and time."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import mpi4py

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ("jpeg", "png", "tiff", "gif", "bmp", "webp", "fits")
PARTICLES = ("root", "lhe", "hepmc", "openpmd", "tar", "manifest")
TABLES = ("parquet", "arrow", "fits_table", "zarr", "zarr_folder")
RECORDS = ("matlab", "jsonl", "tfrecord", "xyz", "traj", "asedb")
FORMATS = ("hdf5", "netcdf", "csv", "npy", "npz", "idx", "cifar", *IMAGES, *PARTICLES, *TABLES, *RECORDS)
QUICK = 12  # mutants of each format that are an ordinary test


def main() -> int:
    """Exit code 1 where there is a finding."""
    options = _options()
    mpi4py.rc.initialize = False  # each child starts MPI for itself
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = "1"

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from tests.fuzz.campaign import Campaign

    numbers: Any = options.only or range(QUICK if options.quick else options.count)
    console = Console(width=None if sys.stdout.isatty() else 160)
    tallies = []
    columns = (TextColumn("{task.description:8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # No thread may draw the bar: this process forks.
    with Progress(*columns, console=console, auto_refresh=False, disable=not sys.stdout.isatty()) as progress:
        for name in options.formats:
            campaign = Campaign(name, options.seed, options.corpus, options.keep, options.jobs, options.hostile)
            bar = progress.add_task(name, total=len(numbers))

            def step(bar: Any = bar) -> None:
                progress.update(bar, advance=1, refresh=True)

            tally = campaign.run(numbers, step)
            tallies.append(tally)
            for alike in tally.alike():
                result, where = alike[0]
                progress.console.rule(f"{name}: {result.verdict.outcome}, {len(alike)} alike")
                numbers_alike = " ".join(str(other.number) for other, _ in alike[:12])
                text = f"{where}; kept in {campaign.keep / name}; numbers {numbers_alike}"
                text = f"{text}\n{campaign.command(result.number)}\n{result.verdict.text}"
                progress.console.print(text, markup=False, highlight=False)
            for outcome, entries in tally.samples.items():
                for result, where in entries if options.show in (outcome, "all") else ():
                    text = f"{name} {result.number}: {outcome} ({where}) {result.verdict.text}"
                    progress.console.print(text, markup=False, highlight=False)
    _print_table(console, tallies)
    return 1 if any(tally.findings for tally in tallies) else 0


def _print_table(console: Any, tallies: list[Any]) -> None:
    from rich.table import Table

    from tests.fuzz.readings import FINDINGS, OUTCOMES

    shown = [name for name in OUTCOMES if any(tally.counts[name] for tally in tallies)]
    table = Table("", "undamaged files", *shown, "seconds")
    for tally in tallies:
        marked = (f"{'[red]' if name in FINDINGS and tally.counts[name] else ''}{tally.counts[name]}" for name in shown)
        table.add_row(tally.format, str(tally.sources), *marked, f"{tally.seconds:.0f}")
    console.print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    corpus = os.environ.get("MATEX_CORPUS")
    parser.add_argument("--count", type=int, default=5000, help="mutants of each format (5000)")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corpus", type=Path, default=corpus and Path(corpus), help="folder of real files")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of mutants")
    parser.add_argument("--hostile", action="store_true", help="damage sizes, counts, paths and codecs")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} mutants of each format")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    parser.add_argument("--keep", type=Path, default=ROOT / "build" / "fuzz", help="folder for the files of findings")
    parser.add_argument("--show", help="print the mutants of this outcome, or of all")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
