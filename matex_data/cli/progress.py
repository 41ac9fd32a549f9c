"""Progress of work whose end is not known beforehand, on rank 0 in a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import FileSizeColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from matex_data.io.counters import process_profile


class _BytesRead(ProgressColumn):
    """Bytes that this process has read since the task began."""

    def __init__(self) -> None:
        super().__init__()
        self._before = process_profile().bytes
        self._size = FileSizeColumn()

    def render(self, task: Task) -> Text:
        task.completed = process_profile().bytes - self._before
        return self._size.render(task)


@contextmanager
def shown(console: Console, description: str) -> Iterator[None]:
    """Context manager: show what is being done, the bytes that rank 0 has read for it, and the time it takes.

    Parameters
    ----------
    console : prints on rank 0 alone.
    description : of the work, such as "opening files".
    """
    columns = SpinnerColumn(), TextColumn("{task.description}"), _BytesRead(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(description, total=None)
        yield
