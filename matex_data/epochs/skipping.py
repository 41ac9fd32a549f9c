"""Windows without the samples that cannot be read: ``on_error="skip"`` of ``open_dataset``.

Samples that fail leave their batch, or become padding of it, so that global batch k has the same samples on any number
of ranks. The reads that all ranks have agreed on are made nevertheless, and the number of steps stays. At the end of an
epoch the ranks exchange what they have skipped, rank 0 warns, and later epochs do not read these samples again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from matex_data._types import Integers
from matex_data.epochs.window import FileEpochReader, FileWindow, LoadedWindow, PendingWindow
from matex_data.fields import Schema
from matex_data.io.counters import Profile
from matex_data.io.files import Files
from matex_data.reading.context import NO_ROWS
from matex_data.reading.skipping import SkippingRead
from matex_data.sampling.schedule import Window


def leave_out(loaded: LoadedWindow, rows: Integers, fields: Schema, pad: bool) -> LoadedWindow:
    """Return the window without some rows.

    Parameters
    ----------
    loaded : the window.
    rows : int64, rows to leave out.
    fields : of the arrays.
    pad : turn the rows into padding, so that the batches keep their sizes.
    """
    if not len(rows):
        return loaded
    if pad:
        for name, array in loaded.arrays.items():
            for row in rows.tolist():
                fields[name].blank(array[row : row + 1])
        return replace(loaded, padding=np.union1d(loaded.padding, rows))
    steps = np.searchsorted(np.cumsum(loaded.sizes), rows, side="right")
    sizes = loaded.sizes - np.bincount(steps, minlength=len(loaded.sizes))
    return LoadedWindow({name: np.delete(array, rows, axis=0) for name, array in loaded.arrays.items()}, sizes, NO_ROWS)


class SkippingWindow(PendingWindow):
    """Window that is read from files, without the samples that cannot be read.

    Parameters
    ----------
    window : the window.
    read : its read.
    fields : of the samples.
    pad : turn the samples that are left out into padding.
    """

    def __init__(self, window: FileWindow, read: SkippingRead, fields: Schema, pad: bool) -> None:
        self.loaded = window.loaded
        self._window, self._read, self._fields, self._pad = window, read, fields, pad
        self._error: Exception | None = None

    def start(self, files: Files, profile: Profile) -> None:
        """Read, and start to decode. Keep an error for ``wait``: the other ranks go on. *Collective*."""
        try:
            self._window.start(files, profile)
        except Exception as error:
            self._error = error

    def wait(self, profile: Profile) -> None:
        """Wait until all samples that can be read are in ``loaded``. Raise an error that is not in the samples."""
        if self._error is None:
            try:
                self._window.wait(profile)
            except Exception as error:
                self._error = error
        failure = self._read.finish(self._error)
        if failure is not None:
            raise failure
        self._window.window.repeat(self.loaded.arrays)
        absent = self._window.window.with_copies(self._read.absent)
        self.loaded = leave_out(self.loaded, absent, self._fields, self._pad)


class SkippingEpochReader(FileEpochReader):
    """Windows of an epoch that is read from files, without the samples that cannot be read: ``skipped`` is not None."""

    def _pending(self, window: Window, loaded: LoadedWindow) -> SkippingWindow:
        assert self._skipped is not None
        index, pad = self.context.index, self._schedule.remainder == "pad"
        read = SkippingRead(
            self.context, index, self._skipped, self._tally, window.runs, window.destination, loaded.arrays
        )
        readable = replace(window, runs=read.runs, destination=read.destination)
        return SkippingWindow(FileWindow(readable, loaded, read.plan(self._chunks)), read, index.fields, pad)
