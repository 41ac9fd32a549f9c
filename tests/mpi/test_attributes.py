"""Objects that belong to a communicator: made once, closed with it, the last one first."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from matex_data.mpi.attributes import attached


class _Owned:
    def __init__(self, name: str, closed: list[str]) -> None:
        self.name, self._closed = name, closed

    def close(self) -> None:
        self._closed.append(self.name)


def test_objects_are_closed_with_their_communicator_and_before_those_that_they_use() -> None:
    closed: list[str] = []

    def inner(_: Any) -> _Owned:
        return _Owned("inner", closed)

    def outer(comm: Any) -> _Owned:
        attached(comm, inner)
        return _Owned("outer", closed)

    first, second = MPI.COMM_SELF.Dup(), MPI.COMM_SELF.Dup()
    assert attached(first, outer) is attached(first, outer)
    assert attached(first, inner) is not attached(second, inner)
    first.Free()
    assert closed == ["outer", "inner"]
    second.Free()
    assert closed == ["outer", "inner", "inner"]
