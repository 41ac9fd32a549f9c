"""Messages between neighbouring stages: sent without blocking, received by looking and sleeping, with a deadline.

MPICH and Open MPI copy large messages from the memory of the sender, if both processes are on one machine: the sender
computes meanwhile. Over a network it may have to look again first.
"""

from __future__ import annotations

import pickle
from typing import Any

from matex_data.mpi.library import MPI
from matex_data.mpi.polling import poll
from matex_data.training.comm.channel import Channel

_NUMBERS = 1 << 14
"""Numbers of lines, each with two tags of MPI, which begin anew after that: the largest tag may be 32767."""
_next_number = [0]
FORWARD, BACKWARD = 1, -1
"""Ways of messages along the line: of activations to the next stage, of errors to the one before."""


class StepFailed(Exception):
    """Failure of another stage, which ends the step; the ranks then agree on the error of that stage."""


class Line:
    """Stages of one replica in a line, of which each exchanges messages with its two neighbours. *Collective*.

    Each line has tags of its own: an interrupted step may have left messages that nobody has received.

    Parameters
    ----------
    channel : of the stages; the rank is the number of the stage.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.stage, self.stages = channel.rank, channel.size
        self._sent: list[tuple[MPI.Request, Any]] = []  # with the memory that MPI reads until a request completes
        self._sent_to: dict[int, int] = {}  # numbers of messages, by stage
        self._received = 0
        (number,) = channel.communicator.maximum(_next_number[0])
        _next_number[0] = (number + 1) % _NUMBERS
        self._failure = 2 * number  # tag of the message by which a stage ends a step of its neighbours
        self._content = self._failure + 1  # of all others, which come in the order in which a stage sends them

    def send(self, way: int, content: Any) -> None:
        """Start to send an object that ``pickle`` knows to a neighbour, ``FORWARD`` or ``BACKWARD``."""
        self._all_sent()
        self._start(pickle.dumps(content, pickle.HIGHEST_PROTOCOL), self.stage + way, self._content)

    def receive(self, way: int) -> Any:
        """Return the next object that a neighbour sends.

        Raises
        ------
        StepFailed : another stage has failed.
        PartitionError : the neighbour has left the program, or does not send in time.
        """
        comm, status, sender = self._channel.host.comm, MPI.Status(), self.stage - way
        found: list[MPI.Message] = []

        def look() -> bool:
            if comm.Iprobe(MPI.ANY_SOURCE, self._failure):
                raise StepFailed
            message = comm.Improbe(sender, self._content, status)
            if message is not None:
                found.append(message)
            return bool(found)

        self._channel.communicator.wait_until(lambda seconds: poll(look, seconds))
        memory = bytearray(status.Get_count(MPI.BYTE))
        request = found[0].Irecv([memory, MPI.BYTE])
        self._channel.communicator.wait_until(lambda seconds: poll(request.Test, seconds))
        self._received += 1
        return pickle.loads(memory)

    def fail(self) -> None:
        """Tell the neighbours that this step has failed."""
        for stage in (self.stage - 1, self.stage + 1):
            if 0 <= stage < self.stages:
                self._start(b"", stage, self._failure)

    def finish(self) -> None:
        """Return when everything is sent."""
        self._channel.communicator.wait_until(lambda seconds: poll(self._all_sent, seconds))

    def drain(self) -> None:
        """Receive and drop what is under way after a failure. *Collective*."""
        by_stage = self._channel.host.allgather_object(self._sent_to)
        expected = sum(sent.get(self.stage, 0) for sent in by_stage)
        status = MPI.Status()

        def received() -> bool:
            for tag in (self._failure, self._content):
                message = self._channel.host.comm.Improbe(MPI.ANY_SOURCE, tag, status)
                if message is not None:
                    message.Recv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE])
                    self._received += 1
            return bool(self._received == expected)

        self._channel.communicator.wait_until(lambda seconds: poll(received, seconds))
        self.finish()

    def _start(self, content: Any, stage: int, tag: int) -> None:
        request = self._channel.host.comm.Isend([content, MPI.BYTE], stage, tag)
        self._sent.append((request, content))
        self._sent_to[stage] = self._sent_to.get(stage, 0) + 1

    def _all_sent(self) -> bool:
        self._sent = [(request, memory) for request, memory in self._sent if not request.Test()]
        return not self._sent
