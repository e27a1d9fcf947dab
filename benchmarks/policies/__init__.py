"""Scheduling policies on seeded traces."""

from benchmarks.baseline_policies import register

register()
