"""Errors that name the problem, the location, the expected and found facts, and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class DataError(Exception):
    """Error in the data or in their use; every rank raises an equal one.

    Parameters
    ----------
    problem : one sentence.
    file, field : location of the problem, as the user named it.
    row : sample number within the file.
    byte : byte position within the file.
    expected, found : facts, of any type with a text form.
    remedy : imperative sentence: an action that solves the problem.

    Examples
    --------
    >>> print(DataError("the file is empty", file="x.npy", expected="an array", remedy="write it again"))
    the file is empty (file 'x.npy')
      expected: an array
      remedy: write it again
    """

    def __init__(
        self,
        problem: str,
        *,
        file: str | None = None,
        field: str | None = None,
        row: int | None = None,
        byte: int | None = None,
        expected: object = None,
        found: object = None,
        remedy: str | None = None,
    ) -> None:
        self.problem = problem
        self.file = file
        self.field = field
        self.row = row
        self.byte = byte
        self.expected = expected
        self.found = found
        self.remedy = remedy
        super().__init__(self._text())

    def _text(self) -> str:
        location = {"file": self.file, "field": self.field, "row": self.row, "byte": self.byte}
        where = ", ".join(f"{name} {value!r}" for name, value in location.items() if value is not None)
        lines = [f"{self.problem} ({where})" if where else self.problem]
        facts = {"expected": self.expected, "found": self.found, "remedy": self.remedy}
        lines += [f"  {name}: {fact}" for name, fact in facts.items() if fact is not None]
        return "\n".join(lines)

    def at(self, file: str, field: str | None) -> DataError:
        """Return the error with this location, unless it has one already."""
        kind, problem, facts = self.__reduce__()[1]
        facts["file"] = self.file or file
        facts["field"] = self.field or field
        return _rebuild(kind, problem, facts)

    def at_row(self, row: int) -> DataError:
        """Return the error with another row."""
        kind, problem, facts = self.__reduce__()[1]
        return _rebuild(kind, problem, {**facts, "row": row})

    def __reduce__(self) -> tuple[Any, ...]:
        # Ranks exchange facts as text: not every object can be pickled.
        facts = {
            "file": self.file,
            "field": self.field,
            "row": self.row,
            "byte": self.byte,
            "expected": None if self.expected is None else str(self.expected),
            "found": None if self.found is None else str(self.found),
            "remedy": self.remedy,
        }
        return _rebuild, (type(self), self.problem, facts)


class FormatError(DataError):
    """File of another format than it appears to be, or with features that cannot be read."""


class FieldNotFound(DataError, KeyError):
    """Name of a field that the data do not have."""

    __str__ = Exception.__str__  # KeyError would print the repr of the text


class DecodeError(DataError):
    """Stored bytes that do not decode: a wrong checksum, corrupt compressed data, a truncated file."""


class ChangedFile(DecodeError):
    """File that has changed since it was opened, is shorter or gone: an error with ``on_error="skip"``, too."""


class PartitionError(DataError, ValueError):
    """Request that cannot be met: samples, batches or memory cannot be divided among the ranks like this."""


class OutOfMemory(DataError, MemoryError):
    """Shortage of memory on a rank."""


class UnsupportedVersion(DataError, ImportError):
    """Installed package of an unsupported version."""


class NoMpiLibrary(ImportError):
    """This process is one of several ranks, and there is no MPI library."""

    def __init__(self, ranks: int, reason: str) -> None:
        super().__init__(
            f"{ranks} ranks need an MPI library, and mpi4py finds none ({reason}): run `pip install mpich`, "
            "or load the MPI module of the cluster"
        )


class RanksNotConnected(PartitionError):
    """This process is one of several that a launcher started, and its MPI library connects it to none of the others.

    Parameters
    ----------
    processes : number of processes that the launcher started, at least.
    variable : environment variable that tells so.
    library : name and version of the MPI library.
    """

    def __init__(self, processes: int, variable: str, library: str) -> None:
        super().__init__(
            f"a launcher started {processes} processes, and MPI connects none of them: each would be rank 0 of 1",
            expected=f"{processes} ranks ({variable} in the environment)",
            found=f"1 rank, with {library}",
            remedy="start them with the mpiexec that belongs to this MPI library; under Slurm with srun --mpi=pmi2 or "
            "--mpi=pmix (srun --mpi=list shows which there are); "
            "MATEX_ALLOW_SINGLETONS=1 allows processes that are meant to be independent",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        _, (_, *rest) = super().__reduce__()
        return _rebuild, (PartitionError, *rest)


def _rebuild(kind: type[DataError], problem: str, facts: dict[str, Any]) -> DataError:
    return kind(problem, **facts)


def near_matches(name: str, available: Iterable[str], limit: int = 5) -> str:
    """Return the names closest to ``name`` as text, then the number of the others."""
    names = sorted(set(available))
    close = difflib.get_close_matches(name, names, n=limit, cutoff=0.4)
    shown = close + [other for other in names if other not in close][: limit - len(close)]
    if not shown:
        return "nothing"
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(repr(other) for other in shown) + more
