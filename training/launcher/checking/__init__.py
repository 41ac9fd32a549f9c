"""Self-check of training under ``matex run``: shards of a batch against their union, throughout a run."""
