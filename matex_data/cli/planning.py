"""Command ``matex plan``: costs of an epoch on numbers of ranks that this machine does not have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matex_data.display import save_picture
from matex_data.errors import DataError

if TYPE_CHECKING:
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


def draw(path: Path, costs: Sequence[EpochCosts]) -> None:
    """Draw bytes, sizes of reads and memory over the number of ranks.

    Raises
    ------
    DataError : matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DataError("the picture needs matplotlib", found=error, remedy="pip install matplotlib") from error
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    ranks = [cost.ranks for cost in costs]
    curves = (
        ("bytes read / bytes needed", [cost.amplification for cost in costs]),
        ("size of a read, MB", [cost.mean_read_bytes / 1e6 for cost in costs]),
        ("memory of a rank for samples, MB", [cost.bytes_per_rank / 1e6 for cost in costs]),
    )
    for axis, (title, values) in zip(figure.subplots(1, len(curves)), curves, strict=True):
        axis.plot(ranks, values, "o-", color="#1b7837")
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("ranks", fontsize=8)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
    save_picture(figure, path)
