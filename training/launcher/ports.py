"""Servers of a script at a port of their own: rank 0 has it, and the others listen elsewhere."""

from __future__ import annotations

import logging
import socket
from typing import Any

from matex_data.training.replacements import patch

log = logging.getLogger("matex_data.training")


def patch_ports(rank: int) -> None:
    """Let ``bind`` of other ranks than 0 take any free port in place of the one that is asked for.

    Clients of the script reach the server of rank 0 as in one process, and rank 0 raises the error if it cannot listen.
    """
    if rank == 0:
        return

    def bind(original: Any, self: socket.socket, address: Any, /) -> None:
        internet = self.family in (socket.AF_INET, socket.AF_INET6) and self.type == socket.SOCK_STREAM
        if not internet or not address[1]:
            original(self, address)
            return
        original(self, (address[0], 0, *address[2:]))
        log.info("rank %d listens at port %d, rank 0 at %d", rank, self.getsockname()[1], address[1])

    patch(socket.socket, bind, "bind")
