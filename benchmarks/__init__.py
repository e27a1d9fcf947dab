"""Benchmarks of the engine, the server and the kernels on fixed grids and traces.

Each benchmark alternates with its baselines in one process and reports its noise. `python -m
benchmarks` lists them. The package `vlora` and its wheel contain none of this.
"""
