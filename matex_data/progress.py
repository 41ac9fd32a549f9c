"""Progress of work that takes long, on rank 0 in a terminal: a line that is overwritten, and removed at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    DownloadColumn,
    FileSizeColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from matex_data.io.counters import process_profile


class _BytesDone(ProgressColumn):
    """Bytes that are done, and those of the whole work if they are known."""

    def __init__(self, done: Callable[[], int]) -> None:
        super().__init__()
        self._done = done

    def render(self, task: Task) -> Text:
        task.completed = self._done()
        return (FileSizeColumn() if task.total is None else DownloadColumn()).render(task)


@contextmanager
def shown(
    console: Console, description: str, done: Callable[[], int] | None = None, total: int | None = None
) -> Iterator[None]:
    """Context manager: show what is being done, its bytes so far, and the time it takes.

    Parameters
    ----------
    console : prints on rank 0 alone.
    description : of the work, such as "opening files".
    done : returns the bytes that are done; None: those that this process reads from data files.
    total : bytes of the whole work; None: unknown.
    """
    before = process_profile().bytes
    count = (lambda: process_profile().bytes - before) if done is None else done
    columns = SpinnerColumn(), TextColumn("{task.description}"), _BytesDone(count), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(description, total=total)
        yield
