"""Time of a training step on numbers of nodes that this machine does not have, from costs measured on one rank.

A step is computing, then averaging: ``matex run`` shares out a batch, so a rank computes ``ceil(batch / ranks)`` rows,
and each bucket of gradients is summed over all ranks. With N nodes of R ranks a bucket of n bytes takes

    o + 2 ceil(log2 N) latency + 2 (N - 1)/N n / bandwidth + m n (2 + 3 (R - 1)/R)

seconds. The network's terms are those of reduce-scatter and allgather by halving and doubling, which send as few bytes
as a ring does: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", Int. J.
High Perform. Comput. Appl. 19 (2005), section 4.5. The first log2 R rounds stay within a node; then each of its ranks
has n / R bytes left, so that its link carries 2 (N - 1)/N n bytes in each direction, whatever R is. The last term is
memory, at m seconds a byte: to pack and unpack a bucket, and for two copies and a sum within a node. o is Python's.

With one core a rank averages after it has computed. With more cores a bucket is summed as soon as it is ready and the
one before it is done. Data are decoded beside the steps, by the same cores; one file system serves all nodes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.table import Table

from matex_data.errors import DataError
from matex_data.words import counted, nbytes_text

OPERATION_SECONDS = 1e-4  # of Python in a reduction, beyond that of MPI
_FACTORS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(\d+(?:\.\d+)?)\s*"


@dataclass(frozen=True)
class Network:
    """Link of a node to the others.

    Parameters
    ----------
    bandwidth : bytes a second, in each direction.
    latency : seconds of a message without content.
    """

    bandwidth: float
    latency: float


def parse_bandwidth(text: str, option: str = "--filesystem") -> float:
    """Return bytes a second; a small b counts bits.

    Raises
    ------
    DataError : the text is no positive number with such a unit.

    Examples
    --------
    >>> parse_bandwidth("50GB/s"), parse_bandwidth("100 Gb/s")
    (50000000000.0, 12500000000.0)
    """
    match = re.fullmatch(_NUMBER + r"([kMGT]?)([bB])/s", text.strip())
    value = 0.0 if match is None else float(match[1]) * _FACTORS[match[2]] / (8 if match[3] == "b" else 1)
    if value == 0:
        expected = "a positive number with a unit: 50GB/s of bytes, 100Gb/s of bits, with k, M, G or T"
        raise DataError(f"{option} gives no bandwidth", expected=expected, found=repr(text))
    return value


def parse_network(text: str) -> Network:
    """Return the network of a text with bandwidth and latency.

    Raises
    ------
    DataError : one of them is missing, or has no unit.

    Examples
    --------
    >>> parse_network("100Gb/s,2us")
    Network(bandwidth=12500000000.0, latency=2e-06)
    """
    bandwidth, _, latency = text.partition(",")
    match = re.fullmatch(_NUMBER + "(ns|us|µs|ms|s)", latency.strip())
    if match is None:
        expected = "bandwidth of a node's link and latency of a message, such as 100Gb/s,2us"
        raise DataError("--network gives no latency", expected=expected, found=repr(text))
    return Network(parse_bandwidth(bandwidth, "--network"), float(match[1]) * _SECONDS[match[2]])


@dataclass(frozen=True)
class Measured:
    """Costs of a script on one rank of this machine.

    Parameters
    ----------
    cores : of the rank.
    batch : rows of a batch of the script.
    steps : batches of an epoch; None: unknown.
    times : seconds of steps that were measured, by their rows.
    buckets : bytes of each bucket of gradients, and when it is ready, as a fraction of the step.
    memory : seconds to add a byte of one array to another.
    sharded : a rank reads its own rows alone; otherwise every rank makes whole batches.
    data : seconds until a row of the data has come, if nothing else is done.
    data_cpu : seconds of a core for a row of the data.
    file_bytes : bytes that are read from files for a row; None: unknown.
    start : seconds from the start of the process to the end of the first step.
    """

    cores: int
    batch: int
    steps: int | None
    times: dict[int, list[float]]
    buckets: list[tuple[int, float]]
    memory: float
    sharded: bool
    data: float
    data_cpu: float
    file_bytes: float | None
    start: float

    def computing(self, rows: int) -> float:
        """Return the seconds of a step of so many rows: between those measured on a line, above them on the last one.

        Examples
        --------
        >>> costs = Measured(1, 8, None, {2: [1.0], 4: [1.5, 1.4, 1.6]}, [], 0.0, False, 0.0, 0.0, None, 0.0)
        >>> costs.computing(1), costs.computing(3), costs.computing(8)
        (1.0, 1.25, 2.5)
        """
        known = sorted((size, median(seconds)) for size, seconds in self.times.items())
        if rows <= known[0][0]:
            return known[0][1]
        if len(known) == 1:
            return known[0][1] * rows / known[0][0]
        at = next((i for i, (size, _) in enumerate(known) if size >= rows), len(known) - 1)
        (low, before), (high, behind) = known[at - 1 : at + 1]
        found = before + (behind - before) * (rows - low) / (high - low)
        return found if rows <= high else max(behind, found)  # noise may make more rows faster

    def spread(self, ranks: int = 1) -> tuple[float, float]:
        """Return the fastest step, and the slowest one of so many ranks that is to be expected, over the median.

        All ranks wait for the slowest one. Of P values that are drawn from n sorted ones, the largest is the i-th with
        a probability of (i/n)**P - ((i-1)/n)**P.

        Examples
        --------
        >>> costs = Measured(1, 8, None, {8: [1.0, 0.9, 1.2]}, [], 0.0, False, 0.0, 0.0, None, 0.0)
        >>> [round(float(x), 2) for x in costs.spread()], round(costs.spread(1000)[1], 2)
        ([0.9, 1.03], 1.2)
        """
        found = sorted(x / median(seconds) for seconds in self.times.values() for x in seconds)
        shares = [(i / len(found)) ** ranks for i in range(len(found) + 1)]
        slowest = sum(x * (shares[i + 1] - shares[i]) for i, x in enumerate(found))
        return found[0], max(1.0, slowest)


@dataclass(frozen=True)
class Prediction:
    """Step on so many nodes.

    Attributes
    ----------
    nodes, ranks : of the job.
    rows : of the rank that has most.
    step : seconds.
    fastest, slowest : seconds of a step if all steps were as the fastest measured one, and if each one waits for the
        slowest rank.
    rate : samples a second.
    efficiency : samples a second of a rank over those of one rank alone.
    epoch : seconds without validation; None: the number of steps is unknown.
    seconds : of each resource, if a step used nothing else.
    binds : the resource that takes longest.
    """

    nodes: int
    ranks: int
    rows: int
    step: float
    fastest: float
    slowest: float
    rate: float
    efficiency: float
    epoch: float | None
    seconds: dict[str, float]
    binds: str


def averaging(
    costs: Measured, nodes: int, ranks_per_node: int, network: Network | None, computing: float
) -> tuple[float, float]:
    """Return the seconds of all reductions of a step, and those of them that a step of ``computing`` seconds waits for.

    Parameters
    ----------
    costs : of one rank.
    nodes, ranks_per_node, network : of the job; the formula stands above.
    """
    if nodes * ranks_per_node == 1:
        return 0.0, 0.0
    per_byte = costs.memory * (2 + 3 * (ranks_per_node - 1) / ranks_per_node)
    once = OPERATION_SECONDS
    if nodes > 1 and network is not None:
        per_byte += 2 * (nodes - 1) / nodes / network.bandwidth
        once += 2 * math.ceil(math.log2(nodes)) * network.latency
    end = 0.0
    for nbytes, ready in costs.buckets:
        end = max(end, ready * computing if costs.cores > 1 else computing) + once + per_byte * nbytes
    busy = sum(once + per_byte * nbytes for nbytes, _ in costs.buckets)
    return busy, max(0.0, end - computing)


def predict(
    costs: Measured,
    nodes: int,
    ranks_per_node: int,
    network: Network | None = None,
    filesystem: float | None = None,
    weak: bool = False,
) -> Prediction:
    """Return what a step takes on so many nodes like this machine.

    Parameters
    ----------
    costs : of one rank.
    network : between nodes; None: it takes no time.
    filesystem : bytes a second for all nodes; None: it takes no time.
    weak : each rank has as many rows as the script's batch; otherwise all ranks share these.

    Examples
    --------
    >>> costs = Measured(1, 8, 10, {4: [0.5], 8: [1.0]}, [(4_000_000, 1.0)], 0.0, True, 0.0, 0.0, None, 0.0)
    >>> found = predict(costs, 2, 1, parse_network("32Mb/s,1us"))  # 4 MB at 4 MB/s, to and fro, by half of it
    >>> round(found.step, 2), found.binds, round(found.efficiency, 2)
    (1.5, 'network', 0.33)
    """
    ranks = nodes * ranks_per_node
    batch = costs.batch * ranks if weak else costs.batch
    rows = -(-batch // ranks)
    loaded = rows if costs.sharded else batch
    filing = 0.0 if filesystem is None or costs.file_bytes is None else costs.file_bytes * batch / filesystem
    decoding = max(costs.data, costs.data_cpu / costs.cores) * loaded
    communicating = "averaging" if nodes == 1 else "network"

    def step(factor: float) -> tuple[float, dict[str, float]]:
        computing = factor * costs.computing(rows)
        total, exposed = averaging(costs, nodes, ranks_per_node, network, computing)
        seconds = {"computing": computing, communicating: total, "decoding": decoding, "file system": filing}
        busy = computing + costs.data_cpu * loaded / costs.cores + exposed
        return max(busy, decoding, filing), seconds

    fast, slow = costs.spread(ranks)
    median_step, seconds = step(1.0)
    alone = max(costs.computing(costs.batch) + costs.data_cpu * costs.batch / costs.cores, costs.data * costs.batch)
    steps = None if costs.steps is None else -(-costs.steps // ranks) if weak else costs.steps
    return Prediction(
        nodes,
        ranks,
        rows,
        median_step,
        step(fast)[0],
        step(slow)[0],
        batch / median_step,
        alone / costs.batch * batch / median_step / ranks,
        None if steps is None else steps * median_step,
        seconds,
        max(seconds, key=lambda name: seconds[name]),
    )


def node_counts(nodes: int) -> list[int]:
    """Return numbers of nodes to compare: powers of two, and ``nodes``.

    >>> node_counts(12)
    [1, 2, 4, 8, 12]
    """
    return [*(1 << power for power in range(nodes.bit_length()) if 1 << power < nodes), nodes]


def facts(costs: Measured, found: Sequence[Prediction]) -> dict[str, Any]:
    """Return measurements and predictions as plain values, which can be stored as JSON."""
    return {"measured": asdict(costs), "predicted": [asdict(prediction) for prediction in found]}


def lines(costs: Measured, found: Sequence[Prediction], filesystem: float | None) -> list[str | Table]:
    """Return what to print: measurements, a table of predictions, and what they leave out."""
    of_steps = ", ".join(
        f"{rows:,}: {_seconds(median(times))} ({(max(times) - min(times)) / median(times):.0%} apart in {len(times)})"
        for rows, times in sorted(costs.times.items())
    )
    kind = "each rank reads its own" if costs.sharded else "every rank makes whole batches"
    of_files = "" if costs.file_bytes is None else f", {nbytes_text(costs.file_bytes)} of files"
    gradients = sum(nbytes for nbytes, _ in costs.buckets)
    columns = "nodes", "ranks", "rows", "step", "slowest", "samples/s", "efficiency", "epoch", "binds"
    table = Table(*columns, box=None)
    for x in found:
        epoch = "unknown" if x.epoch is None else _seconds(x.epoch)
        times = _seconds(x.step), _seconds(x.slowest)
        table.add_row(
            *(f"{x.nodes:,}", f"{x.ranks:,}", f"{x.rows:,}", *times, f"{x.rate:,.0f}", f"{x.efficiency:.0%}"),
            *(epoch, x.binds),
        )
    return [
        f"measured on one rank with {counted(costs.cores, 'core')}, steps by rows: {of_steps}",
        f"gradients: {nbytes_text(gradients)} in {counted(len(costs.buckets), 'bucket')}",
        f"data: {_seconds(costs.data)} a row, {_seconds(costs.data_cpu)} of a core{of_files}; {kind}",
        f"from the start to the end of the first step: {_seconds(costs.start)}",
        table,
        *(f"note: {note}" for note in _notes(costs, found[-1], filesystem)),
    ]


def _notes(costs: Measured, last: Prediction, filesystem: float | None) -> list[str]:
    """Return what a prediction leaves out or what to change, as sentences without their end."""
    notes = []
    if last.ranks > costs.batch and last.rows == 1:
        idle = counted(last.ranks - costs.batch, "rank")
        notes.append(f"{idle} of {last.ranks:,} have no row of a batch of {costs.batch:,}: choose larger batches")
    if filesystem is not None and costs.file_bytes is None:
        notes.append("the bytes of a sample are known of data sets of matex_data alone: --filesystem is not counted")
    if last.rows > max(costs.times):
        notes.append(f"steps of {last.rows:,} rows took too long to be measured, and follow from those of fewer")
    if last.binds == "decoding" and not costs.sharded:
        notes.append("every rank makes whole batches: of open_dataset(...).tf_dataset(...) it reads its rows")
    if last.binds == "network":
        notes.append("larger batches, or matex run --wire-dtype bfloat16, make the network matter less")
    return notes


def _seconds(value: float) -> str:
    """Return a time with its unit.

    >>> _seconds(0.00123), _seconds(12.3), _seconds(7500)
    ('1.23 ms', '12.3 s', '2.08 h')
    """
    if value >= 7200:
        return f"{value / 3600:.3g} h"
    factor, unit = next(((f, u) for f, u in ((1, "s"), (1e3, "ms")) if value * f >= 0.9995), (1e6, "µs"))
    return f"{value * factor:.4g} {unit}" if value * factor >= 1000 else f"{value * factor:.3g} {unit}"
