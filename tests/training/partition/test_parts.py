"""Variables of which a rank holds a part, and shows the whole to code of the user."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from tests.support.ranks import Pool

WHOLE = np.arange(8, dtype=np.float32).reshape(4, 2)


def _assigned(comm: Any) -> list[Any]:
    """Return what a rank reads while the whole is shown, before and after it assigns another one, and its part."""
    from matex_data.training.comm.channel import open_channel
    from matex_data.training.partition.parts import AxisPart, cut, hidden_wholes, hide_wholes, show_whole, whole_on_all

    variable = keras.Variable(WHOLE)
    cut(variable, AxisPart(open_channel(comm), WHOLE.shape, 0))
    show_whole(variable, whole_on_all(variable))
    before = variable.numpy()
    variable.assign(WHOLE**2)
    with hidden_wholes([variable]):
        within = variable.numpy()
    after = variable.numpy()
    hide_wholes([variable])
    return [before, after, within, variable.numpy()]


@pytest.mark.rank_counts(2)
def test_a_whole_that_is_shown_can_be_assigned(pool: Pool) -> None:
    for rank, (before, after, *parts) in enumerate(pool.run(_assigned)):
        np.testing.assert_array_equal(before, WHOLE)
        np.testing.assert_array_equal(after, WHOLE**2)
        for part in parts:
            np.testing.assert_array_equal(part, (WHOLE**2)[2 * rank : 2 * rank + 2])
