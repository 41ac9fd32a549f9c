"""Facts about each subject, what is wrong with them, and the output of both: for 80 columns, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from matex_data import __version__


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


def is_sound(sections: Sequence[Section]) -> bool:
    """Return whether no section has an error."""
    return not any(finding.is_error for section in sections for finding in section.findings)


def as_json(sections: Sequence[Section]) -> str:
    """Return all facts and findings as JSON."""
    findings = [
        {"section": section.title, "problem": finding.problem, "remedy": finding.remedy, "error": finding.is_error}
        for section in sections
        for finding in section.findings
    ]
    facts = {section.title.lower(): section.facts for section in sections}
    return json.dumps({"version": __version__, "sound": is_sound(sections), **facts, "findings": findings}, indent=1)


def show(sections: Sequence[Section], console: Console) -> None:
    """Print a table, and what to change."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, min_width=23, max_width=23)
    table.add_column(overflow="fold")
    for section in sections:
        table.add_row(Text(section.title, style="bold"), "")
        for name, text in section.rows:
            table.add_row(Text(f"  {name}", style="cyan"), Text(text))
    console.print(table)
    findings = [finding for section in sections for finding in section.findings]
    console.print(Text("What to change", style="bold"))
    if not findings:
        console.print("  nothing")
    for finding in sorted(findings, key=lambda finding: not finding.is_error):
        style = "red" if finding.is_error else "yellow"
        line = Table.grid(padding=(0, 1))
        line.add_row(Text("  error:" if finding.is_error else "  advice:", style=style), Text(finding.problem))
        line.add_row("", Text(f"remedy: {finding.remedy}"))
        console.print(line)
