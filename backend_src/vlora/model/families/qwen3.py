"""Qwen3 and Qwen3-VL: each query and key head is normalized before it is rotated."""

from typing import Any

from vlora.model.families.base import DecoderFamily, WeightNames

_NAMES = WeightNames(head_norms=("self_attn.q_norm", "self_attn.k_norm"))


def _interleaved_axes(text: Any) -> tuple[int, ...]:
    """Return the axis of each frequency.

    Height and width each get every third frequency, up to the number of frequencies in their
    section. All other frequencies are for time.
    """
    time, height, width = text.rope_parameters["mrope_section"]
    axes = [0] * (time + height + width)
    axes[1 : 3 * height : 3] = [1] * len(axes[1 : 3 * height : 3])
    axes[2 : 3 * width : 3] = [2] * len(axes[2 : 3 * width : 3])
    return tuple(axes)


QWEN3 = DecoderFamily("qwen3", names=_NAMES)
QWEN3_VL = DecoderFamily("qwen3_vl_text", names=_NAMES, rope_axes=_interleaved_axes)
