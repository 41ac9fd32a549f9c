"""Messages between neighbouring stages: sent without blocking, received by looking and sleeping, with a deadline.

MPICH and Open MPI copy large messages from the memory of the sender, if both processes are on one machine: the sender
computes meanwhile. Over a network it may have to look again first.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from matex_data._types import Array
from matex_data.mpi.library import MPI
from matex_data.mpi.polling import poll
from matex_data.training.comm.channel import Channel

_FAILURE = 0  # MPI tag of the message by which a stage ends a step of its neighbours
_FIRST = 1
_KINDS = 2
"""Tags of a micro-batch: of its activations and of its errors."""
ACTIVATIONS, ERRORS = 0, 1


class StepFailed(Exception):
    """Failure of another stage, which ends the step; the ranks then agree on the error of that stage."""


class Line:
    """Stages of one replica in a line, of which each exchanges messages with its two neighbours.

    Parameters
    ----------
    channel : of the stages; the rank is the number of the stage.

    Attributes
    ----------
    stage, stages : number of this stage, and of all.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.stage, self.stages = channel.rank, channel.size
        self._sent: list[tuple[MPI.Request, Any]] = []  # with the memory that MPI reads until a request completes
        self._sent_to: dict[int, int] = {}  # numbers of messages, by stage
        self._received_from: dict[int, int] = {}

    def send(self, stage: int, kind: int, micro_batch: int, header: Any, arrays: Sequence[Array]) -> None:
        """Start to send a header and arrays to a neighbour.

        Parameters
        ----------
        kind : ``ACTIVATIONS`` or ``ERRORS``.
        header : object that ``pickle`` knows.
        arrays : contiguous; they must not change until they are sent.
        """
        self._all_sent()
        tag = _tag(kind, micro_batch)
        self._start(pickle.dumps(header), stage, tag)
        for array in arrays:
            self._start(array.reshape(-1).view(np.uint8), stage, tag)

    def receive_header(self, stage: int, kind: int, micro_batch: int) -> Any:
        """Return the header of a message of a neighbour.

        Raises
        ------
        StepFailed : another stage has failed.
        PartitionError : the neighbour has left the program, or does not send in time.
        """
        comm, tag, status = self._channel.host.comm, _tag(kind, micro_batch), MPI.Status()
        found: list[MPI.Message] = []

        def look() -> bool:
            self._raise_failure()
            message = comm.Improbe(stage, tag, status)
            if message is not None:
                found.append(message)
            return bool(found)

        self._channel.communicator.wait_until(lambda seconds: poll(look, seconds))
        memory = bytearray(status.Get_count(MPI.BYTE))
        found[0].Recv([memory, MPI.BYTE])
        self._count(stage)
        return pickle.loads(memory)

    def receive(self, stage: int, kind: int, micro_batch: int, array: Array) -> None:
        """Receive the next array of a message, whose header has come; raises like ``receive_header``."""
        request = self._channel.host.comm.Irecv(
            [array.reshape(-1).view(np.uint8), MPI.BYTE], stage, _tag(kind, micro_batch)
        )

        def look() -> bool:
            self._raise_failure()
            return bool(request.Test())

        try:
            self._channel.communicator.wait_until(lambda seconds: poll(look, seconds))
        except BaseException:
            request.Cancel()
            status = MPI.Status()
            request.Wait(status)
            if not status.Is_cancelled():
                self._count(stage)
            raise
        self._count(stage)

    def fail(self) -> None:
        """Tell the neighbours that this step has failed."""
        for stage in (self.stage - 1, self.stage + 1):
            if 0 <= stage < self.stages:
                self._start(b"", stage, _FAILURE)

    def finish(self) -> None:
        """Return when everything is sent."""
        self._channel.communicator.wait_until(lambda seconds: poll(self._all_sent, seconds))

    def drain(self) -> None:
        """Receive and drop what is under way after a failure. *Collective*."""
        by_stage = self._channel.host.allgather_object(self._sent_to)
        expected = sum(sent.get(self.stage, 0) for sent in by_stage)
        status = MPI.Status()

        def received() -> bool:
            message = self._channel.host.comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            if message is not None:
                message.Recv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE])
                self._count(status.Get_source())
            return bool(sum(self._received_from.values()) == expected)

        self._channel.communicator.wait_until(lambda seconds: poll(received, seconds))
        self.finish()

    def _start(self, content: Any, stage: int, tag: int) -> None:
        request = self._channel.host.comm.Isend([content, MPI.BYTE], stage, tag)
        self._sent.append((request, content))
        self._sent_to[stage] = self._sent_to.get(stage, 0) + 1

    def _count(self, stage: int) -> None:
        self._received_from[stage] = self._received_from.get(stage, 0) + 1

    def _all_sent(self) -> bool:
        self._sent = [(request, memory) for request, memory in self._sent if not request.Test()]
        return not self._sent

    def _raise_failure(self) -> None:
        if self._channel.host.comm.Iprobe(MPI.ANY_SOURCE, _FAILURE):
            raise StepFailed


def _tag(kind: int, micro_batch: int) -> int:
    return _FIRST + _KINDS * micro_batch + kind


def memory_of(tensor: Any) -> Array:
    """Return the values of an eager tensor as bytes; on a CPU they are not copied."""
    return np.ascontiguousarray(np.asarray(tensor)).reshape(-1).view(np.uint8)
