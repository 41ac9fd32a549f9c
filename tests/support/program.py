"""Run a program in a forked process, and end the process as Python does, but for freeing its memory."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import sys
import threading
from pathlib import Path
from typing import Any

from tests.support import contexts


def run(path: str, names: dict[str, Any]) -> None:
    """Run a program with these global names, and end the process with its exit code.

    To free every object of TensorFlow, as Python does at its end, takes 1.3 s of a core, since a forked process has to
    copy the memory that it shares.
    """
    contexts.switch(contexts.current())
    names["__file__"] = path
    status = 0
    try:
        exec(compile(Path(path).read_bytes(), path, "exec"), names)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
    except Exception as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.Finalize()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    ctypes.PyDLL(None).exit(status & 0xFF)  # MPICH 5 takes leave of its launcher in a handler of C's exit
