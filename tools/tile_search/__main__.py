"""`python -m tools.tile_search`: the command `vlora tile-search`, which needs no installation."""

from vlora.cli.common import run_command
from vlora.cli.tile_search import tile_search

if __name__ == "__main__":
    run_command(tile_search)
