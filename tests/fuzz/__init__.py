"""Damaged files: each is read as its format's own library reads it, or refused with a ``DataError``."""
