"""Compressed tar shards: their samples are those of the archive, which each rank decompresses once in an epoch."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from matex_data import DataError, DecodeError, FormatError, machine, open_dataset
from matex_data.readers import detect
from matex_data.readers.images.tar import archive, compressed
from matex_data.readers.images.tar import rows as tar_rows
from matex_data.readers.images.tar.reader import index
from tests.readers.images.test_tar import TestTar, encoded, pixels, sample, shards, write_tar
from tests.support.format_suite import Case, FormatSuite, same
from tests.support.ranks import Pool, Pools
from tests.support.serial import every_row, random_rows

pytestmark = pytest.mark.filterwarnings("ignore:tar shards that are stored")


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


def compress(folder: Path, pack: Callable[[bytes], bytes] = gzip.compress, suffix: str = ".gz") -> list[Path]:
    """Replace the shards of a folder by compressed ones, and return their paths."""
    paths = []
    for path in sorted(folder.glob("*.tar")):
        paths.append(path.with_name(path.name + suffix))
        paths[-1].write_bytes(pack(path.read_bytes()))
        path.unlink()
    return paths


class TestCompressedTar(FormatSuite):
    def write(self, folder: Path) -> Case:
        case = TestTar().write(folder)
        compress(folder)
        return Case(str(folder / "shard-{000..002}.tar.gz"), case.expected, case.identity)

    def damage(self, folder: Path) -> Case:
        shards(folder)
        path = compress(folder)[1]
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0x10
        path.write_bytes(content)
        return Case(str(folder / "*.tar.gz"), {}, "json")
