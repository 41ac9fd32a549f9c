"""Mounted file systems."""

from __future__ import annotations

import pytest

from matex_data.io import modes
from matex_data.io.modes import Mount, mount_of

TABLE = r"""
22 27 8:1 / / rw,relatime - ext4 /dev/root rw
30 22 0:40 / /scratch rw - lustre 10.0.0.1@tcp:/fs rw
31 22 0:41 / /scratch/on\040disk rw shared:1 - xfs /dev/sdb rw
32 22 0:42 / /data rw - fuse.sshfs host:/data rw
33 22 0:43 / /größe rw - lustre 10.0.0.1@tcp:/fs rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "shared"),
    [
        ("/home/x", "ext4", False),
        ("/scratch/x.h5", "lustre", True),
        ("/scratchy", "ext4", False),
        ("/scratch/on disk/x", "xfs", False),
        ("/data/x", "fuse.sshfs", None),
        ("/größe/x", "lustre", True),
    ],
)
def test_file_system_of_a_path(path: str, kind: str, shared: bool | None) -> None:
    found = mount_of(path, TABLE.strip())
    assert found is not None and found.type == kind and found.shared is shared


def test_the_table_is_parsed_once_for_many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"{number} 22 0:{number} / /of{number} rw - lustre many:/fs rw" for number in range(100)]
    made: list[Mount] = []
    monkeypatch.setattr(modes, "Mount", lambda *facts: made.append(Mount(*facts)) or made[-1])
    found = {mount_of(f"/of7/{number}", "\n".join(lines)) for number in range(9)}
    assert found == {Mount("/of7", "lustre", "many:/fs")}
    assert len(made) == len(lines)
