"""Text tables, CSV, TSV and their relatives: options -> dialect -> records -> parse, types -> reader, rows."""
