"""Facts about one subject, and what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """Fact that is wrong or that costs speed.

    Attributes
    ----------
    problem : one sentence.
    remedy : imperative sentence.
    is_error : jobs fail or do what is not meant; otherwise they run, but could run better.
    """

    problem: str
    remedy: str
    is_error: bool = True


@dataclass
class Section:
    """Facts about one subject.

    Attributes
    ----------
    title : name of the subject.
    facts : by name, values that JSON can hold.
    rows : name and text of each line on the screen.
    findings : what to change.
    """

    title: str
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[tuple[str, str]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def add(self, name: str, value: Any, text: str | None = None) -> None:
        """Add a fact, and a line with its text; without a text that of the value."""
        self.facts[name] = value
        self.rows.append((name, str(value) if text is None else text))

    def advise(self, problem: str, remedy: str) -> None:
        """Add a finding with which jobs run."""
        self.findings.append(Finding(problem, remedy, is_error=False))

    def fail(self, problem: str, remedy: str) -> None:
        """Add a finding with which jobs do not run as they are meant to."""
        self.findings.append(Finding(problem, remedy))


def span(values: list[int]) -> str:
    """Return the range of numbers as text.

    >>> span([4, 4]), span([2, 4, 3])
    ('4', '2 to 4')
    """
    return str(min(values)) if min(values) == max(values) else f"{min(values)} to {max(values)}"
