"""Windows of samples from memory, of which functions compute fields anew in every epoch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from matex_data.epochs.window import LoadedWindow
from matex_data.index.computed import NUMBER, Drawing


def compute_fields(loaded: LoadedWindow, drawn: Drawing, epoch: int) -> LoadedWindow:
    """Return a window with the fields that functions compute of what was kept in memory.

    Parameters
    ----------
    loaded : rows of the fields of ``drawn.index``.
    drawn : the functions.
    epoch : number of the epoch.

    Raises
    ------
    FunctionError : a function fails.
    """
    numbers = loaded.arrays[NUMBER]
    present: Any = slice(None)
    if len(loaded.padding):
        present = np.setdiff1d(np.arange(len(numbers)), loaded.padding)
    given = {name: array[present] for name, array in loaded.arrays.items()}
    computed = drawn.apply(given, numbers[present], epoch)
    arrays: dict[str, Any] = {}
    for name, field in drawn.fields.items():
        if name not in computed:
            arrays[name] = loaded.arrays[drawn.delivered[name]]
        elif len(loaded.padding):
            arrays[name] = field.empty(len(numbers))
            arrays[name][present] = computed[name]
            blanked = field.empty(len(loaded.padding))
            field.blank(blanked)
            arrays[name][loaded.padding] = blanked
        else:
            arrays[name] = np.ascontiguousarray(computed[name])
    return replace(loaded, arrays=arrays)
