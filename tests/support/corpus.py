"""Real files that nobody here wrote: the folder that ``MATEX_CORPUS`` names, without which their tests are skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

CORPUS = Path(os.environ.get("MATEX_CORPUS") or "/nowhere")
REASON = "MATEX_CORPUS does not name a folder of real files"

needs_corpus = pytest.mark.skipif(not CORPUS.is_dir(), reason=REASON)
