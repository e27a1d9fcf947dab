"""The policies by the names that `policy` may have in the options."""

from __future__ import annotations

from vlora.config import Options
from vlora.engine.cost import CostModel
from vlora.engine.policies.base import Credit, CreditConfig, MergeOnly, Policy, UnmergeOnly, ours
from vlora.engine.policies.dlora import DLora
from vlora.engine.policies.predictive import Predictive

PREDICTING = frozenset({"predictive", "credit", "paper", "dlora"})
"""Those that ask how long a step or a switch will take."""


def make_policy(options: Options, costs: CostModel) -> Policy:
    """The policy of `options.policy`; each one is made for one scheduler."""
    size = options.max_batch_requests or options.max_num_seqs
    if options.policy == "unmerge_only":
        return UnmergeOnly(size, options.max_wait_seconds)
    if options.policy == "merge_only":
        return MergeOnly(size, costs)
    if options.policy == "dlora":
        return DLora(size, costs)
    if options.policy == "paper":
        return Credit(CreditConfig(size, options.theta_min), costs)
    if options.policy == "credit":
        rule = ours(size, options.theta_min, options.theta_factor, options.max_wait_seconds)
        return Credit(rule, costs)
    return Predictive(size, options.max_num_batched_tokens, options.max_wait_seconds, costs)
