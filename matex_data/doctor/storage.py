"""Storage of a job: shared memory, and the file system of a path as all machines see it, with its speed."""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import statistics
import tempfile
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from matex_data.doctor.report import Section
from matex_data.io.modes import choose, mount_of
from matex_data.storage.objects import is_url
from matex_data.words import nbytes_text

if TYPE_CHECKING:
    from matex_data.mpi.library import MPI


SHM = "/dev/shm"
_LEAST_SHM = 64 << 20  # for each rank: MPICH takes some 20 to 60 MB of a machine with four ranks


def examine(path: str | None, comm: MPI.Intracomm | None) -> Section | None:
    """Return facts about the storage, on rank 0; None on others. *Collective* with ``comm``.

    Parameters
    ----------
    path : of a file or a folder; None: the shared memory alone. Objects of stores are not measured.
    comm : ranks of the job; None: this process alone.
    """
    url, path = (path, None) if path is not None and is_url(path) else (None, path)
    own = {"node": platform.node(), "shm": _shared_memory(), "path": None}
    if path is not None:
        own["path"] = _look(path, _is_first_of_node(comm))
    ranks = [own] if comm is None else comm.gather(own)
    marked = _mark_is_seen(path, comm) if path is not None and comm is not None else None
    if ranks is None:
        return None
    section = Section("Storage")
    by_node = {rank["node"]: rank for rank in reversed(ranks)}  # the first rank of each has measured
    _describe_shm(section, by_node, len(ranks))
    if url is not None:
        section.rows.append((url, "an object of a store: not measured here; matex bench reads it"))
    if path is not None:
        _describe_path(section, path, by_node, marked)
    return section


def _is_first_of_node(comm: MPI.Intracomm | None) -> bool:
    from matex_data.mpi.node import local_rank

    return comm is None or local_rank(comm).rank == 0


def _shared_memory() -> dict[str, Any]:
    """Return whether this process can write to the shared memory, and how much is free, in bytes."""
    try:
        with tempfile.NamedTemporaryFile(dir=SHM) as file:
            file.write(b"x")
        status = os.statvfs(SHM)
        return {"writable": True, "free": status.f_bavail * status.f_frsize, "error": None}
    except OSError as error:
        return {"writable": False, "free": 0, "error": error.strerror or str(error)}


def _look(path: str, measure: bool) -> dict[str, Any]:
    """Return what this rank sees of a path."""
    found: dict[str, Any] = {"error": None, "mount": None, "same": None, "speed": None, "folder": Path(path).is_dir()}
    try:
        status = Path(path).stat()
        mount = mount_of(path)
        found["mount"] = mount and mount._asdict()
        found["shared"] = mount and mount.shared
        if not found["folder"]:
            with Path(path).open("rb") as file:
                digest = hashlib.blake2b(file.read(BLOCK), digest_size=8).hexdigest()
            found["same"] = {
                "size": status.st_size,
                "inode": status.st_ino,
                "modified": status.st_mtime_ns,
                "digest": digest,
            }
        speed = speed_of(path) if measure else None
        found["speed"] = speed and speed._asdict()
    except OSError as error:
        found["error"] = error.strerror or str(error)
    return found


def _mark_is_seen(path: str, comm: MPI.Intracomm) -> bool | None:
    """Return whether all ranks see a file that rank 0 makes in the folder; None if it cannot. *Collective*."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    name, made = f".matex-doctor-{secrets.token_hex(6)}", False
    if comm.rank == 0:
        with suppress(OSError):
            (folder / name).touch()
            made = True
    name, made = comm.bcast((name, made))
    try:
        seen, end = (folder / name).exists(), time.monotonic() + 3
        while made and not seen and time.monotonic() < end:
            time.sleep(0.2)  # the client of a file system may know the folder as it was
            seen = (folder / name).exists()
        all_seen = all(comm.allgather(seen))
    finally:
        if comm.rank == 0 and made:
            with suppress(OSError):
                (folder / name).unlink()
    return all_seen if made else None


def _describe_shm(section: Section, by_node: dict[str, dict[str, Any]], ranks: int) -> None:
    worst = min(by_node.values(), key=lambda rank: rank["shm"]["free"])
    shm = worst["shm"]
    section.add(
        SHM, shm, f"{nbytes_text(shm['free'])} free" if shm["writable"] else f"cannot be written to: {shm['error']}"
    )
    if not shm["writable"]:
        section.fail(
            f"{SHM} of {worst['node']} cannot be written to ({shm['error']}): MPICH ends the process when it starts",
            f"mount {SHM} with write access (containers: docker run --shm-size=1g, apptainer --bind {SHM})",
        )
    elif shm["free"] < _LEAST_SHM * -(-ranks // len(by_node)):
        section.advise(
            f"{SHM} of {worst['node']} has {nbytes_text(shm['free'])} left, which MPI and the shared index may exceed",
            "make it larger (docker run --shm-size=1g), or remove what jobs have left there",
        )


def _describe_path(section: Section, path: str, by_node: dict[str, dict[str, Any]], marked: bool | None) -> None:
    seen = {node: rank["path"] for node, rank in by_node.items()}
    section.facts["path"] = {"name": path, "nodes": seen, "written_file_seen_by_all": marked}
    missing = {node: found["error"] for node, found in seen.items() if found["error"]}
    for node, text in list(missing.items())[:3]:
        section.rows.append((path, f"{node}: {text}"))
    if missing:
        section.fail(
            f"{path} cannot be read on {len(missing)} of {len(seen)} nodes ({', '.join(list(missing)[:3])})",
            "put the data on a file system that all nodes mount, or copy them to each node",
        )
    present = {node: found for node, found in seen.items() if not found["error"]}
    if not present:
        return
    first = next(iter(present.values()))
    mount = first["mount"]
    kind = f"{mount['type']} at {mount['point']} ({mount['source']})" if mount else "unknown"
    section.rows.append(("path", path))
    section.rows.append(("file system", kind))
    if mount:
        section.add("reads of ranks", str(choose("auto", [f"{path}/" if first["folder"] else path])))
    text, is_shared = _sharing(section, path, list(present.values()), len(seen), marked)
    section.facts["shared"] = is_shared
    section.rows.append(("shared by nodes", text))
    _describe_speed(section, [found["speed"] for found in present.values() if found["speed"]], is_shared)


def _sharing(
    section: Section, path: str, seen: list[dict[str, Any]], nodes: int, marked: bool | None
) -> tuple[str, bool | None]:
    """Return whether the nodes share the path, as text and as a fact."""
    if nodes == 1:
        by_type = seen[0]["shared"]
        text = {True: "yes, by its type", False: "no, by its type: on one node"}.get(by_type, "its type does not tell")
        return f"{text}; start matex doctor on two nodes to see", by_type
    files = [found["same"] for found in seen if found["same"]]
    if files and len({(file["size"], file["digest"]) for file in files}) > 1:
        section.fail(
            f"{path} is another file on each node: sizes {sorted({file['size'] for file in files})}",
            "copy one file to all nodes, or put it on a file system that they share",
        )
        return "no: the nodes have different files", False
    if len(seen) < nodes:
        return "no: missing on a node", False
    if marked:
        return "yes: all nodes see a file that one of them writes", True
    if files and len({(file["inode"], file["modified"]) for file in files}) == 1 and marked is None:
        return "yes, as inode and time of change say", True
    if marked is None:
        return "unknown: nothing can be written there", None
    text = "copies with the same beginning" if files else "folders of their own"
    return f"no: the nodes have {text}; ranks read them each on its own", False


def _describe_speed(section: Section, speeds: list[dict[str, Any]], is_shared: bool | None) -> None:
    if not speeds:
        section.rows.append(("speed", "not measured: no file to read"))
        return
    latency, opening = max(s["latency"] for s in speeds), max(s["open_seconds"] for s in speeds)
    bandwidth = min((s["bandwidth"] for s in speeds if s["bandwidth"] is not None), default=None)
    section.facts["speed"] = {"latency": latency, "open_seconds": opening, "bandwidth": bandwidth}
    section.rows.append(
        (
            "speed",
            f"open {_time(opening)}, 4 KiB in {_time(latency)}"
            + (f", {nbytes_text(bandwidth)}/s by 4 MiB" if bandwidth else ", no file of 4 MiB to measure the bandwidth")
            + ("" if len(speeds) == 1 else f" (the slowest of {len(speeds)} nodes at once)")
            + "; what the system has in its cache is faster",
        )
    )
    if opening > 0.02 or latency > 0.05:
        section.advise(
            f"a file takes {_time(opening)} to open and {_time(latency)} for a small read",
            'store many samples in each file, open with index="run.matex", raise MATEX_READ_THREADS (64), '
            "and copy Python's environment to each node",
        )


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


BLOCK = 4096
"""Bytes of a read whose time is the latency."""
LARGE = 4 << 20
"""Bytes of a read of the measured bandwidth."""
SECONDS = 2.0
"""Time in which each of the two is measured."""
_FILES = 200  # of a folder that are looked at


class Speed(NamedTuple):
    """Speed of reading files that this machine has not in its cache, as far as the system drops them.

    Attributes
    ----------
    file : that was read.
    open_seconds : median time to open a file and to look up its size.
    latency : median time of a read of 4 KiB at a random position, in seconds.
    bandwidth : of consecutive reads of 4 MiB, in bytes per second; None if the file is smaller.
    """

    file: str
    open_seconds: float
    latency: float
    bandwidth: float | None


def speed_of(path: str) -> Speed | None:
    """Return the speed of a file, or of the largest one of a folder; None if there is nothing to read.

    Raises
    ------
    OSError : the system cannot read it.
    """
    files = files_of(path)
    if not files:
        return None
    file = max(files, key=lambda name: Path(name).stat().st_size)
    opened = []
    for name in files[:20]:
        begin = time.perf_counter()
        descriptor = os.open(name, os.O_RDONLY)
        os.fstat(descriptor)
        opened.append(time.perf_counter() - begin)
        os.close(descriptor)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        nbytes = os.fstat(descriptor).st_size
        return Speed(file, statistics.median(opened), _latency(descriptor, nbytes), _bandwidth(descriptor, nbytes))
    finally:
        os.close(descriptor)


def files_of(path: str) -> list[str]:
    """Return a file, or the first files of a folder that are not empty, sorted."""
    if Path(path).is_file():
        return [path] if Path(path).stat().st_size else []
    names: list[str] = []
    with suppress(OSError), os.scandir(path) as entries:
        names = [entry.path for entry in islice(entries, _FILES) if entry.is_file() and entry.stat().st_size]
    return sorted(names)


def _forget(descriptor: int) -> None:
    """Let the system drop the file from its cache, if it can."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _latency(descriptor: int, nbytes: int) -> float:
    """Return the median time of small reads, spread over the file so that no read-ahead has them."""
    _forget(descriptor)
    times, end = [], time.perf_counter() + SECONDS
    for number in range(50):
        position = (number * 0.6180339887 % 1) * max(0, nbytes - BLOCK)  # the golden ratio: far from earlier ones
        begin = time.perf_counter()
        os.pread(descriptor, BLOCK, int(position))
        times.append(time.perf_counter() - begin)
        if time.perf_counter() > end:
            break
    return statistics.median(times)


def _bandwidth(descriptor: int, nbytes: int) -> float | None:
    if nbytes < LARGE:
        return None
    _forget(descriptor)
    buffer, read = bytearray(LARGE), 0
    begin = now = time.perf_counter()
    while read < nbytes and now - begin < SECONDS:
        count = os.preadv(descriptor, [buffer], read)
        if not count:
            break
        read, now = read + count, time.perf_counter()
    return read / max(now - begin, 1e-9)
