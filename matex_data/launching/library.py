"""The MPI library that mpi4py loads, looked at from a child process: this one must not start MPI yet."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache

from matex_data.errors import DataError
from matex_data.machine import without_rank

SECONDS = 60.0
"""Time in which a process has to load the MPI library."""

_LOAD = """
import json, sys
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
try:
    mapped = [line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if line.count("/")]
except OSError:
    mapped = []
files = [path for path in mapped if path.rsplit("/", 1)[-1].startswith(("libmpi.", "libmpich", "libmpi_", "libmpi-"))]
print(json.dumps([mpi4py.__version__, MPI.__file__, MPI.Get_library_version(), MPI.Get_version(), files]))
"""
_KINDS = (
    ("intel", r"Intel\(R\) MPI"),
    ("cray", r"CRAY MPICH"),
    ("mvapich", r"MVAPICH"),
    ("mpich", r"MPICH"),
    ("openmpi", r"Open ?MPI|OpenRTE|Open MPI|prte"),
)
MPICH_KINDS = ("mpich", "intel", "cray", "mvapich")
"""MPI libraries with the interface (ABI) and the start of MPICH."""


@dataclass(frozen=True)
class MpiLibrary:
    """MPI library that mpi4py loads.

    Attributes
    ----------
    kind : "mpich", "intel", "cray", "mvapich", "openmpi", or "" if it is another one.
    version : name and version as the library tells them, in one line.
    standard : version of the MPI standard: "4.1".
    abi : binary interface for which the module of mpi4py was built: "mpich", "openmpi", or "" if it does not tell.
    file : path of the library; "" if the system does not tell.
    mpi4py : version of mpi4py.
    """

    kind: str
    version: str
    standard: str
    abi: str
    file: str
    mpi4py: str

    @property
    def number(self) -> tuple[int, ...]:
        """Return the version of the library as numbers, () if it has none."""
        found = re.search(r"\d+(\.\d+)+", self.version)
        return tuple(map(int, found[0].split("."))) if found else ()


def kind_of(text: str) -> str:
    """Return the kind of MPI that a text of a library or a launcher tells, "" if none.

    >>> kind_of("HYDRA build details:"), kind_of("mpirun (Open MPI) 4.1.4")
    ('mpich', 'openmpi')
    """
    found = (kind for kind, pattern in _KINDS if re.search(pattern, text, re.IGNORECASE))
    return next(found, "mpich" if "HYDRA" in text else "")


@cache
def mpi_library() -> MpiLibrary:
    """Return the MPI library that mpi4py loads; raise ``DataError`` if it cannot be loaded."""
    problem = "mpi4py cannot load an MPI library"
    remedy = "pip install mpich, or load the MPI module of the cluster; MPI4PY_LIBMPI names a library's file"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LOAD], env=without_rank(), capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        raise DataError(problem, found=f"no answer within {SECONDS:g} s", remedy=remedy) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise DataError(problem, found=" ".join(last.split()), remedy=remedy)
    version, module, text, standard, files = json.loads(done.stdout.splitlines()[-1])
    abi = re.search(r"MPI\.([a-z]+)\.", module.rsplit("/", 1)[-1])  # a build for one MPI has no such name
    return MpiLibrary(
        kind=kind_of(text),
        version=_first_line(text),
        standard=".".join(map(str, standard)),
        abi=abi[1] if abi else "",
        file=files[0] if files else "",
        mpi4py=version,
    )


def _first_line(text: str) -> str:
    """Return name and version out of the text of an MPI library.

    >>> _first_line("MPICH Version:      4.0.2\\nMPICH Release date: ..."), _first_line("Open MPI v5.0.8, package: ...")
    ('MPICH 4.0.2', 'Open MPI 5.0.8')
    """
    line = " ".join(text.replace("\0", " ").strip().partition("\n")[0].partition(",")[0].split())
    return re.sub(r"(?i)\s+version:?\s*", " ", re.sub(r" v(?=\d)", " ", line)).strip()
