"""Command ``matex plan --train``: measure steps of a script in a child process, and predict them on many nodes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matex_data import machine
from matex_data.cli import scaling
from matex_data.cli.report import Report
from matex_data.errors import DataError, PartitionError


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
        code = subprocess.run(command, stdout=sys.stderr, env=machine.environment_without_mpi(), check=False).returncode
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
