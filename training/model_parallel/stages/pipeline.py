"""Pipeline: micro-batches on their way through the stages, one forward, one backward (1F1B).

The stages form a line. A stage first computes as many micro-batches forward as there are stages behind it; from then on
each backward computation follows one forward computation, so that the activations of few micro-batches are kept.

Python runs the schedule, so that waits for other stages are where deadlines are; each computation is one call of a
compiled function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from matex_data.errors import PartitionError
from matex_data.mpi.activity import busy
from matex_data.timeline import timeline
from matex_data.training.model_parallel.stages.messages import ACTIVATIONS, ERRORS, Line, memory_of
from matex_data.training.model_parallel.stages.micro_batches import Batch, row_specs, slices
from matex_data.training.model_parallel.stages.stage import Edge, LastStage, Pending, Stage, Targets


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


_HANDSHAKE = 0
"""Number of the message by which a stage describes what it sends, which precedes those of micro-batches."""


class Received(NamedTuple):
    """Activations of a micro-batch.

    Attributes
    ----------
    tensors : what the stage before has sent.
    loss : loss that the layers of earlier stages have added.
    """

    tensors: list[Any]
    loss: float


class PipelineStage:
    """Stage of this rank, between its neighbours. Each method is *collective* among the stages.

    Parameters
    ----------
    line : this stage and its neighbours.
    make_stage : returns this stage for the tensors that it receives.
    inputs : positions of the inputs of the model that it takes.

    Attributes
    ----------
    stage : computations of this stage; None before the first step.
    """

    def __init__(self, line: Line, make_stage: Callable[[Edge], Any], inputs: Sequence[int]) -> None:
        self._line = line
        self._make_stage = make_stage
        self._inputs = list(inputs)
        self._stages: dict[str, tuple[Stage | LastStage, Edge, Edge]] = {}
        self.last = line.stage == line.stages - 1

    def prepare(self, mode: str, batch: Batch) -> None:
        """Trace the computations for batches like this one, each stage after the one before it.

        Parameters
        ----------
        mode : "train", "test" or "predict".
        """
        if mode in self._stages:
            return
        with busy("tracing the computations of its stage"):
            receives = Edge()
            if self._line.stage:
                receives = self._line.receive_header(self._line.stage - 1, ACTIVATIONS, _HANDSHAKE)
            stage, sends = self._make_stage(receives), Edge()
            inputs = row_specs([batch.inputs[i] for i in self._inputs])
            if isinstance(stage, Stage):
                sends = stage.compile_forward(inputs, training=mode == "train")
                self._line.send(self._line.stage + 1, ACTIVATIONS, _HANDSHAKE, sends, [])
            elif mode == "predict":
                stage.compile_predict(inputs)
            else:
                targets = Targets(batch.targets.structure, row_specs(batch.targets.tensors))
                stage.compile_step(inputs, targets, training=mode == "train")
            self._stages[mode] = stage, receives, sends

    def train(self, batch: Batch, micro_batches: int, rows: int, scale: Any, logs: Callable[[], Any]) -> Any:
        """Add the gradients of a batch to the sums of each stage; return the logs of the last stage.

        Parameters
        ----------
        micro_batches : into which the batch is divided.
        rows : of the batches of all replicas.
        scale : function that scales the loss.
        logs : returns the logs, on the last stage.
        """
        stage, _, sends = self._stages["train"]
        cut = slices(batch.rows, micro_batches)
        pending: dict[int, Any] = {}
        found: Any = None
        for kind, i in one_forward_one_backward(self._line.stage, self._line.stages, len(cut)):
            with timeline.span(f"{kind.value} {i}", "stage"):
                count = cut[i].stop - cut[i].start
                if kind is Kind.RECEIVE_ACTIVATIONS:
                    pending[i] = self._receive_activations("train", batch, i)
                elif kind is Kind.FORWARD:
                    pending[i] = self._forward(stage, batch, cut[i], pending.get(i, Received([], 0.0)), count / rows)
                elif kind is Kind.SEND_ACTIVATIONS:
                    self._send_activations(batch, i, *pending[i])
                elif kind is Kind.RECEIVE_ERRORS:
                    of_logs, errors = self._receive_errors(sends, pending[i][0].outputs, i)
                    found = found if of_logs is None else of_logs
                    pending[i] = pending[i][0], errors
                elif kind is Kind.BACKWARD and isinstance(stage, Stage):
                    kept, errors = pending.pop(i)
                    weight = tf.cast(scale(tf.constant(count / rows, tf.float32)), tf.float32)
                    pending[i] = stage.backward(kept, errors, weight)
                elif kind is Kind.SEND_ERRORS:
                    of_last = i == len(cut) - 1
                    found = logs() if self.last and of_last else found
                    self._send_errors(i, found if of_last else None, pending.pop(i))
        if self.last and self._line.stages == 1:
            found = logs()
        self._line.finish()
        return found

    def forward(self, mode: str, batch: Batch, micro_batches: int, rows: int) -> list[Any]:
        """Evaluate or predict a batch; return the predictions of its micro-batches, on the last stage.

        Parameters
        ----------
        mode : "test" or "predict".
        micro_batches, rows : as in ``train``.
        """
        stage = self._stages[mode][0]
        cut = slices(batch.rows, micro_batches)
        pending: dict[int, Any] = {}
        outputs: list[Any] = []
        for kind, i in forward_only(self._line.stage, self._line.stages, len(cut)):
            if kind is Kind.RECEIVE_ACTIVATIONS:
                pending[i] = self._receive_activations(mode, batch, i)
            elif kind is Kind.SEND_ACTIVATIONS:
                self._send_activations(batch, i, *pending.pop(i))
            else:
                received = pending.pop(i, Received([], 0.0))
                inputs, targets = self._rows(batch, cut[i])
                if isinstance(stage, Stage):
                    kept = stage.forward([*inputs, *received.tensors])
                    pending[i] = kept, received.loss + float(kept.own_loss)
                elif mode == "predict":
                    outputs.append(stage.predict([*inputs, *received.tensors]))
                else:
                    count = cut[i].stop - cut[i].start
                    self._finish(stage, [*inputs, *received.tensors], targets, count / rows, count, received.loss)
        self._line.finish()
        return outputs

    def broadcast(self, value: Any) -> Any:
        """Return the object of the last stage."""
        if self._line.stages == 1:
            return value
        if not self.last:
            value = self._line.receive_header(self._line.stage + 1, ERRORS, _HANDSHAKE)
        if self._line.stage:
            self._line.send(self._line.stage - 1, ERRORS, _HANDSHAKE, value, [])
        self._line.finish()
        return value

    def _forward(self, stage: Any, batch: Batch, rows: slice, received: Received, weight: float) -> Any:
        """Return what the stage keeps and the loss so far; on the last stage the errors."""
        inputs, targets = self._rows(batch, rows)
        tensors = [*inputs, *received.tensors]
        if isinstance(stage, LastStage):
            return self._finish(stage, tensors, targets, weight, rows.stop - rows.start, received.loss)
        kept = stage.forward_in_training(tensors)
        return kept, received.loss + float(kept.own_loss)

    def _finish(
        self, stage: LastStage, tensors: list[Any], targets: list[Any], weight: float, rows: int, loss: float
    ) -> Any:
        scalars = tf.constant(weight, tf.float64), tf.constant(rows, tf.int64), tf.constant(loss, tf.float32)
        return stage.step(tensors, targets, *scalars)

    def _rows(self, batch: Batch, rows: slice) -> tuple[list[Any], list[Any]]:
        inputs, targets = batch.rows_of(rows)
        return [inputs[i] for i in self._inputs], targets

    def _send_activations(self, batch: Batch, micro_batch: int, kept: Pending, loss: float) -> None:
        header = batch.digest, loss, [tuple(x.shape) for x in kept.outputs]
        arrays = [memory_of(tensor) for tensor in kept.outputs]
        self._line.send(self._line.stage + 1, ACTIVATIONS, micro_batch + 1, header, arrays)

    def _receive_activations(self, mode: str, batch: Batch, micro_batch: int) -> Received:
        """Return the activations of a micro-batch.

        Raises
        ------
        PartitionError : the stage before has read another batch.
        """
        receives = self._stages[mode][1]
        before = self._line.stage - 1
        digest, loss, shapes = self._line.receive_header(before, ACTIVATIONS, micro_batch + 1)
        if digest != batch.digest:
            raise PartitionError(
                "the stages have read different batches",
                expected="the same batch on all stages of a replica",
                found=f"checksum {digest:08x} on stage {before}, {batch.digest:08x} on stage {before + 1}",
                remedy="give all stages the same data in the same order: open it with comm=mesh.data, "
                "and shuffle with a seed",
            )
        dtypes = [dtype for _, dtype in receives.specs]
        return Received(self._receive(before, ACTIVATIONS, micro_batch, shapes, dtypes), loss)

    def _send_errors(self, micro_batch: int, logs: Any, errors: list[Any]) -> None:
        self._line.send(self._line.stage - 1, ERRORS, micro_batch + 1, logs, [memory_of(error) for error in errors])

    def _receive_errors(self, sends: Edge, outputs: list[Any], micro_batch: int) -> tuple[Any, list[Any]]:
        behind, positions = self._line.stage + 1, sends.differentiable
        logs = self._line.receive_header(behind, ERRORS, micro_batch + 1)
        shapes = [tuple(outputs[i].shape) for i in positions]
        return logs, self._receive(behind, ERRORS, micro_batch, shapes, [sends.specs[i][1] for i in positions])

    def _receive(
        self, stage: int, kind: int, micro_batch: int, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]
    ) -> list[Any]:
        arrays = [
            np.empty(shape, tf.as_dtype(dtype).as_numpy_dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        for array in arrays:
            self._line.receive(stage, kind, micro_batch + 1, array)
        return [tf.convert_to_tensor(array) for array in arrays]
