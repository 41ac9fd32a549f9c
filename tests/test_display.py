"""What a notebook shows of data sets: tables, and pictures that are no blank."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import matex_data as md
from tests.support.launch import run_script


@pytest.fixture(scope="module")
def data() -> md.Dataset:
    rng = np.random.default_rng(0)
    return md.open_dataset(
        {
            "image": rng.integers(0, 255, (30, 16, 16, 3), np.uint8),
            "curve": rng.normal(size=(30, 50)),
            "label": np.arange(30) % 3,
            "<b>name</b>": np.array(["a", "b", "a"] * 10),
            "hits": [np.arange(i % 5, dtype="f4") for i in range(30)],
        }
    )


def test_a_data_set_is_a_table_with_a_picture(data: md.Dataset) -> None:
    html = data._repr_html_()
    assert "30 samples in memory" in html
    assert "(16, 16, 3)" in html
    assert "&lt;b&gt;name&lt;/b&gt;" in html
    assert "<b>name" not in html
    (encoded,) = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))))
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 100
    assert len(html) < 500_000


def test_plot_writes_a_file(data: md.Dataset, tmp_path: Path) -> None:
    data.plot(tmp_path / "samples.png")
    assert Image.open(tmp_path / "samples.png").size[0] > 500
    with pytest.raises(md.DataError, match="cannot be written"):
        data.plot(tmp_path / "samples.unknown")
    with pytest.raises(md.DataError, match="no sample"):
        md.open_dataset({"x": np.zeros((0, 3))}).plot()


def test_schema_statistics_and_batches_are_tables(data: md.Dataset) -> None:
    assert "<td" in data.schema._repr_html_()  # type: ignore[attr-defined]
    assert "mean" in data.statistics("label")._repr_html_()
    assert "batch_size=6" in repr(data.batches(6))
    assert "steps" in data.batches(6)._repr_html_()


@pytest.mark.parametrize("ranks", [0, 2])
def test_an_uncaught_data_error_shows_the_line_of_the_user(ranks: int, tmp_path: Path) -> None:
    script = tmp_path / "typo.py"
    script.write_text("import matex_data as md\nmd.open_dataset({'image': [1, 2]}, inputs='imgae')\n")
    done = run_script(ranks, script, timeout=60)
    assert done.returncode != 0
    lines = done.stderr[done.stderr.index("Traceback") :].splitlines()
    assert len(lines) < 14, done.stderr
    assert "md.open_dataset({'image': [1, 2]}, inputs='imgae')" in done.stderr
    assert re.search(r"MATEX_TRACEBACK=full", done.stderr)
    assert re.search(r"FieldNotFound: there is no such array .*\n  expected: one of 'image'", done.stderr)
    full = run_script(ranks, script, timeout=60, env={"MATEX_TRACEBACK": "full"})
    assert len(full.stderr.splitlines()) > len(done.stderr.splitlines())


def test_ipython_shows_the_brief_traceback() -> None:
    with pytest.raises(md.DataError) as caught:
        md.open_dataset({"image": [1, 2]}, inputs="imgae")
    assert "MATEX_TRACEBACK" in "\n".join(caught.value._render_traceback_())
