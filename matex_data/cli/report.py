"""Output of a command: a console that prints on rank 0, and a page with the same tables and pictures."""

from __future__ import annotations

import base64
import io
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from matex_data.errors import DataError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST_COLUMNS = 80  # of output that goes to a file or a pipe, which wraps no lines

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #111; background: #fff }}
body {{ font: 16px/1.5 sans-serif }}
pre {{ overflow-x: auto; line-height: 1.3 }}
img {{ max-width: 100% }}
</style>
</head>
<body>
<h1>{title}</h1>
{content}
</body>
</html>
"""


class Report:
    """Output of a command.

    Parameters
    ----------
    console : prints on rank 0 alone.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._pictures: list[str] = []

    def print(self, text: object) -> None:
        """Print a text as it is, or something that rich can render."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=isinstance(text, str))

    def add_picture(self, figure: Figure, title: str) -> None:
        """Add a figure to the page.

        Parameters
        ----------
        title : what it shows, for those who cannot see it.
        """
        memory = io.BytesIO()
        figure.savefig(memory, format="png", dpi=100)
        data = base64.b64encode(memory.getvalue()).decode()
        self._pictures.append(f'<img alt="{escape(title, quote=True)}" src="data:image/png;base64,{data}">')

    def write_page(self, path: Path, title: str) -> None:
        """Write the page, one file that needs no other, and say so on the standard error.

        Raises
        ------
        DataError : the file cannot be written.
        """
        text = self.console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
        try:
            path.write_text(_PAGE.format(title=escape(title), content="\n".join([text, *self._pictures])), "utf-8")
        except OSError as error:
            raise DataError("the report cannot be written", file=str(path), found=error) from error
        Console(stderr=True, soft_wrap=True).print(f"report: {path}", markup=False, highlight=False)


def print_error(error: DataError) -> None:
    """Print the text of an error on the standard error."""
    Console(stderr=True, soft_wrap=True).print(str(error), style="red", markup=False, highlight=False)


@contextmanager
def report(html: Path | None = None, title: str = "") -> Iterator[Report]:
    """Context manager: the output of a command; exit with the text of a ``DataError``, without a traceback.

    Parameters
    ----------
    html : file of the page; None: there is none.
    title : of the page.
    """
    from matex_data.mpi.library import MPI

    root = MPI.COMM_WORLD.rank == 0
    shown = shutil.get_terminal_size((LEAST_COLUMNS, 24)).columns
    columns = None if sys.stdout.isatty() else max(LEAST_COLUMNS, shown)
    console = Console(file=sys.stdout, quiet=not root, record=html is not None and root, width=columns)
    try:
        made = Report(console)
        yield made
        if html is not None and root:
            made.write_page(html, title)
    except DataError as error:
        if root:
            print_error(error)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        if root:
            Console(stderr=True).print("interrupted")
        raise typer.Exit(130) from None
