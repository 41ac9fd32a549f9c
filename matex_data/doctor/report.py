"""Output of ``matex doctor``: tables for a screen of 80 columns, or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from matex_data import __version__
from matex_data.doctor.section import Section


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
