"""Benchmarks: fixed grids and traces, baselines measured in the same run, figures with noise."""

from benchmarks.baseline_policies import register

register()
