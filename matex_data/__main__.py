"""Run the command ``matex`` as ``python -m matex_data``."""

from matex_data.cli.commands import main

main()
