"""Entry of the tile search from the source tree."""
