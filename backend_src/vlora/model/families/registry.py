"""Decoder families by model type. A new family needs a file beside this one, an entry here
and its model type in `multimodal.DECODERS`.
"""

from __future__ import annotations

from typing import Any

from vlora.model.families.base import BiasedFamily, DecoderFamily, WeightNames
from vlora.model.families.qwen import QWEN
from vlora.model.rotary import head_dim

_HEAD_NORMS = WeightNames(head_norms=("self_attn.q_norm", "self_attn.k_norm"))


class _Mistral(DecoderFamily):
    def sliding_window(self, text: Any) -> bool:
        # `sliding_window` in the configuration applies to every layer.
        return super().sliding_window(text) or bool(getattr(text, "sliding_window", None))


class _Qwen2VL(BiasedFamily):
    def rope_axes(self, text: Any) -> tuple[int, ...]:
        # The first section of frequencies is for time, then height, then width (M-RoPE).
        sections = text.rope_parameters.get("mrope_section", [16, 24, 24])
        return tuple(axis % 3 for axis, size in enumerate(sections) for _ in range(size))


class _Qwen3VL(DecoderFamily):
    def rope_axes(self, text: Any) -> tuple[int, ...]:
        # Height and width each get every third frequency, up to the number of frequencies in their
        # section. All other frequencies are for time, whatever its section is.
        _, height, width = text.rope_parameters.get("mrope_section", [24, 20, 20])
        axes = [0] * (head_dim(text) // 2)
        axes[1 : 3 * height : 3] = [1] * len(axes[1 : 3 * height : 3])
        axes[2 : 3 * width : 3] = [2] * len(axes[2 : 3 * width : 3])
        return tuple(axes)


FAMILIES: dict[str, DecoderFamily] = {
    family.model_type: family
    for family in (
        DecoderFamily("llama"),
        _Mistral("mistral"),
        QWEN,
        BiasedFamily("qwen2"),
        DecoderFamily("qwen3", _HEAD_NORMS),
        _Qwen2VL("qwen2_vl_text"),
        _Qwen2VL("qwen2_5_vl_text"),
        _Qwen3VL("qwen3_vl_text", _HEAD_NORMS),
    )
}
