"""Benchmarks over fixed grids and traces, each with its baselines interleaved and its noise.

`python -m benchmarks` lists them. The package `vlora` and its wheel contain none of this.
"""
