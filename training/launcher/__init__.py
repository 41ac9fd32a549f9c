"""``matex run``: scripts that know nothing of ranks."""
