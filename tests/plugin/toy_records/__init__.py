"""Toy file format: a header of 12 bytes, and records of fixed size."""

from matex_data.abc import Format

MAGIC = b"TOYREC\r\n"
TOY = Format("toy_records.reader:index", suffixes=(".toy",), magic=((0, MAGIC),), sidecars=("*.draft.toy",))
