"""What somebody would write into a file to harm whoever opens it: sizes, counts, paths and names of codecs."""

from __future__ import annotations

import random
import re
from contextlib import suppress
from pathlib import Path

from tests.fuzz.mutations import BINARY_KINDS, TEXT_KINDS, Mutation, edit_length, mutant_inside

ALLOWED = 256 << 20  # bytes of memory, beside twice what is read as a whole
NUMBERS = (
    b"0",
    b"-1",
    b"65536",
    b"2147483647",
    b"4294967295",
    b"99999999999",
    b"1e18",
    b"9223372036854775807",
    b"1e999",
)
PATHS = (
    b"../../../../etc/passwd", b"/etc/passwd", b"/dev/zero", b"/dev/stdin", b"/proc/self/environ", b"s3://bucket/x",
    b"file:///etc/passwd", b"http://127.0.0.1:9/x", b"http://169.254.169.254/latest", b"..", b"", b"\0", b"a" * 5000,
    b"{0..99999999}",
)  # fmt: skip
CODECS = (
    b"pickle", b"zlib", b"gzip", b"bz2", b"lzma", b"zstd", b"lz4", b"blosc", b"vlen-utf8", b"vlen-bytes", b"json2",
    b"msgpack2", b"astype", b"delta", b"packbits", b"categorize", b"base64", b"shuffle", b"crc32", b"fletcher32",
    b"numcodecs.pickle", b"sharding_indexed", b"transpose", b"bytes", b"snappy", b"gzip2", b"brotli",
)  # fmt: skip
HEAD_BYTES = 4096
_NUMBER = re.compile(rb"(?<![\w.])-?\d+(?![\w.])")
_NAME = re.compile(rb"[A-Za-z0-9_.:/{}-]*[./][A-Za-z0-9_.:/{}-]+")
_CODEC = re.compile(b"|".join(sorted(CODECS, key=len, reverse=True)))


def resident(peak: bool) -> int:
    """Return the memory of this process in bytes, now or at most since the last call for now."""
    if not peak:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB" if peak else r"VmRSS:\s+(\d+) kB", status)
    return int(found[1]) << 10 if found else 0


def mutant(chance: random.Random, data: bytes, text: bool) -> tuple[bytes, str]:
    """Change a size, a count, a path or a codec of a file, and at times damage it beside; see `mutations.mutant`."""
    inside = mutant_inside(chance, data, KINDS) if chance.random() < 0.5 else None
    if inside is not None:
        return inside
    done = []
    for _ in range(chance.choice((1, 1, 2))):
        kind = chance.choice(KINDS if chance.random() < 0.9 else TEXT_KINDS if text else BINARY_KINDS)
        data = kind(chance, data)
        done.append(kind.__name__)
    return data, "+".join(done)


def _replace(chance: random.Random, data: bytes, pattern: re.Pattern[bytes], values: tuple[bytes, ...]) -> bytes:
    found = list(pattern.finditer(data[:200_000]))
    if not found:
        return edit_length(chance, data)
    match = chance.choice(found)
    value = chance.choice(values)
    if chance.random() < 0.5 and b"\0" in data[:HEAD_BYTES]:  # of the same length, so that a binary file stays whole
        value = value.ljust(match.end() - match.start(), b"\0")[: match.end() - match.start()]
    return data[: match.start()] + value + data[match.end() :]


def change_number(chance: random.Random, data: bytes) -> bytes:
    """Replace a number that is written in digits."""
    return _replace(chance, data, _NUMBER, NUMBERS)


def change_path(chance: random.Random, data: bytes) -> bytes:
    """Replace what looks like the name of a file."""
    return _replace(chance, data, _NAME, PATHS)


def change_codec(chance: random.Random, data: bytes) -> bytes:
    """Replace the name of a codec."""
    return _replace(chance, data, _CODEC, CODECS)


def enlarge(chance: random.Random, data: bytes) -> bytes:
    """Make a small integer large: a size or a count."""
    width, order = chance.choice((2, 4, 8)), chance.choice(("little", "big"))
    for _ in range(50):
        at = chance.randrange(max(1, min(len(data), 1 << 16)))
        value = int.from_bytes(data[at : at + width], order)
        if 0 < value < 1 << 20 and at + width <= len(data):
            larger = min(value << chance.choice((8, 16, 24, 40)), (1 << 8 * width - 1) - 1)
            return data[:at] + larger.to_bytes(width, order) + data[at + width :]
    return edit_length(chance, data)


KINDS: tuple[Mutation, ...] = (change_number, change_path, change_codec, enlarge, enlarge, edit_length)
