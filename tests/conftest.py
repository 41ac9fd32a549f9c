"""Fixtures and marks of all tests: pools of MPI ranks, what a run leaves out, and what it tells."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import hypothesis
import pytest

from tests.support import choosing, contexts, machine_speed
from tests.support.launch import share_fork_server
from tests.support.ranks import Pool, Pools

pytest_plugins = ["tests.support.reporting"]

RANK_COUNTS = (1, 3)
SLOW_RANK_COUNTS = (2, 4)

# No deadline: the time of an example depends on the load of the machine.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=30)
hypothesis.settings.register_profile("full", deadline=None, max_examples=300)
hypothesis.settings.load_profile("quick")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("matex_data")
    group.addoption("--part", help="1/8: the first of eight parts of about equal weight")
    group.addoption("--rank-counts", help="1,2,3: run tests that have no numbers of ranks of their own on these")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rank_counts(*counts, slow=()): sizes of the fixture pool")
    config.addinivalue_line("markers", "slow: left out by `make test`, run by `make test-all`")
    config.addinivalue_line("markers", "repeated: execute what faster tests do; left out and run as slow ones are")
    config.addinivalue_line("markers", "product: `make test` runs the whole product of the parameters")
    config.addinivalue_line("markers", "shares_jobs(*names): tests of a file with equal parameters are in one part")
    config.addinivalue_line("markers", "openmpi: run with Open MPI, too")
    config.addinivalue_line("markers", "frameworks: need PyTorch or JAX; run by `make test-torch`")
    config.addinivalue_line("markers", "cluster: jobs of an emulated cluster, run by `make test-cluster`")
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        machine_speed.additions()  # the processes of xdist inherit the figure, and share the server
        share_fork_server()
    if config.getoption("timeout", None):
        config.option.timeout = machine_speed.scaled(config.option.timeout)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pool" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("rank_counts")
        counts = marker.args if marker else RANK_COUNTS
        slow = marker.kwargs.get("slow", ()) if marker else SLOW_RANK_COUNTS
        if chosen := metafunc.config.getoption("rank_counts"):
            counts, slow = (tuple(map(int, chosen.split(","))) if not marker else counts + slow), ()
        params = [*counts, *(pytest.param(count, marks=pytest.mark.slow) for count in slow)]
        metafunc.parametrize("pool", params, indirect=True, ids=lambda count: f"{count}ranks")


@pytest.hookimpl(tryfirst=True)  # before the option -m leaves out what is slow
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this run does not have. Files with long tests come first, so that two processes end together."""
    if not config.getoption("rank_counts"):
        choosing.mark_products(items)
    choosing.mark_repeated(items)
    if part := config.getoption("part"):
        items[:], others = choosing.part(items, *map(int, part.split("/")))
        config.hook.pytest_deselected(items=others)
    items.sort(key=lambda item: "training" not in item.path.parts)


def pytest_collection_finish() -> None:
    gc.freeze()  # otherwise each collection visits thousands of tests, and the modules that they import


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    contexts.switch(item.nodeid)
    try:
        return (yield)
    finally:
        contexts.switch("")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """Yield pools of ranks that run for the whole session: ``ranks(3).run(function, *args)``."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture
def pool(ranks: Pools, request: pytest.FixtureRequest) -> Pool:
    """Return the pool of 1 and of 3 ranks, or of the counts in ``@pytest.mark.rank_counts(2, slow=(3,))``."""
    return ranks(request.param)
