"""The command line ``matex``."""
