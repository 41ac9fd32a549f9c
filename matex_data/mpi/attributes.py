"""Objects that live as long as a communicator of the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from matex_data.mpi.library import MPI


class Closable(Protocol):
    """Object with communicators of its own."""

    def close(self) -> None:
        """Free the communicators. *Collective*."""


T = TypeVar("T", bound=Closable)


def attached(comm: MPI.Intracomm, make: Callable[[MPI.Intracomm], T]) -> T:
    """Return the object that ``make`` makes for a communicator. *Collective* if ``make`` is, at the first call.

    Freeing the communicator closes its objects, the last one first.
    """
    if not _KEYS:
        _KEYS.append(MPI.Comm.Create_keyval(delete_fn=_close))
    objects: Any = comm.Get_attr(_KEYS[0])
    if objects is None:
        objects = {}
        comm.Set_attr(_KEYS[0], objects)
    if make not in objects:
        objects[make] = make(comm)  # which may attach other objects before
    found: T = objects[make]
    return found


def _close(comm: MPI.Comm, _: int, objects: dict[Any, Closable]) -> None:
    if comm != MPI.COMM_WORLD:  # MPI ends with it
        for owned in reversed(objects.values()):
            owned.close()


_KEYS: list[int] = []
