"""Samples that are made of the rows of files in another number: the objects of events, sequence windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from matex_data.index.model import Index
from matex_data.reading.source import Source
from matex_data.sampling.split import Ties
from matex_data.transforms.splits import SourceOf


@dataclass(frozen=True, eq=False)
class Remade:
    """Index of samples that are made of others.

    Parameters
    ----------
    index : of the samples.
    ties : samples that belong together.
    reshape : turns an index of further fields of the others, which are not ragged, into one of these samples.
    identity : text that identifies the samples, as far as the options do not.
    """

    index: Index
    ties: Ties
    reshape: Callable[[Index], Index]
    identity: str = ""

    def further(self, before: SourceOf) -> SourceOf:
        """Return the way to further fields of the samples, given that to those of the others."""
        return partial(_open_reshaped, before, self.reshape)


def _open_reshaped(before: SourceOf, reshape: Callable[[Index], Index], name: str | None) -> tuple[Source, str]:
    """Return the opened files with a field as samples that are made of others, and its name. *Collective*."""
    source, found = before(name)
    if found not in source.index.fields:
        return source, found
    return source.of_index(reshape(source.index.select([found])), ""), found
