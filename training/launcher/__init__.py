"""``matex run``: train scripts written for one process on all ranks."""
