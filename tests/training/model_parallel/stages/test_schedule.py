"""The schedule of the stages: every stage comes to its end, and keeps few micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from matex_data.training.model_parallel.stages.pipeline import Action, Kind, forward_only, one_forward_one_backward

SCHEDULES: list[Callable[[int, int, int], list[Action]]] = [one_forward_one_backward, forward_only]


def _run(schedules: list[list[Action]]) -> list[list[int]]:
    """Run all stages in the order of their actions; return the micro-batches in flight after each action of each."""
    sent: set[tuple[int, Action]] = set()
    done = [0] * len(schedules)
    flights: list[list[int]] = [[] for _ in schedules]
    advanced = True
    while advanced:
        advanced = False
        for stage, actions in enumerate(schedules):
            while done[stage] < len(actions):
                kind, micro_batch = actions[done[stage]]
                if (
                    kind is Kind.RECEIVE_ACTIVATIONS
                    and (stage - 1, Action(Kind.SEND_ACTIVATIONS, micro_batch)) not in sent
                ):
                    break
                if kind is Kind.RECEIVE_ERRORS and (stage + 1, Action(Kind.SEND_ERRORS, micro_batch)) not in sent:
                    break
                sent.add((stage, Action(kind, micro_batch)))
                flights[stage].append((kind is Kind.FORWARD) - (kind is Kind.BACKWARD))
                done[stage] += 1
                advanced = True
    assert done == [len(actions) for actions in schedules], "the stages wait for one another"
    return [[sum(changes[: i + 1]) for i in range(len(changes))] for changes in flights]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda function: function.__name__)
@given(stages=st.integers(1, 8), micro_batches=st.integers(0, 64))
def test_no_stage_waits_forever(
    schedule: Callable[[int, int, int], list[Action]], stages: int, micro_batches: int
) -> None:
    _run([schedule(stage, stages, micro_batches) for stage in range(stages)])


@given(stages=st.integers(1, 8), micro_batches=st.integers(0, 64))
def test_few_micro_batches_are_in_flight(stages: int, micro_batches: int) -> None:
    flights = _run([one_forward_one_backward(stage, stages, micro_batches) for stage in range(stages)])
    for stage, counts in enumerate(flights):
        assert max(counts, default=0) == min(stages - stage, micro_batches)
        assert counts[-1:] in ([], [0])


@given(stages=st.integers(1, 8), micro_batches=st.integers(0, 64))
def test_messages_have_a_receiver(stages: int, micro_batches: int) -> None:
    schedules = [one_forward_one_backward(stage, stages, micro_batches) for stage in range(stages)]

    def of(stage: int, kind: Kind) -> list[int]:
        return [action.micro_batch for action in schedules[stage] if action.kind is kind]

    for stage in range(stages):
        assert of(stage, Kind.FORWARD) == of(stage, Kind.BACKWARD) == list(range(micro_batches))
        assert of(stage, Kind.SEND_ACTIVATIONS) == (
            of(stage + 1, Kind.RECEIVE_ACTIVATIONS) if stage + 1 < stages else []
        )
        assert of(stage, Kind.SEND_ERRORS) == (of(stage - 1, Kind.RECEIVE_ERRORS) if stage else [])


def test_a_forward_computation_precedes_the_backward_one() -> None:
    actions = one_forward_one_backward(0, 2, 3)
    computed = [action for action in actions if action.kind in (Kind.FORWARD, Kind.BACKWARD)]
    names = [f"{action.kind.value[0]}{action.micro_batch}" for action in computed]
    assert names == ["f0", "f1", "b0", "f2", "b1", "b2"]
