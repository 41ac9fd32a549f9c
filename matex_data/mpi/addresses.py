"""Addresses at which other ranks reach this machine by TCP."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

LOOPBACK = "127.0.0.1"


def machine() -> str:
    """Return a text that names this machine, as far as its loopback addresses reach."""
    texts = [socket.gethostname()]
    with suppress(OSError):
        texts.append(str(Path("/proc/self/ns/net").readlink()))
    with suppress(OSError):
        texts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    return " ".join(texts)


def addresses() -> list[str]:
    """Return the IPv4 addresses of this machine, first the one that a packet to elsewhere would come from."""
    found = [*_address_of_route(), *_local_addresses()]
    with suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    return list(dict.fromkeys([*found, LOOPBACK]))


def reachable(hosts: list[str], same_machine: bool) -> list[str]:
    """Return the addresses of a machine that may lead there from this one, the most likely first.

    Examples
    --------
    >>> reachable(["10.0.0.3", "127.0.0.1"], same_machine=True), reachable(["10.0.0.3", "127.0.0.1"], False)
    (['127.0.0.1', '10.0.0.3'], ['10.0.0.3'])
    """
    loopback = [host for host in hosts if host.startswith("127.")]
    return (loopback if same_machine else []) + [host for host in hosts if host not in loopback]


def _address_of_route() -> Iterator[str]:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address for documentation (RFC 5737): nothing is sent
        yield str(probe.getsockname()[0])


def _local_addresses() -> Iterator[str]:
    """Yield the addresses of all interfaces, from Linux's table of routes (``man 5 proc``)."""
    address = ""
    with suppress(OSError):
        for line in Path("/proc/net/fib_trie").read_text().splitlines():
            words = line.split()
            if words[:1] == ["|--"]:
                address = words[1]
            elif words[:3] == ["/32", "host", "LOCAL"]:
                yield address
