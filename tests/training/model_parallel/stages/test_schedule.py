"""The schedule of the stages: every stage comes to its end, and keeps few micro-batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from matex_data.training.model_parallel.stages.pipeline import Direction, one_forward_one_backward


def _run(schedules: list[list[tuple[Direction, int]]]) -> list[list[int]]:
    """Run all stages in the order of their schedules; return the micro-batches in flight after each of their steps."""
    done: set[tuple[int, Direction, int]] = set()
    steps = [0] * len(schedules)
    flights: list[list[int]] = [[] for _ in schedules]
    advanced = True
    while advanced:
        advanced = False
        for stage, schedule in enumerate(schedules):
            while steps[stage] < len(schedule):
                direction, micro_batch = schedule[steps[stage]]
                sender = stage - 1 if direction == "forward" else stage + 1
                if 0 <= sender < len(schedules) and (sender, direction, micro_batch) not in done:
                    break
                done.add((stage, direction, micro_batch))
                flights[stage].append((direction == "forward") - (direction == "backward"))
                steps[stage] += 1
                advanced = True
    assert steps == [len(schedule) for schedule in schedules], "the stages wait for one another"
    return [[sum(changes[: i + 1]) for i in range(len(changes))] for changes in flights]


@given(stages=st.integers(1, 8), micro_batches=st.integers(0, 64))
def test_no_stage_waits_forever_and_few_micro_batches_are_in_flight(stages: int, micro_batches: int) -> None:
    flights = _run([one_forward_one_backward(stage, stages, micro_batches) for stage in range(stages)])
    for stage, counts in enumerate(flights):
        assert max(counts, default=0) == min(stages - stage, micro_batches)
        assert counts[-1:] in ([], [0])


@given(stages=st.integers(1, 8), micro_batches=st.integers(0, 64))
def test_messages_have_a_receiver(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        schedule = one_forward_one_backward(stage, stages, micro_batches)
        for direction in ("forward", "backward"):
            assert [i for other, i in schedule if other == direction] == list(range(micro_batches))


def test_a_forward_computation_precedes_the_backward_one() -> None:
    names = [f"{direction[0]}{micro_batch}" for direction, micro_batch in one_forward_one_backward(0, 2, 3)]
    assert names == ["f0", "f1", "b0", "f2", "b1", "b2"]
