"""Contiguous ragged arrays of CF: profiles, trajectories or stations, of which a variable counts the observations.

https://cfconventions.org/cf-conventions/cf-conventions.html, section 9.3.3: the variable of the counts has the
attribute ``sample_dimension``, the dimension along which the observations of all features lie one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from matex_data._types import Integers
from matex_data.errors import FormatError
from matex_data.fields import Field
from matex_data.index.jagged import Content, jagged_columns
from matex_data.index.model import Layout
from matex_data.readers.dimensions.variables import FileContent, Variable

MARK = "sample_dimension"


@dataclass
class Observations:
    """Observations of a file, by the dimensions along which they lie.

    Parameters
    ----------
    counts : the variable that has the number of observations of each feature, by their dimension.
    """

    path: str
    counts: Mapping[str, Variable]
    _contents: dict[str, dict[str, tuple[Field, Content]]] = field(default_factory=dict)

    @classmethod
    def of(cls, content: FileContent, requested: str | None) -> tuple[Observations, str | None]:
        """Return the observations of a file, and the dimension of their features; None: there are none.

        Parameters
        ----------
        requested : dimension that counts the samples by the user; None: that of the features.
        """
        marked = [variable for variable in content.variables if MARK in variable.attributes]
        counts = [v for v in marked if len(v.dimensions) == 1 and v.dtype.kind in "iu"]
        features = {variable.dimensions[0] for variable in counts}
        if len(features) != 1 or requested not in (None, *features):
            return cls(content.path, {}), requested
        (feature,) = features
        group = feature.rpartition("/")[0]
        named = {str(variable.attributes[MARK]): variable for variable in counts}
        known = {name: f"{group}/{name}".strip("/") for name in named}
        by_dimension = {known[n] if known[n] in content.dimensions else n: v for n, v in named.items()}
        return cls(content.path, by_dimension), feature

    def has(self, variable: Variable) -> bool:
        """Return whether a variable has numbers of observations."""
        return bool(variable.dimensions) and variable.dimensions[0] in self.counts

    def check(self, selected: Collection[str]) -> None:
        """Raise ``FormatError`` if a selected dimension is that of observations, of which each feature has its own."""
        for name in self.counts.keys() & selected:
            raise FormatError(
                f"sel= and isel= select along {name!r}, which counts the observations",
                file=self.path,
                expected="the features, or dimensions of an observation",
                remedy=f"read the observations as samples with sample_dim={name!r}",
            )

    def add(self, variable: Variable, rows: tuple[Field, Layout]) -> str | None:
        """Add a variable, given its rows along the observations; return why it is no field, if it is none."""
        found, layout = rows
        if found.shape or found.ragged:
            return f"observations of shape {found.shape}, which are no single numbers"
        contents = self._contents.setdefault(variable.dimensions[0], {})
        contents[variable.name] = found, Content(layout, found.dtype)
        return None

    def fields(self) -> dict[str, tuple[Field, Layout]]:
        """Return field and layout of each variable, whose samples are the observations of a feature.

        Raises
        ------
        FormatError : the counts are not those of the observations.
        """
        made: dict[str, tuple[Field, Layout]] = {}
        for dimension, contents in self._contents.items():
            offsets = self._offsets(dimension, [content.layout.rows for _, content in contents.values()])
            layouts = jagged_columns(offsets, {name: content for name, (_, content) in contents.items()})
            made |= {name: (replace(found, ragged=True), layouts[name]) for name, (found, _) in contents.items()}
        return made

    def _offsets(self, dimension: str, rows: Sequence[int]) -> Integers:
        variable = self.counts[dimension]
        numbers = variable.values().astype(np.int64)
        total = int(numbers.sum()) if len(numbers) else 0
        if numbers.min(initial=0) < 0 or numbers.max(initial=0) > min(rows) or total > min(rows):
            raise FormatError(
                "the counts are not those of the observations",
                file=self.path,
                field=variable.name,
                expected=f"numbers of 0 or more, {min(rows)} in all, the length of {dimension!r}",
                found=f"{total} in all, the least {numbers.min(initial=0)}",
                remedy=f"correct the counts, or read the observations as samples with sample_dim={dimension!r}",
            )
        return np.concatenate([[0], np.cumsum(numbers)])
