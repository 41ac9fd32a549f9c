"""Order and existence of many paths."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from matex_data.paths import LISTED, existing_files, natural_key, natural_sorted


@given(st.lists(st.text("ab019./", max_size=6)))
def test_names_that_differ_in_digits_are_sorted_as_all_others(names: list[str]) -> None:
    assert natural_sorted(names) == sorted(names, key=natural_key)


def test_existing_files(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}" for number in range(LISTED + 5)]
    for path in files[:-1]:
        path.touch()
    (tmp_path / "folder").mkdir()
    paths = [str(path) for path in (*files, tmp_path / "folder", tmp_path / "none" / "1")]
    assert existing_files(paths) == set(paths[: len(files) - 1])
    assert existing_files(paths[:3]) == set(paths[:3])
