"""Fixtures and marks of all tests: pools of MPI ranks, and what `make test` leaves out."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest

from tests.support.ranks import Pool, Pools

RANK_COUNTS = (1, 3)
SLOW_RANK_COUNTS = (2, 4)

# No deadline: the time of an example depends on the load of the machine.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=30)
hypothesis.settings.register_profile("full", deadline=None, max_examples=300)
hypothesis.settings.load_profile("quick")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rank_counts(*counts, slow=()): sizes of the fixture pool")
    config.addinivalue_line("markers", "slow: left out by `make test`, run by `make test-all`")
    config.addinivalue_line("markers", "openmpi: run with Open MPI, too")
    config.addinivalue_line("markers", "cluster: jobs of an emulated cluster, run by `make test-cluster`")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pool" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("rank_counts")
        counts = marker.args if marker else RANK_COUNTS
        slow = marker.kwargs.get("slow", ()) if marker else SLOW_RANK_COUNTS
        params = [*counts, *(pytest.param(count, marks=pytest.mark.slow) for count in slow)]
        metafunc.parametrize("pool", params, indirect=True, ids=lambda count: f"{count}ranks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the files with the longest tests first, so that two processes end at about the same time."""
    items.sort(key=lambda item: "training" not in item.path.parts)


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
