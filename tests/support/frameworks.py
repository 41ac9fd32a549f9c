"""Tests that need PyTorch or JAX: `make test-torch` runs them, in an environment of its own; `make test` has none."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest

REQUIRED = "MATEX_FRAMEWORKS"
"""Environment variable of `make test-torch`: a missing package is a failure."""


def needs(*packages: str) -> Callable[[Any], Any]:
    """Return a decorator of tests that need packages which `make test` does not install."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    absent = bool(missing) and REQUIRED not in os.environ
    skip = pytest.mark.skipif(absent, reason=f"{' and '.join(missing)} is not installed; make test-torch does it")
    return lambda test: pytest.mark.frameworks(skip(test))
