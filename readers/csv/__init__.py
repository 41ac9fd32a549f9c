"""Text tables: CSV, TSV and their relatives."""
