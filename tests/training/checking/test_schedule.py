"""Steps before which a model is checked: ever fewer, at changes, and near the end."""

from __future__ import annotations

from matex_data.training.checking.schedule import FITS, Schedule


def _checked(steps: int, schedule: Schedule | None = None, epoch: int | None = None) -> list[int]:
    """Return the steps, from 1, of a fit that are checked."""
    schedule = schedule or Schedule()
    found = []
    for step in range(steps):
        first = epoch is not None and step % epoch == 0
        if schedule.due(first_of_fit=step == 0, first_of_epoch=first, last_of_fit=step == steps - 1):
            schedule.note_check()
            found.append(step + 1)
        schedule.steps += 1
    return found


def test_each_check_comes_after_twice_as_many_steps() -> None:
    assert _checked(1500)[:-1] == [1, 2, 3, 5, 9, 17, 33, 65, 129, 257, 513, 1025]


def test_the_end_of_a_fit_is_checked_unless_a_check_was_just_before() -> None:
    assert _checked(400)[-1] == 400
    assert _checked(300)[-1] == 257


def test_epochs_add_few_checks() -> None:
    assert len(_checked(1000, epoch=10)) <= 20


def test_many_fits_are_not_all_checked() -> None:
    schedule = Schedule()
    checked = [number for number in range(1, 200) if _checked(1, schedule)]
    assert checked[:FITS] == list(range(1, FITS + 1))
    assert len(checked) < 40
