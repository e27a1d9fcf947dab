"""Entry point of `python -m vlora.cli`."""

from vlora.cli import main

main()
