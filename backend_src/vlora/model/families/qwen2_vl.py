"""Qwen2-VL and Qwen2.5-VL: the layers of Qwen2, with positions of three axes (M-RoPE)."""

from typing import Any

from vlora.model.families.base import DecoderFamily
from vlora.model.families.qwen2 import biased_targets


def _rope_axes(text: Any) -> tuple[int, ...]:
    """Return the axis of each frequency: the first section is for time, then height, then width."""
    sections = text.rope_parameters["mrope_section"]
    return tuple(axis % 3 for axis, size in enumerate(sections) for _ in range(size))


QWEN2_VL = DecoderFamily("qwen2_vl_text", biased_targets=biased_targets, rope_axes=_rope_axes)
QWEN2_5_VL = DecoderFamily("qwen2_5_vl_text", biased_targets=biased_targets, rope_axes=_rope_axes)
