"""Run every fault in an MPI job, and write the table of ``docs/faults.md``: ``python -m tests.faults``."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console

from tests.faults.catalogue import FAULTS, TIMEOUT
from tests.faults.harness import Row, chosen, complain, run

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "faults.md"
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"


def main() -> int:
    """Run the faults; exit with code 1 after an unexpected result."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("pattern", nargs="?", help="regular expression: only faults of such a name, title or format")
    parser.add_argument("--ranks", type=int, nargs="+", help="only on so many")
    parser.add_argument("--output", action="store_true", help="print what jobs say whose outcome is unexpected")
    parser.add_argument("--write", action="store_true", help="write the page although these are not all rows")
    options = parser.parse_args()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    rows: list[Row] = []
    begin = time.monotonic()
    for fault, ranks in chosen(FAULTS, options.pattern, options.ranks):
        row = run(fault, ranks)
        rows.append(row)
        if options.write or (options.pattern is None and options.ranks is None):
            write_table(rows, PAGE)
        mark = "[red]UNEXPECTED[/] " if row.trouble else ""
        seconds = "" if row.seconds is None else f"{row.seconds:.1f} s"
        console.print(f"{mark}{fault.title} | {fault.kind} | {ranks} | ", end="")
        console.print(row.trouble or row.what, seconds, markup=False)
        if row.trouble and options.output:
            console.print(complain(row), markup=False)
    unexpected = [row for row in rows if row.trouble]
    console.print(f"{len(rows)} rows in {time.monotonic() - begin:.0f} s, {len(unexpected)} unexpected")
    return 1 if unexpected else 0


def write_table(rows: list[Row], page: Path) -> None:
    """Write the rows between the two marks of the page."""
    lines = ["| fault | format | ranks | what happened | seconds until all ranks knew |", "|---|---|---|---|---|"]
    for row in rows:
        seconds = "" if row.seconds is None else f"{row.seconds:.1f}"
        what = (f"**{row.trouble}**" if row.trouble else row.what).replace(f"{ROOT}/", "")
        cells = (row.fault.title, row.fault.kind, str(row.ranks), what.replace("|", "\\|"), seconds)
        lines.append(f"| {' | '.join(cells)} |")
    text = page.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    note = f"{len(rows)} rows, `MATEX_TIMEOUT={TIMEOUT:g}`, {sum(not row.trouble for row in rows)} as expected."
    page.write_text(f"{before}{BEGIN}\n{note}\n\n" + "\n".join(lines) + f"\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
