"""Algorithm 2 of the paper: which tile is best for which shape, found by profiling.

`command.tile_search` is the command; `cuda_build` compiles the CUDA side.
"""
