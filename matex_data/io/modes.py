"""Choice between collective and independent reads, by the type of the file system. Nothing here calls MPI."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from matex_data.storage.objects import is_url

PARALLEL = frozenset(("lustre", "gpfs", "beegfs", "beegfs_nodev", "pvfs2", "orangefs"))
"""Types of file systems that are made for reads which many machines make as one."""
NETWORK = PARALLEL | frozenset(
    ("nfs", "nfs4", "ceph", "cifs", "smb3", "9p", "virtiofs", "afs", "panfs", "wekafs", "glusterfs")
)
"""Types of file systems that several machines share."""
LOCAL = frozenset(
    (
        *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "rootfs", "overlay", "squashfs"),
        *("erofs", "iso9660", "vfat", "exfat", "ntfs3"),
    )
)
"""Types of file systems of one machine. FUSE may be either."""


class Mount(NamedTuple):
    """Mounted file system.

    Attributes
    ----------
    point : path at which it is mounted.
    type : its name in the kernel: "ext4", "nfs4", "fuse.sshfs".
    source : device or server.
    """

    point: str
    type: str
    source: str

    @property
    def shared(self) -> bool | None:
        """Return whether several machines share it, by its type; None if the type does not tell."""
        return True if self.type in NETWORK else False if self.type in LOCAL else None


def mount_table() -> str:
    """Return the mounted file systems as the system lists them, see proc(5); "" if it does not."""
    try:
        return os.fsdecode(Path("/proc/self/mountinfo").read_bytes())
    except OSError:
        return ""


def mount_of(path: str, table: str | None = None) -> Mount | None:
    """Return the file system of a path; None if the system does not tell.

    Parameters
    ----------
    path : of a file or a folder that exists.
    table : text of `mount_table`; None: that of this process.
    """
    path, found = os.path.realpath(path), None
    for line in (mount_table() if table is None else table).splitlines():
        mount = _parse(line)
        inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        if inside and (found is None or len(mount.point) >= len(found.point)):  # a later mount covers an earlier one
            found = mount
    return found


@lru_cache(1024)  # the files of a data set are looked up one by one
def _parse(line: str) -> Mount:
    before, _, behind = line.partition(" - ")
    point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), before.split()[4])  # blanks, and backslashes
    kind, source = behind.split()[:2]
    return Mount(point, kind, source)


MOST_SHARED_FILES = 64  # that all ranks open with ``io="auto"``; of more files, each rank opens those that it reads


class IoMode(NamedTuple):
    """Choice whether the ranks make the reads of a file as one.

    Attributes
    ----------
    collective : they do; otherwise each rank reads by itself.
    reason : why, as the end of a sentence.
    """

    collective: bool
    reason: str

    def __str__(self) -> str:
        how = "all ranks as one, by MPI-IO" if self.collective else "each rank by itself"
        return f"{how}: {self.reason}"


def choose(io: str, paths: Sequence[str], ranks: int = 2) -> IoMode:
    """Return the mode in which ranks read files, as far as one of them can tell.

    Parameters
    ----------
    io : "auto", "collective" or "independent".
    paths : of the files.
    ranks : number of them.

    Examples
    --------
    >>> print(choose("collective", ["events.h5"]))
    all ranks as one, by MPI-IO: as io= says
    """
    if ranks == 1:
        return IoMode(False, "there is one")
    if len(paths) and is_url(paths[0]):
        return IoMode(False, "MPI does not read from a store of objects")
    if io != "auto":
        return IoMode(io == "collective", "as io= says")
    if len(paths) > MOST_SHARED_FILES:
        return IoMode(False, f"there are more than {MOST_SHARED_FILES} files")
    if os.environ.get("MATEX_IO_HINTS"):
        return IoMode(True, "MATEX_IO_HINTS is set")
    table = mount_table()
    mounts = [mount_of(folder, table) for folder in dict.fromkeys(str(Path(path).parent) for path in paths)]
    types = sorted({"unknown" if mount is None else mount.type for mount in mounts})
    parallel = bool(types) and PARALLEL.issuperset(types)
    return IoMode(parallel, f"the type of the file system is {', '.join(types)}" if types else "there are no files")
