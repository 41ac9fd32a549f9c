"""One damaged file through this package: what is read of it, and how that compares with another library."""

from __future__ import annotations

import itertools
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from matex_data import DataError, open_dataset
from tests.support.serial import same

WHOLE = 32 << 20  # bytes of a data set that is read as a whole; of a larger one the first samples are
FIRST = 3  # samples that are read of such a one
BATCH = 7

EQUAL = "equal"
REFUSED = "only we refuse"
BOTH_REFUSE = "both refuse"
LIBRARY_REFUSES = "only the library refuses"
UNCOMPARED = "not compared"
DIFFERS = "documented difference"
WRONG = "wrong values"
RAW = "raw error"
MEMORY = "out of memory"
CRASH = "crash"
TIMEOUT = "timeout"
LIBRARYS_OWN = "the library's own"
FLEETING = "not seen again"

FINDINGS = (WRONG, RAW, MEMORY, CRASH, TIMEOUT)
OUTCOMES = (EQUAL, BOTH_REFUSE, REFUSED, LIBRARY_REFUSES, UNCOMPARED, DIFFERS, LIBRARYS_OWN, FLEETING, *FINDINGS)
_RANK = {name: rank for rank, name in enumerate((BOTH_REFUSE, REFUSED, UNCOMPARED, EQUAL, DIFFERS, LIBRARY_REFUSES))}

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Verdict:
    """Outcome of a file, or of one of its fields; ``text`` is for the report."""

    outcome: str
    text: str = ""

    @property
    def severity(self) -> int:
        """Return the rank of the outcome: that of a file is the gravest of its fields."""
        return 100 + FINDINGS.index(self.outcome) if self.outcome in FINDINGS else _RANK[self.outcome]


@dataclass(frozen=True)
class Refused:
    """A library does not read it, and why."""

    error: BaseException | str


@dataclass(frozen=True)
class Read:
    """Arrays that this package has read, by field, and those without samples; ``whole``, or the first samples."""

    fields: Arrays
    static: Mapping[str, NDArray[Any]]
    attributes: Mapping[str, Mapping[str, Any]]
    samples: int
    whole: bool


class Mismatch(Exception):
    """Two ways to the same samples of this package give different values."""


def ours(path: Path, names: Sequence[str] | None = None, **options: Any) -> Read:
    """Open a file on this process alone and read it, by ``load`` and by ``batches``.

    Raises
    ------
    DataError : the file is refused. Mismatch: the two ways differ. Anything else is a finding.
    """
    inputs = None if names is None else list(names)
    data = open_dataset(path, inputs=inputs, comm=MPI.COMM_SELF, io="independent", **options)
    attributes = {name: field.attributes for name, field in data.schema.items()}
    row = max(1, sum(field.row_bytes for field in data.schema.values()))
    if row > WHOLE:
        return Read({}, data.static, attributes, len(data), False)
    whole = row * len(data) <= WHOLE
    if not whole:
        first = {name: array[:FIRST].copy() for name, array in next(iter(data.batches(FIRST))).items()}
        return Read(first, data.static, attributes, len(data), False)
    loaded = data.load()
    pieces: dict[str, list[NDArray[Any]]] = {name: [] for name in data.schema}
    size = BATCH if len(data) < 200 * BATCH else len(data) // 50
    for batch in data.batches(size, remainder="keep"):
        for name, array in batch.items():
            pieces[name].append(array.copy())
    for name, array in loaded.items():
        joined = np.concatenate(pieces[name]) if pieces[name] else array[:0]
        if len(array) != len(data) or not (same(joined, array) or _references(array)):
            raise Mismatch(f"{name!r}: batches() and load() give different values of {len(data)} samples")
    return Read(loaded, data.static, attributes, len(data), True)


def _references(array: NDArray[Any]) -> bool:
    """Return whether an array holds objects of HDF5 references: two of the same target are not equal."""
    if array.dtype.names is not None:
        return any(_references(array[name]) for name in array.dtype.names)
    return array.dtype == object and any(
        isinstance(x, h5py.Reference | h5py.RegionReference | np.ndarray) for x in array.reshape(-1)[:100]
    )


def attempt(read: Callable[[], Read]) -> Read | DataError | Verdict:
    """Return the arrays that were read, or the refusal, or a finding."""
    try:
        return read()
    except DataError as error:
        return error
    except Mismatch as error:
        return Verdict(WRONG, str(error))
    except MemoryError:
        return Verdict(MEMORY, traceback.format_exc())
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return Verdict(RAW, traceback.format_exc())


def theirs(read: Callable[[], Any], failures: tuple[type[BaseException], ...] = (Exception,)) -> Any:
    """Return the values that another library reads, or ``Refused``."""
    if _apart:
        return _in_a_child(read, failures)
    try:
        return read()
    except failures as error:
        return Refused(error)


_apart = False


@contextmanager
def libraries_apart() -> Iterator[None]:
    """Let the other library read in children, so that memory that it corrupts is not ours."""
    global _apart
    _apart = True
    try:
        yield
    finally:
        _apart = False


def _in_a_child(read: Callable[[], Any], failures: tuple[type[BaseException], ...]) -> Any:
    mine, its = get_context("fork").Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            try:
                its.send(read())
            except failures as error:
                its.send(Refused(repr(error)))
        os._exit(0)
    its.close()
    try:
        return mine.recv()
    except EOFError:
        return Refused("the process of the library has died")
    finally:
        mine.close()
        os.waitpid(child, 0)


def compare(name: str, found: NDArray[Any], expected: Any, whole: bool, equal: Callable[[Any, Any], bool]) -> Verdict:
    """Compare one field of both."""
    if isinstance(expected, Refused):
        return Verdict(LIBRARY_REFUSES, f"{name!r}: {type(expected.error).__name__}: {expected.error}")
    if expected is None:
        return Verdict(UNCOMPARED, name)
    wanted = expected if whole else expected[: len(found)]
    if equal(found, wanted):
        return Verdict(EQUAL)
    return Verdict(WRONG, f"{name!r}: {_short(found)} where the library reads {_short(wanted)}{_first(found, wanted)}")


def refusal(error: DataError, expected: Any) -> Verdict:
    """Judge a file that this package refuses and the library reads as ``expected``."""
    kind = BOTH_REFUSE if isinstance(expected, Refused) else REFUSED
    return Verdict(kind, str(error).splitlines()[0])


def gravest(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict of a file by those of its fields; without any, both libraries refuse the file."""
    return max(verdicts, key=lambda verdict: verdict.severity, default=Verdict(BOTH_REFUSE))


def _short(array: Any) -> str:
    shown = np.asarray(array)
    return f"{shown.dtype}{list(shown.shape)}"


def _first(found: Any, expected: Any) -> str:
    """Describe the first element that differs."""
    if not isinstance(found, np.ndarray) or np.shape(found) != np.shape(expected) or found.dtype.names:
        return ""
    pairs = zip(found.reshape(-1), np.asarray(expected).reshape(-1), strict=True)
    for place, (a, b) in enumerate(itertools.islice(pairs, 1_000_000)):
        if not same(a, b):
            return f"; element {place}: {a!r:.60} and {b!r:.60}"
    return ""
