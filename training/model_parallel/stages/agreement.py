"""Agreement of the ranks of a model in stages: errors, further batches, and the end of a step that has failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from matex_data.errors import PartitionError
from matex_data.training.comm.channel import Channel
from matex_data.training.exact.errors import unwrapped_errors
from matex_data.training.model_parallel.layouts.ranks import ModelRanks
from matex_data.training.model_parallel.stages.messages import Line, StepFailed
from matex_data.training.model_parallel.stages.micro_batches import Batch, read_batch
from matex_data.training.partition.parts import all_come


class Agreement:
    """Agreement of all ranks, or of those of one replica. Each method is *collective*.

    Parameters
    ----------
    channels : all ranks; or the stages of a replica, and the ranks of each stage.
    replicas : replicas of this rank's part of the model; None: one replica agrees alone.
    ranks : that hold parts of the layers of this stage.
    """

    def __init__(
        self, channels: Sequence[Channel], replicas: Channel | None, messages: Line, ranks: ModelRanks
    ) -> None:
        self._channels, self._replicas, self._messages, self._ranks = channels, replicas, messages, ranks
        self._started = False  # every replica has sums of gradients from then on

    def next_batch(self, functional: Any, iterator: Any) -> tuple[Batch | None, int]:
        """Return the next batch, and the rows of those of all replicas; no batch at the end of the data.

        Raises
        ------
        DataError : on all ranks, that of the lowest rank that cannot read its batch.
        PartitionError : on all ranks, if some have no further batch.
        """
        read: list[Batch] = []

        def read_next() -> None:
            try:
                with unwrapped_errors():
                    read.append(read_batch(functional, next(iterator)))
            except (StopIteration, tf.errors.OutOfRangeError):
                pass

        error = _error_of(read_next)
        batch = read[0] if read else None
        rows = 0 if batch is None else batch.rows
        state = (error is not None, error is None and batch is None, batch is not None, rows, -rows)
        failed, ended, going, most, least = self._maximum(*map(int, state))
        if failed:
            raise self._first(error) or StepFailed
        if ended and going:
            raise PartitionError(
                "some ranks have a further batch, and others do not",
                expected="the same number of batches on all ranks",
                found=f"{'another' if batch is not None else 'no further'} batch on rank {self._channels[0].rank}",
                remedy="give all stages the same data, and all replicas data with the same number of steps",
            )
        if self._replicas is None:
            return batch, rows
        if going and not least and not self._started:
            raise PartitionError(
                "a replica has no row of the first batch",
                expected=f"at least {self._replicas.size} rows, one for each replica",
                found="a batch with fewer rows",
                remedy="choose a larger batch size, or more stages and fewer replicas",
            )
        self._started = True
        if most == -least:
            return batch, rows * self._replicas.size
        total = np.array([rows], np.int64)
        self._replicas.host.reduce(total)
        return batch, int(total[0])

    def step(self, run: Callable[[], Any]) -> None:
        """Run the computations of a step; if a rank fails, raise its error on all ranks.

        Raises
        ------
        Exception : the error of the lowest rank that has failed; on this rank alone, if other ranks of its stage have
            not failed, which wait for it in their graphs.
        """
        error, failed = None, False
        try:
            error = _error_of(run)
        except StepFailed:
            failed = True
        if failed or error is not None:
            self._messages.fail()
        if error is not None and not all_come(self._ranks.channel):
            raise error
        (any_failed,) = self._maximum(int(failed or error is not None))
        if any_failed:
            first = self._first(error)
            self._messages.drain()
            raise first or StepFailed

    def _maximum(self, *numbers: int) -> Sequence[int]:
        for channel in self._channels:
            numbers = tuple(channel.communicator.maximum(*numbers))
        return numbers

    def _first(self, error: BaseException | None) -> BaseException | None:
        """Return the error of the lowest rank that has one."""
        for channel in self._channels:
            error = channel.communicator.first_error(error)
        return error


def _error_of(run: Callable[[], Any]) -> BaseException | None:
    """Run a function; return its error, of any kind but ``StepFailed``, since the other ranks wait for this one."""
    try:
        run()
    except StepFailed:
        raise
    except Exception as error:
        return error
    return None
