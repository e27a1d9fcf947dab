"""Tile search (algorithm 2 of the paper): find the best tile for each shape by profiling.

`command.tile_search` is the command line; `cuda_build` compiles the CUDA operator.
"""
