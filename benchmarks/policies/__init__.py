"""Scheduling policies on seeded traces. Importing it registers the baseline policies."""

from benchmarks.baseline_policies import register

register()
