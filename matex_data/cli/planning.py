"""Command ``matex plan``: costs of an epoch, or with ``--train`` of a script, on numbers of ranks that are not here."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matex_data import machine
from matex_data.cli import scaling
from matex_data.cli.report import Report
from matex_data.display import COLOUR, new_figure
from matex_data.errors import DataError, PartitionError
from matex_data.words import nbytes_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from matex_data.batching import Shuffle
    from matex_data.dataset import Dataset
    from matex_data.epochs.costs import EpochCosts


SHUFFLES: dict[str, Shuffle] = {"blocks": True, "global": "global", "none": False}
"""Values of ``shuffle=`` by their names on the command line."""


def rank_counts(ranks: int, batch_size: int) -> list[int]:
    """Return numbers of ranks to compare, up to ``ranks``: powers of two that divide the batch size, and ``ranks``.

    >>> rank_counts(12, 24)
    [1, 2, 4, 8, 12]
    """
    powers = [1 << power for power in range(ranks.bit_length()) if 1 << power < ranks]
    return [count for count in powers if batch_size % count == 0] + [ranks]


def costs_by_ranks(data: Dataset, batch_size: int, ranks: int, shuffle: Shuffle) -> list[EpochCosts]:
    """Return the costs of an epoch on each number of ranks of `rank_counts`."""
    return [data.read_plan(batch_size, ranks=count, shuffle=shuffle) for count in rank_counts(ranks, batch_size)]


def draw(costs: Sequence[EpochCosts]) -> Figure:
    """Return a figure of bytes, sizes of reads and memory over the number of ranks.

    Raises
    ------
    DataError : matplotlib is not installed.
    """
    figure = new_figure(10, 3.2)
    from matplotlib.ticker import LogLocator, NullLocator

    ranks = [cost.ranks for cost in costs]
    curves: tuple[tuple[str, list[float], Callable[[float], str]], ...] = (
        ("bytes read / bytes needed", [cost.amplification for cost in costs], "{:.6g}".format),
        ("size of a read", [cost.mean_read_bytes for cost in costs], nbytes_text),
        ("memory of a rank for samples", [cost.bytes_per_rank for cost in costs], nbytes_text),
    )
    for axis, (title, values, text) in zip(figure.subplots(1, len(curves)), curves, strict=True):
        axis.plot(ranks, values, "o-", color=COLOUR)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("ranks", fontsize=8)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        if max(values) > 4 * min(values) > 0:  # not of nan or 0, where nothing is known or stored
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(lambda value, _, text=text: text(value))
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
    return figure


def refuse(options: dict[str, Any], remedy: str) -> None:
    """Raise ``DataError`` if one of these options is given.

    Parameters
    ----------
    options : values by name; those that are not given are None or False.
    """
    given = [name for name, value in options.items() if value not in (None, False)]
    if given:
        expected = "one of the two ways: files and --ranks, or --train and --nodes"
        raise DataError(f"{given[0]} has no meaning here", expected=expected, remedy=remedy)


def show(
    output: Report,
    script: Path,
    arguments: Sequence[str],
    nodes: int,
    ranks_per_node: int | None,
    network: str | None,
    filesystem: str | None,
    weak: bool,
    as_json: bool,
) -> None:
    """Measure a script and print the predictions for up to so many nodes; parameters are those of the command.

    Raises
    ------
    DataError : an option is wrong, or the script ends before a step is measured.
    """
    if output.console.quiet:
        return
    if not script.is_file():
        raise DataError("no such file", file=str(script), expected="--train script.py", remedy="check the path")
    per_node = ranks_per_node or machine.cores()
    link = None if network is None else scaling.parse_network(network)
    speed = None if filesystem is None else scaling.parse_bandwidth(filesystem)
    if nodes > 1 and link is None:
        raise PartitionError(
            "the network between the nodes is not known",
            expected="bandwidth of a node's link and latency of a message",
            remedy="give --network 100Gb/s,2us, with the figures of the machine",
        )
    costs = measured(script, arguments, per_node, nodes * per_node)
    sizes = [(1, 1), *((count, per_node) for count in scaling.node_counts(nodes) if count * per_node > 1)]
    found = [scaling.predict(costs, *size, link, speed, weak) for size in sizes]
    if as_json:
        output.print(json.dumps(scaling.facts(costs, found), indent=1))
        return
    for line in scaling.lines(costs, found, speed):
        output.print(line)


def measured(script: Path, arguments: Sequence[str], ranks_per_node: int, ranks: int) -> scaling.Measured:
    """Return the costs of a script, which runs in a child process until its first ``fit`` is measured.

    Parameters
    ----------
    arguments : of the script.
    ranks_per_node, ranks : of the job to predict; the script gets the cores of one rank.

    Raises
    ------
    DataError : the script ends before.
    """
    with tempfile.TemporaryDirectory(prefix="matex-plan-") as folder:
        result = Path(folder) / "costs.json"
        child = [sys.executable, "-m", "matex_data.training.launcher.measuring", str(result), repr(time.time())]
        command = [*child, str(ranks_per_node), str(ranks), str(script), *arguments]
        code = subprocess.run(command, stdout=sys.stderr, env=machine.without_rank(), check=False).returncode
        if not result.exists():
            raise DataError(
                "the script ends before a training step is measured",
                file=str(script),
                expected="a call of model.fit, or of matex_data.training.fit",
                found=f"exit code {code}",
                remedy="give arguments of the script behind --; loops of its own are not measured",
            )
        found = json.loads(result.read_text())
    found["times"] = {int(rows): seconds for rows, seconds in found["times"].items()}
    return scaling.Measured(**found)
