"""Threads of a script that train: all ranks have to train the same model at the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from matex_data.errors import PartitionError
from matex_data.mpi.abort import abort_job
from matex_data.mpi.communicator import Equal
from matex_data.training.comm.channel import Channel

REMEDY = "train one model after the other in one thread; use more ranks, or processes, to train several at once"


class TrainingThread:
    """Guard of the calls that train, which any one thread may make at a time.

    Parameters
    ----------
    channel : ranks that train.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._training = threading.RLock()

    @contextmanager
    def calls(self, name: str) -> Iterator[None]:
        """Context manager: a call of a method that trains. *Collective* outside of the main thread.

        End the job if another thread trains: on another rank it may train the model of this one.

        Raises
        ------
        PartitionError : another thread makes this call on another rank.
        """
        thread = threading.current_thread()
        if self._channel.size == 1:
            yield
            return
        if not self._training.acquire(blocking=False):
            error = PartitionError(
                f"{name}() is called while another thread trains",
                expected="one thread at a time, in the same order on all ranks",
                found=f"the thread {thread.name!r}",
                remedy=REMEDY,
            )
            abort_job(f"rank {self._channel.rank} of {self._channel.size} ends the job: {error}")
        try:
            if thread is not threading.main_thread():
                problem = f"{name}() is called by other threads on other ranks"
                self._channel.communicator.agree(equal=Equal({"thread": thread.name}, problem, REMEDY))
            yield
        finally:
            self._training.release()
