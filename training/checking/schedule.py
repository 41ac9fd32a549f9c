"""Steps before which a model is checked."""

from __future__ import annotations

import random

LATER = (1.5, 2.5)
"""Bounds of the steps before a check, in multiples of those before the latest one."""
EARLIER = 1.5
"""At the beginning of an epoch a check is due if so many times the steps of the latest one have passed."""
END = 1.25
"""The same at the end of a fit, after which the result may be used."""
FITS = 8
"""Calls of ``fit`` whose first batches are all checked; later ones are if their number is a power of two."""


class Schedule:
    """Number of steps of a compiled model, and of those before its latest check.

    Checks before steps 1, 2, 3, and then before random ones, each after 1.5 to 2.5 times the steps before the latest
    one, cost less the longer a model trains: of the first 1,000 steps a dozen is checked. The random steps are the
    same on all ranks, and in each run.

    Attributes
    ----------
    steps : steps so far.
    checked : steps before the latest check; None: there was none.
    sums : losses that are one number for a batch count as sums.
    whole : the model trains on whole batches, since a check has failed.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.checked: int | None = None
        self.sums = self.whole = False
        self._fits = 0
        self._random = random.Random(0)
        self._next = 0

    def due(self, first_of_fit: bool = False, first_of_epoch: bool = False, last_of_fit: bool = False) -> bool:
        """Return whether the next step has to be checked."""
        self._fits += first_of_fit
        if self.checked is None:
            return True
        if self.steps == self.checked and not first_of_fit:
            return False
        if first_of_fit and (self._fits <= FITS or self._fits & (self._fits - 1) == 0):
            return True
        factor = END if last_of_fit else EARLIER if first_of_epoch or first_of_fit else LATER[1]
        return self.steps >= min(self._next, max(1, factor * self.checked))

    def note_check(self) -> None:
        """Note that the next step is checked."""
        self.checked = self.steps
        self._next = self.steps + max(1, round(self._random.uniform(LATER[0] - 1, LATER[1] - 1) * self.steps))
