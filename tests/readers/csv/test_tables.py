"""Whole tables: generated fields are read back, and each record is parsed once in an epoch."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from matex_data import open_dataset
from matex_data.readers.csv import reader as csv_reader
from matex_data.readers.csv import records
from matex_data.readers.csv.parse import Parser
from matex_data.readers.csv.reader import index_collectively
from matex_data.readers.text import scan as text_scan
from tests.support.ranks import Pools
from tests.support.serial import every_row
from tests.support.simulated import on_ranks

TOKENS = ["a", "7", ",", '"', "\n", "\r\n", "\r", " ", "é", ";", "#"]
FIELDS = st.lists(st.sampled_from(TOKENS), max_size=5).map("".join)
WIDTHS = st.integers(2, 4)
TABLES = WIDTHS.flatmap(lambda n: st.lists(st.lists(FIELDS, min_size=n, max_size=n), min_size=1, max_size=25))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TABLES, st.sampled_from(["\n", "\r\n", "\r"]), st.integers(1, 4), st.sampled_from([1, 16, 200]))
@example([["", ""]], "\n", 1, 1)
@example([['"', "\n"], ["\r", '""']], "\r", 3, 1)
def test_generated_fields_are_read_back(tmp_path: Path, rows: list[list[str]], end: str, size: int, step: int) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes("".join(_line(row) + end for row in rows).encode())
    options = {"header": None, "sep": ",", "dtype": "str", "keep_default_na": False, "decimal": "."}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_reader, "SMALL_BYTES", 0)
        patch.setattr(text_scan, "READ_BYTES", 7)
        patch.setattr(records, "PROBE_BYTES", 9)
        patch.setattr(records, "block_bytes", lambda size: step)
        patch.setattr(csv_reader, "detect", lambda text, given, fixed: given)
        indexes = on_ranks(size, lambda ranks: index_collectively([str(path)], None, ranks, **options))
    for column in range(len(rows[0])):
        found = every_row(indexes[-1], str(column))
        assert [text.decode() for text in found] == [row[column] for row in rows]


def _line(row: list[str]) -> str:
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator="\r\n").writerow(row)  # quotes fields that contain CR or LF
    return file.getvalue().removesuffix("\r\n")


def _parsed_rows(comm: MPI.Intracomm, path: str) -> tuple[int, int, int]:
    """Return the records that this rank parses in the second epoch, its samples, and the longest block."""
    data = open_dataset(path, comm=comm)
    batches = data.batches(60, shuffle=True, seed=1, remainder="keep")
    for _ in batches:
        pass
    parsed = 0
    with pytest.MonkeyPatch.context() as patch:
        original = Parser._parse_with_arrow

        def counted(parser: Parser, data: Any, types: Any, count: int) -> Any:
            nonlocal parsed
            parsed += count
            return original(parser, data, types, count)

        patch.setattr(Parser, "_parse_with_arrow", counted)
        samples = sum(len(batch["a"]) for batch in batches)
    return parsed, samples, next(iter(data._source.index.files[0].layouts.values())).block_rows


@pytest.mark.parametrize("size", (1, 2, 3))
def test_text_is_parsed_once_in_an_epoch(ranks: Pools, tmp_path: Path, size: int) -> None:
    path = tmp_path / "table.csv"
    path.write_text("a,b\n" + "".join(f"{i},{i * i}.5\n" for i in range(20_000)))
    for parsed, samples, block in ranks(size).run(_parsed_rows, str(path)):
        assert parsed <= samples + 2 * block  # the neighbours need the first and the last block, too
        assert size > 1 or parsed == samples == 20_000
