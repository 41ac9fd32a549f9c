"""A version of Keras or TensorFlow that was not tested is an error before training."""

from __future__ import annotations

import configparser
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import ROOT, run_script
from tests.support.ranks import Pools

LAUNCHER = "from matex_data.training.launcher.run import main; main()"


@pytest.mark.parametrize(
    ("version", "refused"),
    [("3.99.1", True), *(pytest.param(*more, marks=pytest.mark.slow) for more in (("3.6.0", True), ("3.9.0", False)))],
)
def test_a_version_that_was_not_tested_is_an_error(version: str, refused: bool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('reached')")
    done = run_script(2, f"import keras; keras.__version__ = {version!r}; {LAUNCHER}", str(script), timeout=120)
    assert (done.returncode != 0) == refused, done.stderr
    assert done.stdout.count("reached") == (not refused)
    assert done.stderr.count("training needs private names of Keras and TensorFlow") == refused
    assert (f"found: keras {version}, tensorflow " in done.stderr) == refused


def _tested(comm: Any) -> dict[str, tuple[str, str]]:
    from matex_data.training import keras_api

    return keras_api.TESTED


def test_setup_and_makefile_allow_what_was_tested(ranks: Pools) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    required = setup["options"]["install_requires"].split()
    makefile = (ROOT / "Makefile").read_text()
    for name, (oldest, newest) in ranks(1).run(_tested)[0].items():
        major, minor = map(int, newest.split("."))
        assert f"{name}>={oldest},<{major}.{minor + 1}" in required
        assert f"'{name}=={oldest}.*'" in makefile
