"""``python -m matex_data`` is the command ``matex``."""

from matex_data.cli.commands import main

main()
