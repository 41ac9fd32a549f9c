"""Probe files in a child process, since the HDF5 library crashes or hangs on some damaged files.

The child (``python -m matex_data.cli.probing``) does not use MPI. It opens each file as ``open_dataset`` does, reads
the rows that only the library can read, and writes a line after each step. The parent waits for these lines.
"""

from __future__ import annotations

import ast
import base64
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import IO, Any

from matex_data.errors import DataError, FormatError
from matex_data.index.library import LibraryRows
from matex_data.index.whole import SAMPLE
from matex_data.machine import free_memory, without_rank
from matex_data.readers import FORMATS, HEAD_BYTES, detect, read_head, reader
from matex_data.storage.trust import Trust

SECONDS = 60.0  # limit of a step of the library: to open a file, or to read one block of rows
START_SECONDS = 300.0  # limit of the start of the child
CHILD = (sys.executable, "-m", "matex_data.cli.probing")

_MAKE_FIELDS = ("derive", "file_fields", "absent")  # options by which --field may name what the files lack

ProbeStep = Callable[[], None]


def is_hdf5(path: str) -> bool:
    """Return whether a file is in HDF5."""
    try:
        with Path(path).open("rb") as file:
            return FORMATS["hdf5"].matches_magic(file.read(HEAD_BYTES))
    except OSError:
        return False


def probe(
    paths: Sequence[str],
    format: str | None = None,
    names: Sequence[str] | None = None,
    seconds: float = SECONDS,
    command: Sequence[str] = CHILD,
    options: Mapping[str, Any] | None = None,
) -> list[DataError]:
    """Return the errors of files that cannot be opened, or on which the library crashes or hangs.

    Parameters
    ----------
    format : name of the format; None: detected.
    names : fields to read; None: all.
    seconds : limit of one step of the library.
    command : command that starts the child.
    options : arguments of ``open_dataset``, of which the child takes those of the reader.
    """
    options = options or {}
    names = None if any(options.get(name) is not None for name in _MAKE_FIELDS) else names
    asked = [format, names, _of_reader(options), seconds]
    errors: list[DataError] = []
    remaining = list(paths)
    while remaining:
        done, more = _run(remaining, asked, seconds, command)
        errors += more
        remaining = remaining[done:]
    return errors


def _of_reader(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the reader among arguments of ``open_dataset``."""
    from matex_data.opening.open import open_dataset  # not in the child, which does not use MPI
    from matex_data.transforms.categories import without_categories

    own = signature(open_dataset).parameters.keys() - {SAMPLE}
    return without_categories({name: value for name, value in options.items() if name not in own})[1]


def _run(paths: Sequence[str], asked: list[Any], seconds: float, command: Sequence[str]) -> tuple[int, list[DataError]]:
    """Probe files in one child until it ends; return the number of files done, at least one, and their errors."""
    done, errors = 0, []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=without_rank()
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            with suppress(BrokenPipeError), child.stdin as pipe:
                pipe.write(repr([list(paths), *asked, free_memory()]).encode())
            for line in _lines(child.stdout, seconds):
                kind, _, text = line.partition(" ")
                if kind == "error":
                    errors.append(pickle.loads(base64.b64decode(text)))
                done += kind in ("error", "sound")
            code = child.wait(START_SECONDS)
        except (TimeoutError, subprocess.TimeoutExpired):
            return done + 1, [*errors, _no_answer(paths[done], seconds)]
        finally:
            child.kill()
    if done < len(paths):
        errors.append(_ended(paths[done], code, seconds))
        done += 1
    return done, errors


def _lines(pipe: IO[bytes], seconds: float) -> Iterator[str]:
    """Yield the lines of a pipe until its end; raise ``TimeoutError`` if no line arrived for ``seconds``, or for
    ``START_SECONDS`` before the first one.
    """
    data, limit = b"", START_SECONDS
    while True:
        if not select.select([pipe], [], [], limit)[0]:
            raise TimeoutError
        limit = seconds
        more = os.read(pipe.fileno(), 1 << 16)
        if not more:
            return
        *lines, data = (data + more).split(b"\n")
        yield from (line.decode() for line in lines)


def _no_answer(path: str, seconds: float) -> FormatError:
    found = f"no answer for {seconds:g} seconds"
    return FormatError("the HDF5 library hangs on the file", file=path, found=found, remedy=_REMEDY)


def _ended(path: str, code: int, seconds: float) -> FormatError:
    if code == -signal.SIGXCPU:
        return _no_answer(path, seconds)
    if code >= 0:
        return FormatError("the file cannot be probed", file=path, found=f"a process that ended with code {code}")
    name = signal.Signals(-code).name
    problem = f"the HDF5 library crashes on the file (signal {-code}, {name})"
    if code == -signal.SIGKILL:
        problem = "the system has killed the process that opened the file; it may have used too much memory"
    return FormatError(problem, file=path, remedy=_REMEDY)


_REMEDY = "the file is damaged: restore it from its source, or exclude it"


def main() -> None:
    """Probe the files that standard input names; write one line per step to standard output."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries may print to stdout
    warnings.simplefilter("ignore")  # the parent shows them when it opens the files
    paths, format, names, options, seconds, memory = ast.literal_eval(sys.stdin.read())
    _limit_memory(memory)

    def step() -> None:
        _limit_seconds(seconds)
        out.write("step\n")

    for path in paths:
        step()
        try:
            _probe_file(path, format, names, options, step)
        except Exception as error:
            unexpected = FormatError("the file cannot be read", file=path, found=f"{type(error).__name__}: {error}")
            told = error if isinstance(error, DataError) else unexpected
            out.write(f"error {base64.b64encode(pickle.dumps(told)).decode()}\n")
        else:
            out.write("sound\n")


def _probe_file(
    path: str, format: str | None, names: Sequence[str] | None, options: Mapping[str, Any], step: ProbeStep
) -> None:
    """Open one file, and read the rows that only the library can read; raise ``DataError`` if it cannot be read."""
    index = reader(format or detect(path, read_head(path)))(path, names, Trust.of_site(), **options)
    for file_index in index.files:
        for layout in file_index.layouts.values():
            if isinstance(layout, LibraryRows):
                for start in range(0, layout.rows, layout.block_rows):
                    step()
                    layout.read(start, min(start + layout.block_rows, layout.rows))


def _limit_memory(free: int) -> None:
    """Limit the memory that this process may still allocate, so that a damaged size raises MemoryError."""
    if free < sys.maxsize:
        with suppress(OSError, ValueError):
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + free, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _limit_seconds(seconds: float) -> None:
    """Limit the processor time of the next step, in case that the parent has died."""
    with suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds) + 2, hard))


if __name__ == "__main__":
    main()
