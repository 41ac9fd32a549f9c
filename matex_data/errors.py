"""Errors that name the problem, the location, the expected and found facts, and the remedy."""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import re
import shlex
import traceback
from collections.abc import Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeVar

from matex_data.locks import setting
from matex_data.paths import is_library

Kind = TypeVar("Kind", bound="DataError")

RESTORE = "the file is damaged: restore it from its source"  # remedy of damaged files in all formats
FULL_TRACEBACK = "MATEX_TRACEBACK"
"""Environment variable; "full": the whole traceback of a ``DataError``."""


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
        """Add this location, unless there is one already; return the error itself, which travels as one object.

        Examples
        --------
        >>> print(DataError("the file is empty").at("x.npy", None))
        the file is empty (file 'x.npy')
        """
        return self._with(file=self.file or file, field=self.field or field)

    def at_row(self, row: int) -> DataError:
        """Replace the row; return the error itself.

        Examples
        --------
        >>> DataError("a chunk does not decode", file="x.h5", row=0).at_row(1024).row
        1024
        """
        return self._with(row=row)

    def within(self, content: str) -> DataError:
        """Say that the byte, if there is one, is counted in other content than the file's; return the error itself.

        Examples
        --------
        >>> DataError("a header is damaged", file="x.tar.gz", byte=512).within("the decompressed archive").problem
        'a header is damaged, byte counted in the decompressed archive'
        """
        return self if self.byte is None else self._with(problem=f"{self.problem}, byte counted in {content}")

    def add_remedy(self, remedy: str) -> DataError:
        """Add another remedy behind those that there are; return the error itself.

        Examples
        --------
        >>> DataError("there is no such field", remedy="see matex inspect").add_remedy("open the file").remedy
        'see matex inspect; open the file'
        """
        return self._with(remedy="; ".join(filter(None, (self.remedy, remedy))))

    def _with(self: Kind, **facts: Any) -> Kind:
        self.__dict__.update(facts)
        self.args = (self._text(),)
        return self

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows."""
        return traceback_text(self).splitlines()

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


def traceback_text(error: BaseException) -> str:
    """Return a traceback; of a ``DataError`` the lines of the user's programs, and the last one of this package.

    Lines of libraries, from which an error in the data cannot be understood, are counted. ``MATEX_TRACEBACK=full``
    shows them.
    """
    if not isinstance(error, DataError) or os.environ.get(FULL_TRACEBACK) == "full":
        return "".join(traceback.format_exception(error))
    frames = traceback.extract_tb(error.__traceback__)
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [number for number, module in enumerate(modules) if f"{module}.".startswith("matex_data.")]
    shown = [number for number, frame in enumerate(frames) if not is_library(frame.filename)]
    shown = [number for number in shown if number not in own[:-1]]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list([frames[number] for number in shown])]
    if len(shown) < len(frames):
        hidden = len(frames) - len(shown)
        lines.append(f"  ({hidden} more of matex_data and other libraries: {FULL_TRACEBACK}=full shows them)\n")
    return "".join([*lines, *traceback.format_exception_only(error)])


class FormatError(DataError):
    """File of another format than it appears to be, or with features that cannot be read.

    Examples
    --------
    >>> with open("text.h5", "w") as file:
    ...     length = file.write("no HDF5")
    >>> try:
    ...     md.open_dataset("text.h5")
    ... except md.FormatError as error:
    ...     print(error.problem, error.file)
    the file cannot be opened as HDF5 text.h5
    """


class NoSamples(FormatError):
    """File without samples. Among others it is left out, with a warning: parallel jobs leave such files."""


class FieldNotFound(DataError, KeyError):
    """Name of a field that the data do not have.

    Examples
    --------
    >>> try:
    ...     md.open_dataset("events.h5", inputs="imgae")
    ... except md.FieldNotFound as error:
    ...     print(f"{error.field}: {error.expected}")
    imgae: one of 'image', 'label', 'energy'
    """

    __str__ = Exception.__str__  # KeyError would print the repr of the text


class DecodeError(DataError):
    """Stored bytes that do not decode: a wrong checksum, corrupt compressed data, a truncated file.

    Examples
    --------
    >>> error = DecodeError("a chunk does not decode", file="x.h5", field="image", row=1024, byte=14611)
    >>> print(error)
    a chunk does not decode (file 'x.h5', field 'image', row 1024, byte 14611)
    """


class ChangedFile(DecodeError):
    """File that has changed since it was opened, is shorter or gone: an error with ``on_error="skip"``, too."""


class FunctionError(DataError):
    """Function of ``Dataset.map`` that fails, or returns something else than is declared."""

    def of_rows(self, first: int, last: int, file: str | None = None) -> FunctionError:
        """Add the rows that the function got, from one of its file to one of the last file; return the error itself."""
        end = f"{last}" if file is None else f"{last} of {file!r}"
        return self._with(problem=f"{self.problem}, given samples of rows {first} to {end}")


class PartitionError(DataError, ValueError):
    """Request that cannot be met: samples, batches or memory cannot be divided among the ranks like this.

    Examples
    --------
    >>> try:
    ...     md.open_dataset("events.h5").batches(1000)
    ... except md.PartitionError as error:
    ...     print(error.problem)
    there are fewer samples than a batch has, of which an epoch would drop all
    """


class ArgumentError(PartitionError, TypeError, ValueError):
    """Argument of another kind than the function takes, such as a text for a number."""


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
        torch, connected = "", ""
        if variable == "WORLD_SIZE":
            torch, connected = "not torchrun, ", ", or share matex_data.torch.IterableDataset by torch.distributed"
        super().__init__(
            f"a launcher started {processes} processes, and MPI connects none of them: each would be rank 0 of 1",
            expected=f"{processes} ranks ({variable} in the environment)",
            found=f"1 rank, with {library}",
            remedy=f"start them with {torch}the mpiexec that belongs to this MPI library; under Slurm with "
            "srun --mpi=pmi2 or --mpi=pmix (srun --mpi=list shows which there are); "
            f"MATEX_ALLOW_SINGLETONS=1 allows processes that are meant to be independent{connected}",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        _, (_, *rest) = super().__reduce__()
        return _rebuild, (PartitionError, *rest)


def _rebuild(kind: type[DataError], problem: str, facts: dict[str, Any]) -> DataError:
    return kind(problem, **facts)


def truncated(file: str, size: int, end: int, field: str | None = None) -> FormatError:
    """Return the error of a file of ``size`` bytes whose data end at byte ``end``."""
    return FormatError(
        "the file is truncated",
        file=file,
        field=field,
        byte=size,
        expected=f"{end} bytes",
        found=f"{size} bytes",
        remedy="copy it again from its source",
    )


_HINTS = ContextVar("hints", default=True)


def without_hints() -> AbstractContextManager[None]:
    """Return a context manager: errors tell whether a name exists, and need not look for names that are similar.

    Examples
    --------
    >>> with without_hints():
    ...     wants_hints()
    False
    """
    return setting(_HINTS, False)


def wants_hints() -> bool:
    """Return whether an error needs names that are similar to a wrong one, though it takes time to find them."""
    return _HINTS.get()


def near_matches(name: str, available: Iterable[str], limit: int = 5) -> str:
    """Return the names closest to ``name`` as text, then the number of the others.

    Examples
    --------
    >>> near_matches("imgae", ["energy", "image", "label"], limit=1)
    "'image' and 2 more"
    """
    names = sorted(set(available))
    close = difflib.get_close_matches(name, names, n=limit, cutoff=0.4)
    shown = close + [other for other in names if other not in close][: limit - len(close)]
    if not shown:
        return "nothing"
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(repr(other) for other in shown) + more


def shortened(texts: Iterable[str], most: int) -> list[str]:
    """Return the first ``most`` texts of a message, and how many others there are.

    Examples
    --------
    >>> ", ".join(shortened(["a", "b", "c"], 2)), ", ".join(shortened(["a", "b"], 2))
    ('a, b, and 1 more', 'a, b')
    """
    every = list(texts)
    return every[:most] + ([f"and {len(every) - most} more"] if len(every) > most else [])


def install_command(extra: str) -> str:
    """Return the command that installs what an extra of a package requires, by the names of the packages.

    matex_data is installed from a folder, whose name a message does not know, and pip finds the packages anyhow.

    Parameters
    ----------
    extra : requirement for pip, such as "matex_data[csv]", or any other.

    Examples
    --------
    >>> install_command("matex_data[remote]")
    "python -m pip install 'obstore>=0.8'  (the extra matex_data[remote])"
    >>> install_command("tifffile")
    'python -m pip install tifffile'
    """
    packages = _packages(extra)
    shown = f"  (the extra {extra})" if packages and packages != [extra] else ""
    return f"python -m pip install {' '.join(map(shlex.quote, packages or [extra]))}{shown}"


def _packages(requirement: str) -> list[str]:
    """Return the requirements of the extras of a package of which this one is installed; else the requirement."""
    name, _, extras = requirement.partition("[")
    try:
        lines = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return [requirement]
    found: list[str] = []
    for extra in re.findall(r"[\w-]+", extras):
        for line in lines:
            wanted, _, condition = line.partition(";")
            if re.search(rf"extra == ['\"]{extra}['\"]", condition):
                own = wanted.strip().lower().replace("-", "_").startswith(f"{name}[")
                found += _packages(wanted.strip()) if own else [wanted.strip()]
    return list(dict.fromkeys(found)) or [requirement]
