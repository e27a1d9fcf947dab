"""Qwen2 and Qwen2.5: the query, key and value projections always have a bias."""

from typing import Any

from vlora.model.families.base import DecoderFamily


def biased_targets(text: Any) -> tuple[str, ...]:
    """Return the targets with a bias, whatever the configuration says."""
    return ("q_proj", "k_proj", "v_proj")


QWEN2 = DecoderFamily("qwen2", biased_targets=biased_targets)
