"""Benchmarks: fixed grids and traces, baselines side by side, figures with their noise."""
