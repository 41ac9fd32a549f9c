"""Questions of the other ranks to rank 0: they run the same program, and a thread of rank 0 says how far it is.

Rank 0 never waits for them. Once the script asks for its rank, the ranks are no longer alike, and each goes its own
way.
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from matex_data.errors import PartitionError
from matex_data.mpi import abort, activity, deadlines
from matex_data.mpi.communicator import pickle_error
from matex_data.mpi.library import MPI
from matex_data.mpi.processes import is_child_process
from matex_data.paths import is_of_user, is_standard_library
from matex_data.training.comm import world
from matex_data.training.comm.channel import Channel

log = logging.getLogger("matex_data.training")

LONGEST_PAUSE = 1.0
"""Seconds between two queries of rank 0, at most: 10,000 ranks may wait for it."""
CERTAIN = 0.5
"""Seconds for which rank 0 waits for others until it is certain that it does not come first."""
RANK_VARIABLES = {"PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"}
RANK_VARIABLES |= {"SLURM_PROCID", "SLURM_LOCALID", "PALS_RANKID", "MV2_COMM_WORLD_RANK", "FLUX_TASK_RANK"}
_PATCHES = {f"matex_data.training.launcher.{name}" for name in ("root", "journal", "overlay", "inputs")}
_PATCHES |= {f"matex_data.training.launcher.{name}openers" for name in ("", "native_", "tf_")}
_PATCHES |= {"matex_data.training.comm.world", "matex_data.training.replacements"}


class Root:
    """Queries to rank 0.

    Attributes
    ----------
    available : ranks can ask; not if MPI allows no thread that answers.
    asked : line at which the script has asked for its rank; empty before.
    """

    def __init__(self, channel: Channel) -> None:
        self.rank, self.size = channel.rank, channel.size
        self.job: str = channel.communicator.broadcast(secrets.token_hex(4))
        self.asked = ""
        self.before_asking: list[Callable[[], None]] = []
        self._liveness = channel.host.liveness
        self._replies: dict[str, Callable[[Any], Any]] = {}
        self._values: dict[str, list[Any]] = {}  # of rank 0, by kind
        self._received: dict[str, list[Any]] = {}
        self._passed: Counter[str] = Counter()
        self.available = self._liveness is not None
        self.serve("values", lambda question: self._values.get(question[0], [])[question[1] :])
        if self._liveness is not None:
            self._liveness.on_query = self._answer
            self._watch_for_ranks()

    def serve(self, about: str, reply: Callable[[Any], Any]) -> None:
        """Let a function answer questions; it runs in another thread of rank 0."""
        self._replies[about] = reply

    def _answer(self, query: bytes) -> bytes:
        about, question = pickle.loads(query)
        waits = activity.waits_for_ranks()  # looked at before the answer, to which the program may add
        return pickle.dumps((waits, self._replies[about](question)))

    def ask(self, about: str, question: Any, take: Callable[[Any], bool], purpose: str) -> bool:
        """Ask rank 0 until it has come as far as this rank; return whether it has.

        Parameters
        ----------
        take : gets each answer, and returns whether it is the final one.
        purpose : what this rank is to do, for errors.

        Returns
        -------
        known : False: rank 0 waits for other ranks, or has ended, so that it does not do the same.

        Raises
        ------
        PartitionError : rank 0 does not come so far in time.
        """
        assert self._liveness is not None
        query = pickle.dumps((about, question))
        failed = abort.exit_requested()  # rank 0 may run on, and never come here
        end, pause = time.monotonic() + (abort.GRACE if failed else deadlines.timeout()), 0.02
        since: float | None = None
        while not self._liveness.ended:  # without activity.waiting(): this rank waits for no collective call
            replies = self._liveness.query([0], query)
            if replies:
                waits, answer = pickle.loads(replies[0])
                if take(answer):
                    return True
                since = (since or time.monotonic()) if waits else None
                if since is not None and time.monotonic() - since > CERTAIN:
                    return False
            if time.monotonic() >= end:
                if failed:
                    return False
                end += self._extension(purpose)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return False

    def _extension(self, purpose: str) -> float:
        """Return the seconds to wait on for rank 0; raise ``PartitionError`` unless it is busy on behalf of all."""
        assert self._liveness is not None
        state, text = self._liveness.states([0])[0]
        if state == activity.RankState.BUSY:
            return deadlines.timeout()
        raise PartitionError(
            f"this rank is to {purpose}, and has waited {deadlines.timeout():g} s for rank 0",
            expected="rank 0 makes the same call and closes the file, waits for the other ranks, or ends",
            found=f"this rank is at {activity.user_location()}; rank 0 {state.name.lower()} {text}",
            remedy="let all ranks do the same; if rank 0 may take longer, set MATEX_TIMEOUT to more seconds",
        )

    def value(self, kind: str, make: Callable[[], Any]) -> Any:
        """Return what rank 0 has got at the same call: the values of a kind are counted, at each line that calls.

        Parameters
        ----------
        kind : of the call, such as that of a clock.
        make : returns this rank's own value, of rank 0 and where rank 0 does not come to this call.
        """
        if not self.is_shared() or threading.current_thread() is not threading.main_thread():
            return make()
        code, line = (frame := _caller()).f_code, frame.f_lineno
        kind = f"{kind} at {code.co_filename}:{line}"
        if self.rank == 0:
            value = make()
            self._values.setdefault(kind, []).append(value)
            return value
        number, received = self._passed[kind], self._received.setdefault(kind, [])
        self._passed[kind] += 1
        if number >= len(received):

            def take(answer: list[Any]) -> bool:
                received.extend(answer)
                return len(received) > number

            if not self.ask("values", (kind, len(received)), take, f"take rank 0's result of {kind}"):
                received.append(make())
        return received[number]

    def outcome(self, kind: str, make: Callable[[], Any]) -> Any:
        """Return the result of rank 0's call, or raise its error; like ``value``."""

        def attempt() -> tuple[Any, bytes | None]:
            try:
                return make(), None
            except Exception as error:
                return None, pickle_error(error)

        result, error = self.value(kind, attempt)
        if error is not None:
            raise pickle.loads(error)
        return result

    def is_shared(self) -> bool:
        """Return whether what this thread does is what the threads of all ranks do."""
        return self.available and not (self.asked or world.alone.get() or is_child_process())

    def _watch_for_ranks(self) -> None:
        """Note when the script asks for its rank: by this package, mpi4py, or a variable of the launcher."""
        root, environment_type = self, type(os.environ)
        get, list_names = environment_type.__getitem__, environment_type.__iter__
        unread: Iterator[str] = iter(())

        class WorldComm(MPI.Intracomm):
            """``MPI.COMM_WORLD`` of the script."""

            def Get_rank(self) -> int:  # noqa: N802  # as in mpi4py
                root._note()
                return super().Get_rank()

            rank = property(Get_rank)

        @functools.wraps(get)
        def get_variable(environment: Any, name: Any) -> Any:
            nonlocal unread
            if next(unread, None) != name:
                unread = iter(())
                if name in RANK_VARIABLES:
                    root._note()
            return get(environment, name)

        @functools.wraps(list_names)
        def list_variables(environment: Any) -> Iterator[str]:
            nonlocal unread
            names = list(list_names(environment))
            unread = iter(names)  # whoever copies the environment then reads all values in this order: no question
            return iter(names)

        setattr(MPI, "COMM_WORLD", WorldComm(MPI.COMM_WORLD))  # noqa: B010  # final for mypy
        environment_type.__getitem__ = get_variable  # type: ignore[method-assign]
        environment_type.__iter__ = list_variables  # type: ignore[method-assign]
        world.on_question = self._note

    def _note(self) -> None:
        if self.asked or not is_called_by_script() or is_child_process():
            return
        for prepare in self.before_asking:
            prepare()
        self.asked = activity.user_location()
        if self.rank == 0:
            log.warning("this script asks for its rank, at %s: from now on each rank writes its own files", self.asked)


_said: set[str] = set()


def say_once(rank: int, text: str, *values: object) -> None:
    """Log a warning with these values on rank 0, unless the text has been logged before."""
    if rank == 0 and text not in _said:
        _said.add(text)
        log.warning(text, *values)


def _caller() -> FrameType:
    """Return the innermost frame outside of the patches and the standard library."""
    frame: FrameType = sys._getframe(1)
    while frame.f_back and (_is_own(frame) or is_standard_library(frame.f_code.co_filename)):
        frame = frame.f_back
    return frame


def _is_own(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") in _PATCHES


def is_called_by_package() -> bool:
    """Return whether this package has called a patched function, also by way of the standard library."""
    return str(_caller().f_globals.get("__name__")).split(".")[0] == "matex_data"


def is_called_by_script() -> bool:
    """Return whether the script has called a patched function, also by way of the standard library."""
    return is_of_user(_caller())
