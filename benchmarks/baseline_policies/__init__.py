"""Scheduling policies of other systems. `register` makes them valid values of an option."""

from __future__ import annotations

from vlora.engine.policies.registry import register_policy


def register() -> None:
    """Make the baselines valid values of the option `policy`."""
    register_policy("merge_only", "benchmarks.baseline_policies.merge_only:make")
    register_policy("dlora", "benchmarks.baseline_policies.dlora:make")
