"""Run the command line: `python -m vlora.cli`."""

from vlora.cli import main

main()
