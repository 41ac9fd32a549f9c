"""Damage to a file: what disks, transfers and broken writers do, and what a reader believes too easily."""

from __future__ import annotations

import gzip
import io
import random
import re
import zipfile
import zlib
from collections.abc import Callable, Sequence

SIGNATURES = re.compile(
    rb"TREE|SNOD|OHDR|OCHK|HEAP|GCOL|FRHP|FHDB|FHIB|BTHD|BTLF|BTIN|EAHD|EAIB|EADB|FAHD|FADB|SMTB|\x89HDF|CDF.|"
    rb"PK\x01\x02|PK\x03\x04|PK\x05\x06|NUMPY|"
    rb"\xff[\xc0-\xc4\xda-\xdd\xe0-\xef]|IHDR|PLTE|IDAT|fcTL|II[*+]|MM\0|VP8|ANMF|NAXIS|BITPIX|TFORM|!\xf9"
)
PNG = b"\x89PNG\r\n\x1a\n"
HEAD = 4096  # bytes in which headers mostly lie
WIDTHS = (1, 2, 4, 8)
TEXT_TOKENS = (
    b'"', b'""', b"'", b",", b";", b"\t", b"|", b"\n", b"\r\n", b"\r", b"\\", b'\\"', b" ", b"#", b"%", b"\0", b"\x0c",
    b"\xff", b"\xc3\xa9", b"\xef\xbb\xbf", b"\xff\xfe", b"NA", b"nan", b"-inf", b"1e400", b"0x1F", b"1_000", b"true",
    b"True", b"2001-02-30", b"2020-01-01T00:00:00Z", b"99999999999999999999", b"-0", b"+5", b"1,5", b"1.", b".5", b"00",
)  # fmt: skip

Mutation = Callable[[random.Random, bytes], bytes]


def mutant(chance: random.Random, data: bytes, text: bool) -> tuple[bytes, str]:
    """Damage a file in one to three ways; return its bytes and a description.

    Parameters
    ----------
    chance : decides; the same state gives the same mutant.
    text : the format is a text; its separators and quotes are targets, too.
    """
    inside = mutant_inside(chance, data, BINARY_KINDS) if chance.random() < 0.5 else None
    if inside is not None:
        return inside
    kinds = TEXT_KINDS if text else BINARY_KINDS
    done = []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        kind = chance.choice(kinds)
        data = kind(chance, data)
        done.append(kind.__name__)
    if data.startswith(PNG) and chance.random() < 0.5:
        data = _with_checksums(data)
    return data, "+".join(done)


def _with_checksums(data: bytes) -> bytes:
    """Return a PNG file with right checksums of its chunks, as far as there are whole ones."""
    changed, at = bytearray(data), len(PNG)
    while at + 12 <= len(data):
        end = at + 8 + int.from_bytes(data[at : at + 4])
        if end + 4 > len(data):
            break
        changed[end : end + 4] = zlib.crc32(data[at + 4 : end]).to_bytes(4)
        at = end + 4
    return bytes(changed)


def mutant_inside(chance: random.Random, data: bytes, kinds: Sequence[Mutation]) -> tuple[bytes, str] | None:
    """Damage a member of an archive before it is compressed, so that checksums are right; None: it is no archive."""
    for opened, close in ((_unzip, _zip), (_gunzip, _gzip)):
        members = opened(data)
        if members is not None:
            name = chance.choice(sorted(members))
            kind = chance.choice(kinds)
            return close({**members, name: kind(chance, members[name])}), f"{kind.__name__} inside"
    return None


def _place(chance: random.Random, data: bytes) -> int:
    """Any byte, but more often one near the beginning or near the mark of a structure."""
    if not data:
        return 0
    kind = chance.random()
    if kind < 0.3:
        return int(min(len(data), HEAD) ** chance.random()) % len(data)
    marks = [found.start() for found in SIGNATURES.finditer(data)] if kind < 0.6 else []
    if marks:
        return min(len(data) - 1, chance.choice(marks) + chance.randrange(64))
    return chance.randrange(len(data))


def flip_bit(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 4, 32)) if data else 0):
        changed[_place(chance, data)] ^= 1 << chance.randrange(8)
    return bytes(changed)


def overwrite(chance: random.Random, data: bytes) -> bytes:
    at, count = _place(chance, data), chance.choice((1, 2, 4, 8, 16, 512))
    value = chance.choice((bytes(count), b"\xff" * count, chance.randbytes(count), b"\x7f" * count))
    return (data[:at] + value + data[at + count :])[: max(len(data), at + 1)]


def truncate(chance: random.Random, data: bytes) -> bytes:
    return data[: chance.choice((_place(chance, data), chance.randrange(len(data) + 1), max(0, len(data) - 1)))]


def extend(chance: random.Random, data: bytes) -> bytes:
    count = chance.choice((1, 2, 8, 100, 5000))
    return data + chance.choice((bytes(count), chance.randbytes(count), data[:count], data[-count:]))


def edit_length(chance: random.Random, data: bytes) -> bytes:
    """Replace an integer that may be a size, a count or an address."""
    width = chance.choice(WIDTHS)
    order = chance.choice(("little", "big"))
    at = _place(chance, data)
    if chance.random() < 0.7:
        at -= at % width
    if at + width > len(data):
        return data
    value = int.from_bytes(data[at : at + width], order)
    top = (1 << 8 * width) - 1
    edits = (0, 1, top, top >> 1, (top >> 1) + 1, value + 1, value - 1, 2 * value, value + len(data), 1 << 4 * width)
    return data[:at] + (chance.choice(edits) & top).to_bytes(width, order) + data[at + width :]


def swap_blocks(chance: random.Random, data: bytes) -> bytes:
    size = chance.choice((4, 8, 64, 512))
    a, b = sorted((_place(chance, data), _place(chance, data)))
    if a + size > b or b + size > len(data):
        return data[::-1] if len(data) < 2 * size else data
    return data[:a] + data[b : b + size] + data[a + size : b] + data[a : a + size] + data[b + size :]


def copy_block(chance: random.Random, data: bytes) -> bytes:
    """Copy a block to another offset, overwriting or inserting."""
    size = chance.choice((1, 4, 8, 64, 512))
    source, target = _place(chance, data), _place(chance, data)
    keep = target if chance.random() < 0.3 else target + size
    return data[:target] + data[source : source + size] + data[keep:]


def remove_block(chance: random.Random, data: bytes) -> bytes:
    at = _place(chance, data)
    return data[:at] + data[at + chance.choice((1, 2, 4, 8, 64, 512)) :]


def insert_token(chance: random.Random, data: bytes) -> bytes:
    at = _text_place(chance, data)
    return data[:at] + chance.choice(TEXT_TOKENS) + data[at:]


def replace_token(chance: random.Random, data: bytes) -> bytes:
    """Replace a field, a separator or a line end."""
    tokens = list(re.finditer(rb"[^,;\t|\r\n\"]+|[,;\t|\"]|\r\n|\r|\n", data[:20_000]))
    if not tokens:
        return insert_token(chance, data)
    token = chance.choice(tokens)
    return data[: token.start()] + chance.choice((b"", *TEXT_TOKENS)) + data[token.end() :]


def change_line_ends(chance: random.Random, data: bytes) -> bytes:
    ends = chance.choice((b"\r\n", b"\r", b"\n", b"\n\n", b" \n", b",\n"))
    count = chance.choice((1, 3, -1))
    return data.replace(b"\n", ends, count)


def mark_order(chance: random.Random, data: bytes) -> bytes:
    """Add a byte order mark, with or without the encoding that it stands for."""
    if chance.random() < 0.5:
        return chance.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b"\xff\xfe\0\0")) + data
    text = data.decode("utf-8", "replace")
    return text.encode(chance.choice(("utf-16", "utf-8-sig", "utf-32")))


def _text_place(chance: random.Random, data: bytes) -> int:
    """Often right behind a separator, or at the beginning or end of the file."""
    ends = [found.end() for found in re.finditer(rb"[,;\t|\r\n]", data[:20_000])]
    return chance.choice((0, len(data), chance.choice(ends or [0]), chance.choice(ends or [0]), _place(chance, data)))


BINARY_KINDS: tuple[Mutation, ...] = (
    flip_bit, flip_bit, overwrite, truncate, extend, edit_length, edit_length, edit_length, swap_blocks, copy_block,
    remove_block,
)  # fmt: skip
TEXT_KINDS: tuple[Mutation, ...] = (
    insert_token, insert_token, replace_token, replace_token, change_line_ends, mark_order, flip_bit, truncate,
    copy_block, remove_block, overwrite,
)  # fmt: skip


def _unzip(data: bytes) -> dict[str, bytes] | None:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return {info.filename: archive.read(info) for info in archive.infolist()} or None
    except (zipfile.BadZipFile, OSError, zlib.error, EOFError, NotImplementedError, RuntimeError):
        return None


def _zip(members: dict[str, bytes]) -> bytes:
    memory = io.BytesIO()
    is_store = "zarr.json" in members or ".zgroup" in members  # of which zip compresses no member
    with zipfile.ZipFile(memory, "w") as archive:
        for number, (name, data) in enumerate(members.items()):
            info = zipfile.ZipInfo(name, (2000, 1, 1, 0, 0, 0))
            archive.writestr(info, data, zipfile.ZIP_DEFLATED if number % 2 and not is_store else zipfile.ZIP_STORED)
    return memory.getvalue()


def _gunzip(data: bytes) -> dict[str, bytes] | None:
    try:
        return {"": gzip.decompress(data)} if data.startswith(b"\x1f\x8b") else None
    except (OSError, EOFError, zlib.error):
        return None


def _gzip(members: dict[str, bytes]) -> bytes:
    return gzip.compress(members[""], mtime=0)
