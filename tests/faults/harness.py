"""Run a faulty job, and evaluate the logs of its ranks."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults import files
from tests.faults.catalogue import TIMEOUT, Fault
from tests.support.launch import Completed, Hung, run_script

SCRIPT = Path(__file__).with_name("job.py")
LAUNCHED = f"""
import sys

from matex_data.cli.commands import main

sys.argv = ["matex", "run", {str(SCRIPT)!r}, *sys.argv[1:]]
main()
"""
LIMIT = 40.0
"""Seconds after which a job counts as hanging."""

Note = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """Result of a fault on a number of ranks.

    Parameters
    ----------
    what : description of the result.
    seconds : from the fault to the last error of a rank; None without an error.
    trouble : deviations from what is expected; "": none.
    output : of the job.
    """

    fault: Fault
    ranks: int
    what: str
    seconds: float | None
    trouble: str
    output: str


def run(fault: Fault, ranks: int) -> Row:
    """Run the job, and the second one if there is any."""
    folder = Path(tempfile.mkdtemp(prefix="matex-fault-"))
    try:
        folder.chmod(0o755)
        files.write(folder / files.name(fault.kind), fault.kind)
        limit = LIMIT + (50 if fault.training else 0)
        done = _job(fault, ranks, folder, limit)
        earlier: list[Note] = []
        if fault.again is not None:
            for path in folder.glob("*.notes"):
                earlier += _notes(path)
                path.unlink()
            ranks_now = fault.again
            done = _job(fault, ranks_now, folder, limit)
        else:
            ranks_now = ranks
        notes = [_notes(folder / f"rank{rank}.notes") for rank in range(ranks_now)]
        what, seconds, trouble = _judge(fault, notes, earlier, done, folder)
        return Row(fault, ranks, what, seconds, trouble, _output(done))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _job(fault: Fault, ranks: int, folder: Path, limit: float) -> tuple[Completed | Hung, float]:
    """Run the job; return its output, its exit code and the time of its end."""
    environment = {"MATEX_TIMEOUT": f"{TIMEOUT:g}", "PYTHONFAULTHANDLER": "1"}
    try:
        script = LAUNCHED if fault.launched else SCRIPT
        done = run_script(ranks, script, fault.body, fault.kind, str(folder), timeout=limit, env=environment)
    except Hung as error:
        return error, time.time()
    return done, time.time()


def _notes(path: Path) -> list[Note]:
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # the process ended while it wrote
    return found


def _judge(
    fault: Fault,
    notes: Sequence[Sequence[Note]],
    earlier: Sequence[Note],
    done: tuple[Completed | Hung, float],
    folder: Path,
) -> tuple[str, float | None, str]:
    """Return a description of the result, the seconds, and the deviations from what is expected."""
    ended, at = done
    everything = [note for rank in notes for note in rank] + list(earlier)
    wrong = [note for note in everything if note["what"] == "wrong"]
    if wrong:
        return "wrong data", None, f"wrong data: {len(wrong)} batches"
    if isinstance(ended, Hung):
        waiting = [n for n, rank in enumerate(notes) if not any(x["what"] in ("end", "error") for x in rank)]
        who = f"ranks {waiting}" if waiting else "the job"
        return "hang", None, f"hang: {who} had not ended after {LIMIT:g} s"
    begun = [note["time"] for note in everything if note["what"] == "fault"]
    if not begun:
        return "the fault did not happen", None, f"no fault; exit code {ended.returncode}"
    injected = max(begun) if fault.error is None else min(begun)
    twice = _twice(everything)
    if fault.error is None or fault.handled:
        return _judge_healthy(fault, notes, everything, ended, twice)
    return _judge_error(fault, notes, ended, at, injected, folder)


def _judge_healthy(
    fault: Fault, notes: Sequence[Sequence[Note]], everything: Sequence[Note], ended: Completed, twice: str
) -> tuple[str, float | None, str]:
    errors = [note for rank in notes for note in rank if note["what"] == "error"]
    unfinished = [n for n, rank in enumerate(notes) if not any(note["what"] == "end" for note in rank)]
    trouble = ""
    if errors:
        trouble = f"{errors[0]['kinds'][0]}: {_line(errors[0]['text'])}"
    elif unfinished or ended.returncode:
        trouble = f"ranks {unfinished} did not end; exit code {ended.returncode}"
    elif twice:
        trouble = twice
    elif not fault.training and fault.body not in ("held_iterator",) and (lost := _lost(everything)):
        trouble = lost
    what = "the error on all ranks, then all of the data" if fault.handled else "nothing: all of the data, to all ranks"
    return trouble or what, None, trouble


def _judge_error(
    fault: Fault, notes: Sequence[Sequence[Note]], ended: Completed, at: float, injected: float, folder: Path
) -> tuple[str, float | None, str]:
    known: list[float] = []
    learnt: Counter[str] = Counter()
    troubles: list[str] = []
    for rank, own in enumerate(notes):
        if any(note["what"] == "fault" and note["whose"] == "rank" for note in own):
            continue
        error = next((note for note in own if note["what"] == "error"), None)
        finished = any(note["what"] == "end" for note in own)
        if error is not None:
            known.append(error["time"] - injected)
            learnt[error["kinds"][0]] += 1
            if fault.error not in error["kinds"]:
                troubles.append(f"rank {rank} raised {error['kinds'][0]}: {_line(error['text'])}")
            elif not re.search(fault.text, error["text"]):
                troubles.append(f"rank {rank}: {_line(error['text'])}")
        elif finished:
            known.append(next(note["time"] for note in own if note["what"] == "end") - injected)
            learnt["no error"] += 1
            if not fault.quiet and not fault.any_rank:
                troubles.append(f"rank {rank} noticed nothing")
        else:
            known.append(at - injected)
            learnt["the job ended"] += 1
            if not fault.abrupt:
                troubles.append(f"rank {rank} ended without an error (exit code {ended.returncode})")
            elif not re.search(fault.text, ended.stderr + ended.stdout):
                troubles.append(f"rank {rank} ended without a word of it")
    if fault.any_rank and set(learnt) == {"no error"}:
        troubles.append("no rank noticed anything")
    if not re.search(fault.printed, ended.stderr):
        troubles.append(f"stderr is without {fault.printed!r}")
    seconds = max(known, default=0.0)
    if seconds > fault.within:
        troubles.append(f"took {seconds:.1f} s, more than {fault.within:g}")
    if not fault.quiet and ended.returncode == 0:
        troubles.append("exit code 0")
    what = ", ".join(f"{kind} on {count}" for kind, count in learnt.items())
    text = next(
        (_line(n["text"]) for own in notes for n in own if n["what"] == "error" and fault.error in n["kinds"]), ""
    )
    if not text:
        lines = (line for line in ended.stderr.splitlines() if re.search(fault.printed or fault.text, line))
        text = _line(next(lines, ""))
    text = text.replace(str(folder), "").replace("/data", "data")
    said = f": {text}" if text else ""
    return f"{what}; exit code {ended.returncode}{said}", seconds, "; ".join(troubles[:3])


def _twice(everything: Sequence[Note]) -> str:
    """Return a text about samples that arrived twice in an epoch."""
    for epoch, counts in _seen(everything).items():
        if counts and max(counts.values()) > 1:
            return f"{sum(count > 1 for count in counts.values())} samples came twice in epoch {epoch}"
    return ""


def _lost(everything: Sequence[Note]) -> str:
    for epoch, counts in _seen(everything).items():
        if len(counts) < files.ROWS:
            return f"{files.ROWS - len(counts)} samples did not come in epoch {epoch}"
    return "" if _seen(everything) else "no data"


def _seen(everything: Sequence[Note]) -> dict[int, Counter[int]]:
    found: dict[int, Counter[int]] = {}
    passes = [note for note in everything if note["what"] == "data"]
    for note in passes:
        found.setdefault(note["epoch"], Counter()).update(note["rows"])
    return found


def _line(text: str) -> str:
    return text.strip().splitlines()[0][:200] if text.strip() else ""


def _output(done: tuple[Completed | Hung, float]) -> str:
    ended, _ = done
    return str(ended) if isinstance(ended, Hung) else f"{ended.stdout}\n{ended.stderr}"


def chosen(faults: Sequence[Fault], pattern: str | None, ranks: Sequence[int] | None) -> list[tuple[Fault, int]]:
    """Return the rows whose name, title or format matches the pattern."""
    return [
        (fault, count)
        for fault in faults
        for count in fault.ranks
        if (ranks is None or count in ranks)
        and (pattern is None or re.search(pattern, f"{fault.body} {fault.kind} {fault.title}"))
    ]


def complain(row: Row) -> str:
    """Return a row as text, with the output of the job."""
    head = f"{row.fault.body} ({row.fault.title}), {row.fault.kind}, {row.ranks} ranks: {row.trouble or row.what}"
    return f"{head}\n{row.output[-4000:]}"
