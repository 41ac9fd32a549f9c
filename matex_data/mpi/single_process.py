"""Stand-in for ``mpi4py.MPI`` in a single process without an MPI library.

It has the names that this package uses with one rank. Every operation on one rank completes at once.
"""
# ruff: noqa: N802 (the names are those of mpi4py)

from __future__ import annotations

import os
from typing import Any, NoReturn

import numpy as np

THREAD_SERIALIZED, THREAD_MULTIPLE = 2, 3
IN_PLACE, BYTE, SUM, MAX, MIN = "IN_PLACE", "BYTE", "SUM", "MAX", "MIN"


class Exception(RuntimeError):  # the name that mpi4py has for it
    """Error of MPI, which is never raised."""


class Request:
    """Operation that has completed."""

    def Test(self) -> bool:
        return True

    def Wait(self) -> bool:
        return True


class Comm:
    """Communicator of one rank."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self._attributes: dict[int, Any] = {}

    @classmethod
    def Create_keyval(cls, **_: Any) -> int:
        global _keys
        _keys += 1
        return _keys

    def Get_attr(self, key: int) -> Any:
        return self._attributes.get(key)

    def Set_attr(self, key: int, value: Any) -> None:
        self._attributes[key] = value

    def Dup(self) -> Comm:
        return Comm()

    def Free(self) -> None:
        self._attributes.clear()

    def Barrier(self) -> None:
        pass

    barrier = Barrier

    def Ibarrier(self) -> Request:
        return Request()

    def allgather(self, value: Any) -> list[Any]:
        return [value]

    def bcast(self, value: Any, root: int = 0) -> Any:
        return value

    def Allreduce(self, send: Any, receive: Any, op: Any = SUM) -> None:
        if send is not IN_PLACE:
            np.copyto(receive, send)

    def Iallreduce(self, send: Any, receive: Any, op: Any = SUM) -> Request:
        self.Allreduce(send, receive)
        return Request()

    def Ibcast(self, buffer: Any, root: int = 0) -> Request:
        return Request()

    def Iallgather(self, send: Any, receive: Any) -> Request:
        np.copyto(receive, send)
        return Request()

    def Iallgatherv(self, send: Any, receive: Any) -> Request:
        np.copyto(receive[0], send)
        return Request()

    def Abort(self, code: int = 1) -> NoReturn:
        os._exit(code)


Intracomm = Comm
COMM_WORLD = COMM_SELF = Comm()
_keys = 0


def Query_thread() -> int:
    return THREAD_MULTIPLE


def Is_initialized() -> bool:
    return True


def Is_finalized() -> bool:
    return False


def Finalize() -> None:
    pass
