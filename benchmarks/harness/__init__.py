"""Files, processes and reports of the measurements."""
