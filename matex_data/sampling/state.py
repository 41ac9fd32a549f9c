"""All that the order of global batches follows from: a run goes on only with the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Any

import numpy as np

from matex_data._types import Integers
from matex_data.errors import PartitionError
from matex_data.fields import ElementSpec, Names
from matex_data.index.model import Index
from matex_data.index.runs import Runs, merge
from matex_data.sampling.schedule import Schedule

State = Mapping[str, Any]

SAMPLES = ("samples", "inputs", "targets", "fields", "digest")
"""Keys of a state that say which samples, and which fields of them."""
OPTIONS = ("batch_size", "shuffle", "seed", "remainder")
"""Keys of a state that the caller of ``batches`` has chosen."""
ORDER = ("lanes", "window_steps", "cache", "blocks")
"""Keys of a state that say how these are shuffled. They follow from the layout of the files, and from options of
``open_dataset`` (``window_bytes``, ``block_bytes``, ``cache``)."""


def identify_samples(index: Index, elements: ElementSpec, samples: Runs) -> dict[str, Any]:
    """Return what identifies the samples: neither the folder of the files nor the number of ranks is part of it."""
    files = [[PurePath(file.path).name, int(file.rows)] for file in index.files]
    digest = hashlib.blake2b(json.dumps(files).encode(), digest_size=16)
    some = samples.count > 0
    whole = merge(Runs(samples.start[some], samples.count[some]))
    _add(digest, whole.start, whole.count)
    return {
        "samples": samples.total,
        "inputs": _plain(elements.inputs),
        "targets": _plain(elements.targets),
        "fields": {name: f"{field.dtype}{list(field.shape)}" for name, field in index.fields.items()},
        "digest": digest.hexdigest(),
    }


@dataclass(frozen=True)
class Fingerprint:
    """How a data set is passed over.

    Parameters
    ----------
    samples : of ``identify_samples``.
    schedule : who gets which sample when.
    cache : of the data set.
    """

    samples: Mapping[str, Any]
    schedule: Schedule
    cache: str | None

    @property
    def options(self) -> dict[str, Any]:
        """What the caller has chosen, with the seed that was drawn where none was given."""
        plan = self.schedule
        shuffle: bool | str = "global" if plan.uniform else plan.seed is not None
        return dict(zip(OPTIONS, (plan.batch_size, shuffle, plan.seed, plan.remainder), strict=True))

    @cached_property
    def order(self) -> dict[str, Any]:
        """How it is shuffled; the same for all that is not, and for all that is drawn from all samples alike."""
        plan = self.schedule
        if plan.seed is None or plan.uniform:
            return dict.fromkeys(ORDER)
        most = max(1, plan.full_steps)
        steps = most if self.cache == "memory" else min(plan.window_steps, most)
        blocks = hashlib.blake2b(digest_size=16)
        _add(blocks, plan.segments.start, plan.segments.count, plan.blocks)
        return dict(zip(ORDER, (plan.lanes, steps, self.cache, blocks.hexdigest()), strict=True))

    def state(self, step: int) -> dict[str, Any]:
        """Return where a run stands after ``step`` global batches."""
        return {"step": int(step), **self.samples, **self.options, **self.order}

    def check(self, start: State) -> None:
        """Raise ``PartitionError`` if ``start`` is of other samples, options or another order, and name them."""
        for facts in (self.samples, self.options, self.order):
            differ = [name for name in facts if name in start and start[name] != facts[name]]
            if differ:
                raise _other(differ, start, facts)


def read_step(start: State) -> int:
    """Return the number of batches that are done.

    Raises
    ------
    PartitionError : this is not what ``Dataset.state`` gives.
    """
    given = [name for name in (*OPTIONS, *ORDER) if name in start] if isinstance(start, Mapping) else None
    whole = given is not None and len(given) in (0, len(OPTIONS) + len(ORDER)) and all(k in start for k in SAMPLES)
    step = start.get("step") if whole else None
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise PartitionError(
            "start= is not the state of a data set",
            expected="what Dataset.state(step) gives, whole, with a step from 0 on",
            found=start,
            remedy="ask for the state with the release that resumes, or leave out start= to begin anew",
        )
    return step


def read_seed(start: State) -> int:
    """Return the seed of a run that goes on.

    Raises
    ------
    PartitionError : the state was asked for before any batches, or is of a run that was not shuffled.
    """
    seed = start.get("seed")
    if isinstance(seed, int):
        return seed
    if start.get("shuffle") is False:
        raise _other(["shuffle"], start, {"shuffle": True})
    raise PartitionError(
        "start= holds no seed, and without it the order would be another one",
        expected="seed=, or a state that was asked for after tf_dataset or batches",
        found="seed=None, shuffle=True",
        remedy="give the seed that the run began with",
    )


def _other(differ: list[str], start: State, facts: Mapping[str, Any]) -> PartitionError:
    return PartitionError(
        f"start= is the state of a run with another {', '.join(differ)}",
        expected=_listed(differ, start),
        found=_listed(differ, facts),
        remedy=f"{_REMEDIES.get(differ[0], _REMEDY)}, or leave out start= to begin anew",
    )


_REMEDY = "resume with the options that the run began with"
_REMEDIES = {
    "samples": "resume with the files, and the split, that the run began with",
    "digest": "resume with the files (their names and rows), and the split, that the run began with",
    "blocks": "resume with files whose chunks, and with the block_bytes= and the release, that the run began with",
    **dict.fromkeys(
        ("lanes", "window_steps", "cache"),
        "open the files with the window_bytes=, block_bytes= and cache= of the run, and with its release",
    ),
}


def _listed(names: list[str], facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={facts[name]!r}" for name in names)


def _plain(names: Names) -> Any:
    return names if names is None or isinstance(names, str) else list(names)


def _add(digest: Any, *arrays: Integers) -> None:
    for array in arrays:
        digest.update(np.ascontiguousarray(array, "<i8"))
