"""Fixtures that all tests share: pools of MPI ranks."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest

from tests.support.ranks import Pool, Pools

RANK_COUNTS = (1, 2, 3, 4)

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("matex", deadline=None)
hypothesis.settings.load_profile("matex")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rank_counts(*counts): numbers of ranks for the fixture pool, else 1, 2, 3, 4")
    config.addinivalue_line("markers", "slow: more of the same, which `make test-all` runs and `make test` leaves out")
    config.addinivalue_line("markers", "openmpi: depends on the MPI library, so `make test` runs it with Open MPI, too")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pool" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("rank_counts")
        counts = marker.args if marker else RANK_COUNTS
        metafunc.parametrize("pool", counts, indirect=True, ids=lambda count: f"{count}ranks")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """Pools of ranks, alive for the whole session: ``ranks(3).run(function, *args)``."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture
def pool(ranks: Pools, request: pytest.FixtureRequest) -> Pool:
    """The pool of 1, 2, 3 and 4 ranks in turn, or of those in ``@pytest.mark.rank_counts(2, 3)``."""
    return ranks(request.param)
