"""Benchmark of scheduling policies. Importing the package registers the baseline policies."""

from benchmarks.baseline_policies import register

register()
