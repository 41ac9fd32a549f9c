"""Order in which a stage computes and communicates: one forward, one backward (1F1B).

The stages form a line. A stage first computes as many micro-batches forward as there are stages behind it; from then on
each backward computation follows one forward computation, so that the activations of few micro-batches are kept.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """Kind of an action. Receiving blocks until the message has come; sending does not block."""

    RECEIVE_ACTIVATIONS = "receive activations"
    FORWARD = "forward"
    SEND_ACTIVATIONS = "send activations"
    RECEIVE_ERRORS = "receive errors"
    BACKWARD = "backward"
    SEND_ERRORS = "send errors"


class Action(NamedTuple):
    """Action of a stage.

    Attributes
    ----------
    kind : what the stage does.
    micro_batch : number of the micro-batch, from 0.
    """

    kind: Kind
    micro_batch: int


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """Return the actions of a stage in a training step; at most ``stages - stage`` micro-batches are in flight.

    Parameters
    ----------
    stage : number of the stage, from 0.
    stages : number of stages.
    micro_batches : number of micro-batches of the step.

    Examples
    --------
    >>> [f"{action.kind.value} {action.micro_batch}" for action in one_forward_one_backward(1, 2, 1)]
    ['receive activations 0', 'forward 0', 'backward 0', 'send errors 0']
    """
    ahead = min(stages - 1 - stage, micro_batches)
    actions = [action for i in range(ahead) for action in _forward(stage, stages, i)]
    for i in range(micro_batches):
        if i + ahead < micro_batches:
            actions += _forward(stage, stages, i + ahead)
        actions += _backward(stage, stages, i)
    return actions


def forward_only(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """Return the actions of a stage in an evaluation or a prediction; parameters as above."""
    return [action for i in range(micro_batches) for action in _forward(stage, stages, i)]


def _forward(stage: int, stages: int, micro_batch: int) -> list[Action]:
    first, last = stage == 0, stage == stages - 1
    kinds = [Kind.RECEIVE_ACTIVATIONS] * (not first) + [Kind.FORWARD] + [Kind.SEND_ACTIVATIONS] * (not last)
    return [Action(kind, micro_batch) for kind in kinds]


def _backward(stage: int, stages: int, micro_batch: int) -> list[Action]:
    first, last = stage == 0, stage == stages - 1
    kinds = [Kind.RECEIVE_ERRORS] * (not last) + [Kind.BACKWARD] + [Kind.SEND_ERRORS] * (not first)
    return [Action(kind, micro_batch) for kind in kinds]
