"""Tests of matex_data; those that need several ranks run in the pools of ``tests/support/ranks.py``."""
