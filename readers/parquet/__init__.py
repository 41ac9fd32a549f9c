"""Columnar files of Apache Arrow: Parquet, and Arrow IPC (Feather)."""
