"""Command ``matex doctor``: output of what it has found."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from matex_data.cli.report import Report
from matex_data.doctor import picture
from matex_data.doctor import report as tables
from matex_data.doctor.section import Section
from matex_data.errors import DataError


def show(sections: Sequence[Section], as_json: bool, html: Path | None) -> None:
    """Print the sections, and write the page, which has no picture if matplotlib is not installed.

    Parameters
    ----------
    sections : of the examination.
    as_json : print JSON.
    html : file of the page; None: there is none.

    Raises
    ------
    DataError : the page cannot be written.
    """
    if as_json:
        sys.stdout.write(f"{tables.as_json(sections)}\n")
        if html is None:
            return
    output = Report(Console(file=io.StringIO() if as_json else sys.stdout, record=html is not None))
    tables.show(sections, output.console)
    if html is None:
        return
    try:
        output.add_picture(picture.draw(sections), "Memory, cores and small reads of each node")
    except DataError as error:  # what was found matters more
        output.print(f"no picture: {error}")
    output.write_page(html, "matex doctor")
