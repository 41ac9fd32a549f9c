"""State of an iteration over batches: the step, and a fingerprint of everything that determines their order.

An iteration resumes only with an equal fingerprint, on any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from matex_data._types import Integers
from matex_data.errors import PartitionError
from matex_data.fields import ElementSpec, Names
from matex_data.index.model import Index
from matex_data.index.runs import Samples
from matex_data.locks import cached_property
from matex_data.sampling.permutation import VERSION, whole_number
from matex_data.sampling.schedule import Schedule

State = Mapping[str, Any]
"""Step and fingerprint of an iteration, as numbers and text: can be stored as JSON."""

SAMPLES = ("samples", "inputs", "targets", "fields", "digest")
"""Keys of a state that identify the samples and their fields."""
OPTIONS = ("batch_size", "shuffle", "seed", "remainder")
"""Keys of a state that are arguments of ``batches``."""
ORDER = ("lanes", "window_steps", "cache", "blocks")
"""Keys of a state that determine the shuffle. They follow from the layout of the files, and from the options of
``open_dataset`` (``window_bytes``, ``block_bytes``, ``cache``)."""


def identify_samples(index: Index, elements: ElementSpec, samples: Samples, transforms: str = "") -> dict[str, Any]:
    """Return facts that identify the samples, independent of the files' folder and the number of ranks.

    Parameters
    ----------
    elements : structure of a batch.
    samples : the samples, ascending.
    transforms : text that identifies the transforms that made samples of other samples.
    """
    rows = index.files.rows.tolist()
    files = [[_name(path), count] for path, count in zip(index.files.paths, rows, strict=True)]
    files += [[_name(path), 0] for path in index.sources.paths[len(files) :]]  # of what the samples were merged with
    digest = hashlib.blake2b(json.dumps(files).encode(), digest_size=16)
    digest.update(samples.identity())
    digest.update("".join((transforms, elements.weights or "")).encode())
    return {
        "samples": samples.total,
        "inputs": _as_plain(elements.inputs),
        "targets": _as_plain(elements.targets),
        "fields": {name: f"{field.dtype}{list(field.shape)}" for name, field in index.fields.items()},
        "digest": digest.hexdigest(),
    }


def _name(path: str) -> str:
    """Return the name of a file. ``PurePath`` takes five times as long, and there may be a million files."""
    name = path.rpartition(os.sep)[2]
    return name if name not in ("", ".") else PurePath(path).name


@dataclass(frozen=True)
class Fingerprint:
    """Fingerprint of an iteration: everything that determines its batches.

    Parameters
    ----------
    samples : facts of ``identify_samples``.
    schedule : assignment of samples to steps and ranks.
    cache : the option of the data set.
    """

    samples: Mapping[str, Any]
    schedule: Schedule
    cache: str | None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of ``batches``, with the seed that was drawn if none was given."""
        schedule = self.schedule
        shuffle: bool | str = "global" if schedule.uniform else schedule.seed is not None
        return dict(zip(OPTIONS, (schedule.batch_size, shuffle, schedule.seed, schedule.remainder), strict=True))

    @cached_property
    def order(self) -> dict[str, Any]:
        """Properties that determine the shuffle; all None without a shuffle, and for a uniform one."""
        schedule = self.schedule
        if schedule.seed is None or schedule.uniform:
            return dict.fromkeys(ORDER)
        most = max(1, schedule.full_steps)
        steps = most if self.cache == "memory" else min(schedule.window_steps, most)
        blocks = hashlib.blake2b(digest_size=16)
        _update(blocks, schedule.segments.start, schedule.segments.count, schedule.blocks)
        blocks.update(b"" if schedule.chosen is None else b"positions")
        return dict(zip(ORDER, (schedule.lanes, steps, self.cache, blocks.hexdigest()), strict=True))

    def state(self, step: int) -> dict[str, Any]:
        """Return the state of the iteration after ``step`` global batches."""
        return {"step": check_step(step), "version": VERSION, **self.samples, **self.options, **self.order}

    def check(self, start: State) -> None:
        """Raise ``PartitionError`` if ``start`` has other samples, options or another order, with the differences."""
        for facts in (self.samples, self.options, self.order):
            differ = [name for name in facts if name in start and start[name] != facts[name]]
            if differ:
                raise _mismatch(differ, start, facts)


def check_step(step: int) -> int:
    """Return a number of batches as Python's integer; raise ``PartitionError`` if it is no integer of 0 or more."""
    return whole_number(step, 0, "a state is that after a number of batches", "step= an integer of 0 or more")


def read_step(start: State) -> int:
    """Return the number of batches before ``start``.

    Raises
    ------
    PartitionError : ``start`` is not a state of ``Dataset.state``.
    """
    given = [name for name in (*OPTIONS, *ORDER) if name in start] if isinstance(start, Mapping) else None
    whole = given is not None and len(given) in (0, len(OPTIONS) + len(ORDER)) and all(k in start for k in SAMPLES)
    step = start.get("step") if whole else None
    if not isinstance(step, int | np.integer) or isinstance(step, bool) or step < 0:
        raise PartitionError(
            "start= is not the state of a data set",
            expected="a whole state of Dataset.state(step), with a step of at least 0",
            found=start,
            remedy="save the state with the release that resumes, or leave out start= to begin anew",
        )
    return int(step)


def resumed_step(start: State, schedule: Schedule) -> tuple[int, str]:
    """Return the number of batches before a run that resumes, and a message if it is not that of the state.

    Raises
    ------
    PartitionError : see `read_step`.
    """
    step, steps = read_step(start), max(1, schedule.steps)
    if schedule.seed is None or not step % steps or start.get("version") == VERSION:
        return step, ""
    epoch = -(-step // steps)
    text = f"start= is a state after {step} batches, of a release that shuffled otherwise"
    return epoch * steps, f"{text}: the run resumes with epoch {epoch}"


def read_seed(start: State) -> int:
    """Return the seed of a state.

    Raises
    ------
    PartitionError : the state was saved before any batches were made, or of an iteration without a shuffle.
    """
    seed = start.get("seed")
    if isinstance(seed, int | np.integer) and not isinstance(seed, bool):
        return int(seed)
    if start.get("shuffle") is False:
        raise _mismatch(["shuffle"], start, {"shuffle": True})
    raise PartitionError(
        "start= holds no seed, and without it the order would differ",
        expected="seed=, or a state that was saved after tf_dataset or batches",
        found="seed=None, shuffle=True",
        remedy="pass the seed that the run began with",
    )


def _mismatch(differ: list[str], start: State, facts: Mapping[str, Any]) -> PartitionError:
    return PartitionError(
        f"start= is the state of a run with another {', '.join(differ)}",
        expected=_listed(differ, start),
        found=_listed(differ, facts),
        remedy=f"{_REMEDIES.get(differ[0], _REMEDY)}, or begin anew: without start=, or in another folder",
    )


_REMEDY = "resume with the options that the run began with"
_REMEDIES = {
    "samples": "resume with the files, the split, and the where= and flatten=, that the run began with",
    "digest": "resume with the files (their names and rows), the split, and the where=, flatten=, keep= and weights=, "
    "that the run began with",
    "blocks": "resume with files whose chunks, and with the block_bytes= and the release, that the run began with",
    **dict.fromkeys(
        ("lanes", "window_steps", "cache"),
        "open the files with the window_bytes=, block_bytes= and cache= of the run, and with its release",
    ),
}


def _listed(names: list[str], facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={facts[name]!r}" for name in names)


def _as_plain(names: Names) -> Any:
    return names if names is None or isinstance(names, str) else list(names)


def _update(digest: Any, *arrays: Integers) -> None:
    for array in arrays:
        digest.update(np.ascontiguousarray(array, "<i8"))
