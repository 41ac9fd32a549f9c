"""The list of tests that repeat others: nothing that tests execute is lost, and each name is that of a test."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.mutants.repeated import FASTEST, SHORT, compact, repeated
from tests.support.choosing import REPEATED
from tests.support.launch import ROOT

TIMES = st.sampled_from([SHORT / 2, FASTEST, 2 * FASTEST, 9.0])


@given(st.lists(st.tuples(st.integers(0, 2**12 - 1), TIMES, st.booleans()), min_size=1, max_size=12))
def test_tests_that_stay_execute_what_all_do(tests: list[tuple[int, float, bool]]) -> None:
    executed = {f"t.py::f{i % 3}[{i}]": bits for i, (bits, _, _) in enumerate(tests)}
    seconds = {name: time for name, (_, time, _) in zip(executed, tests, strict=True)}
    kept = {name for name, (_, _, is_kept) in zip(executed, tests, strict=True) if is_kept}
    left = set(repeated(executed, seconds, kept))
    stay = set(executed) - left
    assert kept <= stay and all(seconds[name] > SHORT for name in left)
    everything = 0
    for name in stay:
        everything |= executed[name]
    assert all(bits | everything == everything for bits in executed.values())


def test_functions_of_which_all_tests_are_listed_are_one_line() -> None:
    assert compact(["a::f[1]", "a::f[2]", "a::g[1]"], ["a::f[1]", "a::f[2]", "a::g[1]", "a::g[2]"]) == [
        "a::f",
        "a::g[1]",
    ]


def test_each_listed_test_exists() -> None:
    for line in REPEATED.read_text().splitlines():
        path, *_, name = line.partition("[")[0].split("::")
        assert name.startswith("test_")
        file = ROOT / path
        assert file.exists(), f"remove {line} from {REPEATED.name}"
        inherited = len(line.partition("[")[0].split("::")) == 3
        assert inherited or f"def {name}(" in file.read_text(), f"remove {line} from {REPEATED.name}"
