"""Errors that say what was expected, what was found, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class DataError(Exception):
    """Something is wrong with the data; the same error is raised on every rank.

    Parameters
    ----------
    problem : what is wrong, in one sentence.
    file, field : where, as the user named them.
    row : sample number within the file.
    byte : byte position within the file.
    expected, found : what should be there, and what is.
    remedy : what the user can do about it.
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
        places = {"file": self.file, "field": self.field, "row": self.row, "byte": self.byte}
        where = ", ".join(f"{name} {value!r}" for name, value in places.items() if value is not None)
        lines = [f"{self.problem} ({where})" if where else self.problem]
        facts = {"expected": self.expected, "found": self.found, "remedy": self.remedy}
        lines += [f"  {name}: {fact}" for name, fact in facts.items() if fact is not None]
        return "\n".join(lines)

    def at(self, file: str, field: str | None) -> DataError:
        """The same error with its place, where that was not known when it was raised."""
        kind, problem, facts = self.__reduce__()[1]
        facts["file"] = self.file or file
        facts["field"] = self.field or field
        return _rebuild(kind, problem, facts)

    def __reduce__(self) -> tuple[Any, ...]:
        # Facts travel between ranks as text: any object can be a fact, not any object can be pickled.
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
    """The file is not what it says it is, or uses something that cannot be read."""


class FieldNotFound(DataError, KeyError):
    """The data has no field of that name."""

    __str__ = Exception.__str__  # KeyError would print the repr of the text


class DecodeError(DataError):
    """Stored bytes do not decode: a checksum is wrong, a compressed stream is broken, a file is short."""


class PartitionError(DataError, ValueError):
    """The samples cannot be shared out among the ranks as asked."""


class OutOfMemory(DataError, MemoryError):
    """A rank has not got the memory that it needs."""


class UnsupportedVersion(DataError, ImportError):
    """A package that is installed lacks what this one needs of it."""


class NoMpiLibrary(ImportError):
    """This process is one of several ranks, and there is no MPI library."""

    def __init__(self, ranks: int, reason: str) -> None:
        super().__init__(
            f"{ranks} ranks need an MPI library, and mpi4py finds none ({reason}): run `pip install mpich`, "
            "or load the MPI module of the cluster"
        )


def _rebuild(kind: type[DataError], problem: str, facts: dict[str, Any]) -> DataError:
    return kind(problem, **facts)


def near_matches(name: str, available: Iterable[str], limit: int = 5) -> str:
    """What the user may have meant: the closest names first, then how many there are in all."""
    names = sorted(set(available))
    close = difflib.get_close_matches(name, names, n=limit, cutoff=0.4)
    shown = close + [other for other in names if other not in close][: limit - len(close)]
    if not shown:
        return "nothing"
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(repr(other) for other in shown) + more
