"""Policies by name, as in the option `policy`.

To add a policy, write a module in this folder, whose name is the policy's, with a function `make`
that takes (options, costs). Code outside the package, such as the baselines of the benchmarks,
calls `register_policy` instead.
"""

from __future__ import annotations

import importlib

from vlora.config import POLICIES, Options, check_policy
from vlora.engine.cost import CostModel
from vlora.engine.policies.base import Policy


def register_policy(name: str, factory: str) -> None:
    """Make `name` a valid `policy`, made by `factory`, "module:function" with (options, costs)."""
    POLICIES[name] = factory


def make_policy(options: Options, costs: CostModel) -> Policy:
    """Return a new policy of the kind `options.policy`. Raises InvalidArgument if unknown."""
    check_policy(options.policy)
    module, _, function = POLICIES[options.policy].partition(":")
    policy: Policy = getattr(importlib.import_module(module), function)(options, costs)
    return policy
