"""Pipeline: micro-batches on their way through the stages, one forward, one backward (1F1B).

The stages form a line. A stage first computes as many micro-batches forward as there are stages behind it; from then on
each backward computation follows one forward computation, so that the activations of few micro-batches are kept.

Python runs the schedule, so that waits for other stages are where deadlines are; each computation is one call of a
compiled function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from matex_data.errors import PartitionError
from matex_data.mpi.activity import busy
from matex_data.timeline import timeline
from matex_data.training.model_parallel.stages.messages import BACKWARD, FORWARD, Line
from matex_data.training.model_parallel.stages.micro_batches import Batch, row_specs, slices
from matex_data.training.model_parallel.stages.stage import Edge, LastStage, Stage

Direction = Literal["forward", "backward"]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[tuple[Direction, int]]:
    """Return the computations of a stage in a training step, each with the number of its micro-batch.

    At most ``stages - stage`` micro-batches are in flight.

    Examples
    --------
    >>> one_forward_one_backward(0, 2, 2)
    [('forward', 0), ('forward', 1), ('backward', 0), ('backward', 1)]
    """
    ahead = min(stages - 1 - stage, micro_batches)
    schedule: list[tuple[Direction, int]] = [("forward", i) for i in range(ahead)]
    for i in range(micro_batches):
        if i + ahead < micro_batches:
            schedule.append(("forward", i + ahead))
        schedule.append(("backward", i))
    return schedule


class PipelineStage:
    """Stage of this rank, between its neighbours. Each method is *collective* among the stages.

    Parameters
    ----------
    make_stage : returns this stage for the tensors that it receives.
    inputs : positions of the inputs of the model that it takes.
    """

    def __init__(self, line: Line, make_stage: Callable[[Edge], Any], inputs: Sequence[int]) -> None:
        self._line = line
        self._make_stage = make_stage
        self._inputs = list(inputs)
        self._stages: dict[str, Stage | LastStage] = {}
        self.last = line.stage == line.stages - 1

    def prepare(self, mode: str, batch: Batch) -> None:
        """Trace the computations for batches like this one, each stage after the one before it."""
        if mode in self._stages:
            return
        with busy("tracing the computations of its stage"):
            receives = Edge()
            if self._line.stage:
                receives = self._line.receive(FORWARD)
            stage = self._make_stage(receives)
            inputs = row_specs([batch.inputs[i] for i in self._inputs])
            if isinstance(stage, Stage):
                sends = stage.compile_forward(inputs, training=mode == "train")
                self._line.send(FORWARD, sends)
            elif mode == "predict":
                stage.compile_predict(inputs)
            else:
                stage.compile_step(inputs, row_specs(batch.targets), training=mode == "train")
            self._stages[mode] = stage

    def train(self, batch: Batch, micro_batches: int, rows: int, logs: Callable[[], Any]) -> Any:
        """Add the gradients of a batch to the sums of each stage; return the logs of the last stage.

        Parameters
        ----------
        rows : of the batches of all replicas.
        logs : returns the logs, on the last stage.
        """
        cut = slices(batch.rows, micro_batches)
        kept: dict[int, Any] = {}
        found: Any = None
        for direction, i in one_forward_one_backward(self._line.stage, self._line.stages, len(cut)):
            with timeline.span(f"{direction} {i}", "stage"):
                if direction == "forward":
                    kept[i] = self._forward("train", batch, cut[i], rows)
                else:
                    weight = (cut[i].stop - cut[i].start) / rows
                    found = self._backward(kept.pop(i), weight, logs if i == len(cut) - 1 else lambda: None)
        self._line.finish()
        return found

    def forward(self, mode: str, batch: Batch, micro_batches: int, rows: int) -> list[Any]:
        """Evaluate or predict a batch; return the predictions of its micro-batches, on the last stage.

        Parameters
        ----------
        mode : "test" or "predict".
        micro_batches, rows : as in ``train``.
        """
        cut = slices(batch.rows, micro_batches)
        outputs = [self._forward(mode, batch, micro_batch, rows) for micro_batch in cut]
        self._line.finish()
        return outputs if self.last and mode == "predict" else []

    def _forward(self, mode: str, batch: Batch, micro_batch: slice, rows: int) -> Any:
        """Compute a micro-batch forward, and send its activations.

        Return what the stage keeps of it; on the last stage the errors of what it has received, or the predictions.
        """
        stage = self._stages[mode]
        inputs, targets = batch.rows_of(micro_batch)
        received, loss = self._receive_activations(batch) if self._line.stage else ([], 0.0)
        tensors = [*(inputs[i] for i in self._inputs), *received]
        if isinstance(stage, Stage):
            kept = stage.forward(tensors, training=mode == "train")
            content = batch.digest, loss + float(kept.own_loss), list(map(np.asarray, kept.outputs))
            self._line.send(FORWARD, content)
            return kept if mode == "train" else None
        if mode == "predict":
            return stage.predict(tensors)
        count = micro_batch.stop - micro_batch.start
        scalars = tf.constant(count / rows, tf.float64), tf.constant(count, tf.int64)
        return stage.step(tensors, targets, *scalars, tf.constant(loss, stage.layers.loss_dtype))

    def _backward(self, kept: Any, weight: float, logs: Callable[[], Any]) -> Any:
        """Compute a micro-batch backward, and send its errors; return the logs of the last stage, which go with them.

        Parameters
        ----------
        kept : what ``_forward`` has returned: on the last stage the errors.
        weight : share of its rows in those of the batches of all replicas.
        """
        stage = self._stages["train"]
        if isinstance(stage, Stage):
            found, arrays = self._line.receive(BACKWARD)
            errors = stage.backward(kept, list(map(tf.convert_to_tensor, arrays)), weight)
        else:
            found, errors = logs(), kept
        if self._line.stage:
            self._line.send(BACKWARD, (found, list(map(np.asarray, errors))))
        return found

    def _receive_activations(self, batch: Batch) -> tuple[list[Any], float]:
        """Return the activations of a micro-batch, and the loss that the layers of earlier stages have added.

        Raises
        ------
        PartitionError : the stage before has read another batch.
        """
        digest, loss, arrays = self._line.receive(FORWARD)
        if digest != batch.digest:
            stage = self._line.stage
            raise PartitionError(
                "the stages have read different batches",
                expected="the same batch on all stages of a replica",
                found=f"checksum {digest:08x} on stage {stage - 1}, {batch.digest:08x} on stage {stage}",
                remedy="give all stages the same data in the same order: open it with comm=mesh.data, "
                "and shuffle with a seed",
            )
        return list(map(tf.convert_to_tensor, arrays)), loss
