"""Steps before which a model is checked: ever fewer, at changes, and near the end."""

from __future__ import annotations

import itertools

from matex_data.training.checking.check import FITS, CheckSchedule


def _checked(steps: int, schedule: CheckSchedule | None = None) -> list[int]:
    """Return the steps, from 1, of a fit that are checked."""
    schedule = schedule or CheckSchedule()
    found = []
    for step in range(steps):
        if schedule.due(first_of_fit=step == 0, last_of_fit=step == steps - 1):
            schedule.note_check()
            found.append(step + 1)
        schedule.steps += 1
    return found


def test_checks_come_at_random_steps_and_ever_fewer() -> None:
    found = _checked(3000)[:-1]
    assert found[:3] == [1, 2, 3]
    assert found == _checked(4000)[: len(found)]  # the same on all ranks
    assert len(found) < 20
    assert len({step % 10 for step in found[3:]}) > 4
    assert all(later <= 2.5 * step for step, later in itertools.pairwise(found))


def test_the_end_of_a_fit_is_checked_unless_a_check_was_just_before() -> None:
    last = _checked(1000)[-2]
    assert _checked(last * 13 // 10)[-2:] == [last, last * 13 // 10]
    assert _checked(last * 12 // 10)[-1] == last


def test_many_fits_are_not_all_checked() -> None:
    schedule = CheckSchedule()
    checked = [number for number in range(1, 200) if _checked(1, schedule)]
    assert checked[:FITS] == list(range(1, FITS + 1))
    assert len(checked) < 40
