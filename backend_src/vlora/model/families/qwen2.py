"""Qwen2 and Qwen2.5: the query, key and value projections always have a bias."""

from typing import Any

from vlora.model.families.base import DecoderFamily


def _biased_targets(text: Any) -> tuple[str, ...]:
    return ("q_proj", "k_proj", "v_proj")


QWEN2 = DecoderFamily("qwen2", biased_targets=_biased_targets)
