"""Layouts whose rows are those of another layout, in another form."""

from __future__ import annotations

from dataclasses import dataclass

from matex_data._types import Integers
from matex_data.index.model import Layout


@dataclass(frozen=True, eq=False)
class Converted(Layout):
    """Rows of another layout, which are converted once they are read, or while they are.

    A subclass reads them in ``requests``; blocks and bytes are those of the other layout.

    Parameters
    ----------
    layout : of the rows that are read.
    """

    layout: Layout

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.layout.rows

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return self.layout.block_rows

    def borders(self) -> Integers | None:
        return self.layout.borders()

    def stored_bytes(self) -> int:
        return self.layout.stored_bytes()

    def end(self) -> int:
        return self.layout.end()
