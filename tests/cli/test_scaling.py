"""The model of scale: units, and properties that any prediction has."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from matex_data.cli.scaling import Measured, Network, averaging, parse_bandwidth, parse_network, predict
from matex_data.errors import DataError

SECONDS = st.floats(1e-4, 10)
BATCHES = st.integers(1, 4096)


@st.composite
def costs(draw: st.DrawFn) -> Measured:
    """Return costs in which more rows take longer."""
    batch = draw(BATCHES)
    times, longest = {}, 0.0
    slower = draw(st.lists(st.floats(1, 1.5), min_size=2, max_size=2))
    for rows in sorted({batch, *draw(st.lists(st.integers(1, batch), max_size=2))}):
        longest += draw(SECONDS)
        times[rows] = [longest, *(longest * factor for factor in slower)]
    bucket = st.tuples(st.integers(1, 10**8), st.floats(0, 1))
    return Measured(
        cores=draw(st.integers(1, 8)),
        batch=batch,
        steps=draw(st.none() | st.integers(1, 1000)),
        times=times,
        buckets=draw(st.lists(bucket, max_size=3)),
        memory=draw(st.floats(0, 1e-8)),
        sharded=draw(st.booleans()),
        data=draw(st.floats(0, 1e-2)),
        data_cpu=draw(st.floats(0, 1e-2)),
        file_bytes=draw(st.none() | st.floats(0, 1e6)),
        start=1.0,
    )


NODES, RANKS = st.integers(1, 10_000), st.integers(1, 64)
NETWORKS = st.builds(Network, st.floats(1e6, 1e12), st.floats(0, 1e-3))


@pytest.mark.parametrize(
    ("text", "found"),
    [("100Gb/s,2us", (12.5e9, 2e-6)), ("1.5 MB/s, 1ms", (1.5e6, 1e-3)), ("8b/s,0ns", (1, 0)), ("1TB/s,1s", (1e12, 1))],
)
def test_units_of_networks(text: str, found: tuple[float, float]) -> None:
    network = parse_network(text)
    assert (network.bandwidth, network.latency) == pytest.approx(found)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "100Gb/s",
        "100Gb/s,",
        "100Gb/s,2",
        "100,2us",
        "2us,100Gb/s",
        "0Gb/s,2us",
        "-1Gb/s,2us",
        "1e2Gb/s,2us",
        "100gb/s,2us",
        "100GB,2us",
        "100Gbps,2us",
        "100Gb/s,2us,3us",
        "100Gb/s;2us",
        "100GiB/s,2us",
        "infGb/s,2us",
    ],
)
def test_networks_without_units_are_errors(text: str) -> None:
    with pytest.raises(DataError, match="--network gives no") as caught:
        parse_network(text)
    assert "100Gb/s" in str(caught.value) and "found: '" in str(caught.value)


@pytest.mark.parametrize("text", ["50", "50GB", "fast", "0GB/s", "50 GB / s", "5,0GB/s", "nanGB/s"])
def test_bandwidths_without_units_are_errors(text: str) -> None:
    with pytest.raises(DataError, match="--filesystem gives no bandwidth"):
        parse_bandwidth(text)


@given(costs())
def test_one_rank_is_what_was_measured(measured: Measured) -> None:
    found = predict(replace(measured, data=0.0, data_cpu=0.0, file_bytes=None), 1, 1, Network(1e6, 1e-3), 1e6)
    assert found.step == measured.computing(measured.batch) == pytest.approx(sorted(measured.times[measured.batch])[1])
    assert found.fastest <= found.step <= found.slowest
    assert found.efficiency == pytest.approx(1) and found.rows == measured.batch


@given(costs(), NODES, RANKS, NETWORKS, st.floats(1, 100), st.booleans())
def test_faster_networks_and_file_systems_make_no_step_slower(
    measured: Measured, nodes: int, ranks: int, network: Network, factor: float, weak: bool
) -> None:
    slow = predict(measured, nodes, ranks, network, 1e9, weak)
    quick = Network(network.bandwidth * factor, network.latency / factor)
    assert predict(measured, nodes, ranks, quick, 1e9, weak).step <= slow.step
    assert predict(measured, nodes, ranks, network, 1e9 * factor, weak).step <= slow.step
    assert predict(measured, nodes, ranks, None, None, weak).step <= slow.step


@given(costs(), NODES, RANKS, NETWORKS, st.booleans())
def test_a_step_takes_as_long_as_what_binds_it(
    measured: Measured, nodes: int, ranks: int, network: Network, weak: bool
) -> None:
    found = predict(measured, nodes, ranks, network, 1e9, weak)
    busy, exposed = averaging(measured, nodes, ranks, network, found.seconds["computing"])
    assert 0 <= exposed <= busy * (1 + 1e-9)
    assert found.step <= sum(found.seconds.values()) * (1 + 1e-9)
    if found.binds != "network" or measured.cores == 1:  # beside more cores it hides behind computing
        assert found.step >= found.seconds[found.binds] * (1 - 1e-9)
    assert found.fastest <= found.slowest * (1 + 1e-9) and found.step <= found.slowest * (1 + 1e-9)
    assert found.rate * found.step == pytest.approx(measured.batch * (nodes * ranks if weak else 1))
    assert (found.epoch is None) == (measured.steps is None)


@given(costs(), NODES, RANKS, NETWORKS)
def test_weak_scaling_gives_each_rank_the_batch(measured: Measured, nodes: int, ranks: int, network: Network) -> None:
    found = predict(measured, nodes, ranks, network, weak=True)
    assert found.rows == measured.batch
    assert found.seconds["computing"] == measured.computing(measured.batch)
    assert found.efficiency <= 1 + 1e-9


@given(costs(), st.integers(1, 4096), st.integers(1, 4096))
def test_more_rows_take_longer(measured: Measured, one: int, other: int) -> None:
    assert measured.computing(min(one, other)) <= measured.computing(max(one, other))


def test_the_link_of_a_node_carries_each_byte_twice_whatever_the_ranks() -> None:
    measured = Measured(1, 64, 1, {64: [1.0]}, [(10**9, 1.0)], 0.0, True, 0.0, 0.0, None, 0.0)
    network = Network(1e9, 0.0)
    for ranks in (1, 4, 64):
        assert averaging(measured, 128, ranks, network, 1.0)[0] == pytest.approx(2 * 127 / 128, rel=1e-3)


def test_buckets_are_summed_while_others_are_computed() -> None:
    measured = Measured(4, 64, 1, {64: [1.0]}, [(10**8, 0.5), (10**8, 1.0)], 0.0, True, 0.0, 0.0, None, 0.0)
    network = Network(1e9, 0.0)  # 0.1 s for a bucket on two nodes
    assert averaging(measured, 2, 1, network, 1.0)[1] == pytest.approx(0.1, rel=1e-2)
    assert averaging(replace(measured, cores=1), 2, 1, network, 1.0)[1] == pytest.approx(0.2, rel=1e-2)


@pytest.mark.parametrize(
    ("change", "binds"),
    [
        ({}, "computing"),
        ({"data": 0.1, "data_cpu": 0.1}, "decoding"),
        ({"buckets": [(10**10, 1.0)]}, "network"),
        ({"file_bytes": 1e9}, "file system"),
    ],
)
def test_what_binds(change: dict[str, object], binds: str) -> None:
    measured = Measured(1, 64, 1, {8: [1.0], 64: [8.0]}, [], 0.0, False, 0.0, 0.0, None, 0.0)
    assert predict(replace(measured, **change), 8, 1, Network(1e9, 0.0), 1e9).binds == binds  # type: ignore[arg-type]
