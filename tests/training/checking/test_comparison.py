"""Differences are told from rounding; a cause is named only if it is one."""

from __future__ import annotations

import numpy as np

from matex_data.training.checking.comparison import Rounding, Verdict, distances, judge
from matex_data.training.checking.probe import Effects

EPSILON = float(np.finfo(np.float32).eps)
RNG = np.random.default_rng(0)
GRADIENT = RNG.normal(size=1000).astype(np.float32)


def _compared(other: np.ndarray, rounding: Rounding | None = None) -> Verdict:
    a, b = (Effects({"gradient of a": array}) for array in (GRADIENT, other))
    return _judged(a, b, rounding or Rounding(EPSILON))


def _judged(whole: Effects, sharded: Effects, rounding: Rounding) -> Verdict:
    return judge(whole, sharded, distances(whole, sharded), rounding)


def test_last_bits_are_rounding() -> None:
    assert _compared(GRADIENT * np.float32(1 + 2 * EPSILON)).agree


def test_a_term_of_a_ten_thousandth_is_seen() -> None:
    found = _compared(GRADIENT + 1e-4 * RNG.normal(size=1000))
    assert not found.agree
    assert found.name == "gradient of a"
    assert 5e-5 < found.difference < 2e-4
    assert found.ratio is None  # "1 times the other" is no cause


def test_a_multiple_is_a_cause() -> None:
    assert _compared(GRADIENT / 2).ratio == 0.5


def test_measured_rounding_explains_differences_of_its_size() -> None:
    rounding = Rounding(EPSILON)
    noisy = GRADIENT + 1e-3 * RNG.normal(size=1000)
    rounding.measure(Effects({"gradient of a": GRADIENT}), Effects({"gradient of a": noisy}))
    assert _compared(GRADIENT + 1e-3 * RNG.normal(size=1000), rounding).agree
    assert not _compared(GRADIENT + 3e-2 * RNG.normal(size=1000), rounding).agree


def test_no_rounding_explains_another_gradient() -> None:
    rounding, exact = Rounding(EPSILON), {"gradient of b": GRADIENT}
    noisy = {"gradient of a": GRADIENT + 0.2 * RNG.normal(size=1000), **exact}
    whole = Effects({"gradient of a": GRADIENT, **exact})
    rounding.measure(whole, Effects(noisy))
    assert _judged(whole, Effects({"gradient of a": GRADIENT * 0.9, **exact}), rounding).agree
    assert not _judged(whole, Effects({"gradient of a": GRADIENT * 0.33, **exact}), rounding).agree


def test_a_change_is_rounded_as_the_sum_that_it_changes() -> None:
    before = np.float32(11.7)
    change = np.float32(before + np.float32(0.0931745)) - before
    whole = Effects({"state of metrics 1": change}, resolutions={"state of metrics 1": EPSILON * float(before)})
    assert _judged(whole, Effects({"state of metrics 1": np.float64(0.0931745)}), Rounding(EPSILON)).agree
    assert not _judged(whole, Effects({"state of metrics 1": np.float64(0.0933)}), Rounding(EPSILON)).agree


def test_rounding_that_hides_everything_is_no_agreement() -> None:
    rounding = Rounding(EPSILON)
    rounding.measure(Effects({"gradient of a": GRADIENT}), Effects({"gradient of a": -GRADIENT}))
    found = _compared(GRADIENT, rounding)
    assert found.hidden
    assert not found.agree


def test_what_is_not_finite_differs() -> None:
    other = GRADIENT.copy()
    other[3] = np.nan
    assert not _compared(other).agree
    assert not _compared(GRADIENT[:-1]).agree


def test_effects_that_are_absent_on_one_side_differ() -> None:
    whole = Effects({"gradient of a": GRADIENT, "gradient of b": None, "value of c": np.float64(1)})
    assert not any(distances(whole, whole).values())
    for name in whole.arrays:
        others = {other: array for other, array in whole.arrays.items() if other != name}
        for one, two in ((whole, Effects(others)), (Effects(others), whole)):
            found = _judged(one, two, Rounding(EPSILON))
            assert (found.agree, found.name, found.excess) == (False, name, np.inf)
    filled = Effects({**whole.arrays, "gradient of b": GRADIENT})
    assert _judged(whole, filled, Rounding(EPSILON)).name == "gradient of b"
