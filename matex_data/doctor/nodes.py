"""The machines of a job: ranks, cores, threads, memory and GPUs of each."""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from matex_data import machine
from matex_data.doctor.report import Section, span
from matex_data.launching.start import gpus
from matex_data.words import nbytes_text

if TYPE_CHECKING:
    from matex_data.mpi.library import MPI

SHOWN = 6
"""Machines with a line of their own."""
LEAST_MEMORY = 2 << 30
"""Memory that a rank with TensorFlow, a small model and its windows of samples needs, in bytes."""


def examine(comm: MPI.Intracomm | None, with_tensorflow: bool) -> Section | None:
    """Return facts about all machines, on rank 0; None on others. *Collective* with ``comm``."""
    if comm is not None:
        from matex_data.mpi.node import gather_cores

        gather_cores(comm)
    own = _own(with_tensorflow)
    ranks = [own] if comm is None else comm.gather(own)
    return None if ranks is None else _describe(ranks)


def _own(with_tensorflow: bool) -> dict[str, Any]:
    """Return facts about this rank."""
    limits = machine.free_memory_by_limit()
    least = min(limits, key=lambda name: limits[name])
    return {
        "node": platform.node(),
        "affinity": sorted(machine.core_numbers()),
        "online": os.cpu_count() or 1,
        "cores": machine.own_cores(),
        "threads": machine.threads(),
        "reading_threads": machine.reading_threads(),
        "memory": limits[least],
        "memory_limit": least,
        "gpus": gpus(),
        "tensorflow_gpus": _gpus_of_tensorflow() if with_tensorflow else None,
    }


def _gpus_of_tensorflow() -> int:
    from matex_data.training.comm.runtime import count_gpus

    return count_gpus()


def _describe(ranks: list[dict[str, Any]]) -> Section:
    section = Section("Nodes")
    nodes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for rank in ranks:
        nodes[rank["node"]].append(rank)
    counts = span([len(members) for members in nodes.values()])
    section.add("nodes", len(nodes), f"{len(nodes)} with {counts} {'rank' if counts == '1' else 'ranks'} each")
    section.facts["ranks"] = ranks
    for node, members in list(nodes.items())[:SHOWN]:
        section.rows.append((node, _line(members)))
    if len(nodes) > SHOWN:
        section.rows.append(("…", f"and {len(nodes) - SHOWN} more"))
    for node, members in nodes.items():
        _judge(section, node, members)
        if len(section.findings) >= SHOWN:
            break
    return section


def _line(members: list[dict[str, Any]]) -> str:
    """Return the facts about one machine as text."""
    cores = len(frozenset().union(*(rank["affinity"] for rank in members)))
    memory = min(members, key=lambda rank: rank["memory"])
    accelerators = members[0]["gpus"]
    seen = members[0]["tensorflow_gpus"]
    return (
        f"{cores} of {members[0]['online']} cores; a rank: {span([rank['cores'] for rank in members])} cores, "
        f"{span([rank['threads'] for rank in members])} decoding threads, {memory['reading_threads']} reading threads, "
        f"{nbytes_text(memory['memory'])} of memory (least: {memory['memory_limit']}); "
        f"{accelerators or 'no'} GPU{'' if accelerators == 1 else 's'}"
        + ("" if seen is None else f", {seen} seen by TensorFlow")
    )


def _judge(section: Section, node: str, members: list[dict[str, Any]]) -> None:
    """Add what is wrong with one machine."""
    cores = len(frozenset().union(*(rank["affinity"] for rank in members)))
    if len(members) > cores:
        section.advise(
            f"{node}: {len(members)} ranks share {cores} cores and wait for one another",
            "start as many ranks on a machine as it has cores, or give the job more cores (srun --cpus-per-task)",
        )
    elif sum(rank["threads"] for rank in members) > cores:
        section.advise(
            f"{node}: the ranks start more decoding threads than there are cores ({cores})", "unset MATEX_THREADS"
        )
    elif (
        cores > len(members)
        and all(rank["affinity"] == members[0]["affinity"] for rank in members[1:])
        and (len(members) > 1 and len(members[0]["affinity"]) == 1)
    ):
        section.advise(f"{node}: all ranks are bound to one core", "bind each to cores of its own, or to none")
    if cores == 1 < members[0]["online"] and len(members) == 1:
        section.advise(
            f"{node}: the rank is bound to one of {members[0]['online']} cores",
            "ask for more (srun --cpus-per-task=8; mpiexec --bind-to none for Open MPI)",
        )
    least = min(members, key=lambda rank: rank["memory"])
    if least["memory"] < LEAST_MEMORY:
        section.advise(
            f"{node}: {nbytes_text(least['memory'])} of memory for a rank, by the {least['memory_limit']}",
            "start fewer ranks on a machine, or ask for more memory (sbatch --mem)",
        )
    if 0 < members[0]["gpus"] < len(members):
        section.advise(f"{node}: {len(members)} ranks share {members[0]['gpus']} GPUs", "start one rank for each GPU")
    if members[0]["tensorflow_gpus"] == 0 < members[0]["gpus"]:
        section.fail(
            f"{node}: TensorFlow sees none of {members[0]['gpus']} GPUs",
            "install TensorFlow with its CUDA libraries (pip install 'tensorflow[and-cuda]'), or load the CUDA module",
        )
