"""Data sets whose opened files differ in what only tests choose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import matex_data as md
from matex_data.fields import ElementSpec
from matex_data.index.runs import Runs
from matex_data.reading.source import Source
from matex_data.sampling.split import Ties
from matex_data.transforms.chained import Selected


def dataset_of(source: Source, elements: ElementSpec) -> md.Dataset:
    """Return the data set of all samples of opened files."""
    return md.Dataset(Selected(source, elements, Runs.between(0, len(source.index)), Ties()))


def with_source(data: md.Dataset, **changes: Any) -> md.Dataset:
    """Return a data set with other attributes of its opened files."""
    source = replace(data._source, **changes)
    return md.Dataset(replace(data._selected, source=source))
