"""Some faults in jobs of two ranks. ``make faults`` looks at all of them, on two and four."""

from __future__ import annotations

import pytest

from tests.faults import job
from tests.faults.catalogue import FAULTS, QUICK
from tests.faults.harness import complain, run


@pytest.mark.parametrize(("body", "kind"), QUICK, ids=lambda text: text.replace(" ", "-"))
def test_all_ranks_learn_of_a_fault(body: str, kind: str) -> None:
    fault = next(fault for fault in FAULTS if (fault.body, fault.kind) == (body, kind))
    row = run(fault, 2)
    assert not row.trouble, complain(row)


def test_every_fault_has_a_body() -> None:
    assert {fault.body for fault in FAULTS} <= set(job.BODIES)
