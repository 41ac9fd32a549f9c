"""Command ``matex plan``: costs of an epoch on numbers of ranks that this machine does not have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from matex_data.display import COLOUR, new_figure
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
