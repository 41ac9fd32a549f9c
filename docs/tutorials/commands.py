"""Run commands (``!command``) of the tutorials without colours and progress; one that fails is an error."""

from __future__ import annotations

import os
import subprocess

from IPython.core.getipython import get_ipython

os.environ.pop("FORCE_COLOR", None)  # which Jupyter sets


def _run(command: str) -> None:
    """Print what a command writes to its standard output; raise an error if it, or a part of its pipe, fails."""
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{command} has failed with exit code {done.returncode}: {done.stderr[-2000:]}")
    print(done.stdout, end="")


get_ipython().system = _run
