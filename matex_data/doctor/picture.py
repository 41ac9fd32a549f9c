"""Picture of the nodes of a job, one beside the other, in which a node that differs from the others stands out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matex_data.display import COLOUR, new_figure
from matex_data.doctor.section import Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMED = 8
"""Nodes that have their names below the picture; others have numbers."""


def draw(sections: Sequence[Section]) -> Figure:
    """Return a figure of the memory and the cores of a rank, and of the times of small reads, on each node.

    Raises
    ------
    DataError : matplotlib is not installed.
    """
    panels = [(title, values) for title, values in quantities(sections).items() if values]
    figure = new_figure(10, 3.2)
    for axis, (title, values) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        numbers = range(len(values))
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=7)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
        if len(values) <= NAMED:
            axis.bar(numbers, list(values.values()), 0.5, color=COLOUR)
            axis.set_xticks(numbers, list(values))
            axis.set_xlim(-1, len(values))
        else:
            axis.plot(numbers, list(values.values()), ".", color=COLOUR)
            axis.set_xlabel("number of the node", fontsize=8)
            axis.set_ylim(bottom=0)
    return figure


def quantities(sections: Sequence[Section]) -> dict[str, dict[str, float]]:
    """Return what is drawn: titles, each with a number for each node; none for speeds that were not measured."""
    facts: dict[str, Mapping[str, Any]] = {section.title: section.facts for section in sections}
    nodes: dict[str, list[Mapping[str, Any]]] = {}
    for rank in facts["Nodes"]["ranks"]:
        nodes.setdefault(rank["node"], []).append(rank)
    seen = facts["Storage"].get("path", {"nodes": {}})["nodes"]
    speeds = {node: found["speed"] for node, found in seen.items() if found["speed"]}
    return {
        "memory of a rank, GiB": {node: min(r["memory"] for r in ranks) / 2**30 for node, ranks in nodes.items()},
        "cores of a rank": {node: min(r["cores"] for r in ranks) for node, ranks in nodes.items()},
        "open a file and read 4 KiB, ms": {
            node: 1e3 * (speed["open_seconds"] + speed["latency"]) for node, speed in speeds.items()
        },
    }
