"""Reports: tables on the terminal, JSON, and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
from rich.console import Console
from rich.table import Table

from benchmarks.cases.reading import Measured
from benchmarks.harness.measure import Result

mpl.use("Agg")  # no screen is needed
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

COLOURS = {"ours": "#1b7837", "peer": "#9e9ac8", "reference": "#9e9ac8", "ceiling": "#bdbdbd"}


def show(console: Console, measured: Measured) -> None:
    """Print a table of the readers and one of the goals."""
    console.print(f"\n[bold]{measured.title}[/bold]")
    if measured.results:
        console.print(_readers(measured.results))
    if measured.rows:
        table = Table(*measured.columns, box=None, header_style="bold")
        for row in measured.rows:
            table.add_row(*row)
        console.print(table)
    goals = Table("figure", "limit", "", "", box=None, show_header=False)
    for goal in measured.goals:
        limit = f"{'at most' if goal.most else 'at least'} {goal.limit:.3g}{goal.unit}"
        verdict = "[green]holds[/green]" if goal.holds else "[red]MISSED[/red]"
        goals.add_row(goal.text, f"{goal.found:.3g}{goal.unit}", limit, verdict)
    console.print(goals)


def _readers(results: Sequence[Result]) -> Table:
    table = Table("reader", box=None, header_style="bold")
    for name in ("samples/s", "slowest - fastest", "GB/s", "of the ceiling", "ours is", "CPU s/epoch"):
        table.add_column(name, justify="right")
    ours = next(result for result in results if result.reader.kind == "ours")
    for result in results:
        if result.missing:
            table.add_row(result.reader.name, f"not measured: {result.missing}")
            continue
        ceiling = _ceiling_of(result, results)
        table.add_row(
            result.reader.name,
            f"{result.rate:,.0f}",
            f"{min(result.rates):,.0f} - {max(result.rates):,.0f}",
            f"{result.bytes_rate / 1e9:.2f}",
            f"{result.over(ceiling):.3f}" if ceiling else "",
            "" if result is ours else f"{ours.over(result):.2f}x",
            f"{result.epoch_cpu:.2f}",
        )
    return table


def _ceiling_of(result: Result, results: Sequence[Result]) -> Result | None:
    """Return the ceiling on as many ranks."""
    of_its_kind = (r for r in results if r.reader.kind == "ceiling" and r.reader.ranks == result.reader.ranks)
    return next(of_its_kind, None)


def save(folder: Path, picture: Path, cases: Sequence[Measured]) -> None:
    """Write ``results.json`` to a folder, and the picture."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps([_figures(case) for case in cases], indent=1))
    drawn = [case for case in cases if case.results]
    if drawn:
        _draw(picture, drawn)


def _figures(case: Measured) -> dict[str, Any]:
    readers = [asdict(r.reader) | {"rate": r.rate, "answers": r.answers, "missing": r.missing} for r in case.results]
    goals = [asdict(goal) | {"holds": goal.holds} for goal in case.goals]
    return {"title": case.title, "readers": readers, "goals": goals, "columns": case.columns, "rows": case.rows}


def _draw(path: Path, cases: Sequence[Measured]) -> None:
    heights = [len(case.results) + 2 for case in cases]
    figure, axes = plt.subplots(len(cases), 1, figsize=(9, 0.28 * sum(heights)), height_ratios=heights, squeeze=False)
    for axis, case in zip(axes[:, 0], cases, strict=True):
        _bars(axis, case)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _bars(axis: Axes, case: Measured) -> None:
    """Draw a bar for each reader's median, and a line at the ceiling."""
    results = [result for result in case.results if result.answers][::-1]
    axis.set_title(case.title, fontsize=9, loc="left")
    colours = [COLOURS[result.reader.kind] for result in results]
    bars = axis.barh([result.reader.name for result in results], [result.rate for result in results], color=colours)
    axis.bar_label(bars, [f" {result.rate:,.0f}" for result in results], fontsize=7)
    for result in results:
        if result.reader.kind == "ceiling":
            axis.axvline(result.rate, color="black", linewidth=0.8, linestyle=":")
    axis.set_xscale(case.scale)
    axis.margins(x=0.15)
    axis.tick_params(labelsize=7)
    axis.set_xlabel("samples/s", fontsize=7)
    axis.spines[["top", "right"]].set_visible(False)
