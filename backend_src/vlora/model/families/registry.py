"""Decoder families by model type. A new family needs a file beside this one and an entry here."""

from __future__ import annotations

from typing import Any

from vlora.errors import shown
from vlora.model.families.base import DecoderFamily, WeightNames, biased_targets, has_sliding_layers
from vlora.model.families.qwen import QWEN
from vlora.model.multimodal import MULTIMODAL, takes_images

# Llama: the configuration states which projections have a bias.


LLAMA = DecoderFamily("llama")


# Mistral: the layers of Llama. `sliding_window` in the configuration applies to every layer.


def _sliding_window(text: Any) -> bool:
    return has_sliding_layers(text) or bool(getattr(text, "sliding_window", None))


MISTRAL = DecoderFamily("mistral", sliding_window=_sliding_window)


# Qwen2 and Qwen2.5: the query, key and value projections always have a bias.


QWEN2 = DecoderFamily("qwen2", biased_targets=biased_targets)


# Qwen2-VL and Qwen2.5-VL: the layers of Qwen2, with positions of three axes (M-RoPE).


def _rope_axes(text: Any) -> tuple[int, ...]:
    """Return the axes of three sections: time, then height, then width."""
    sections = text.rope_parameters["mrope_section"]
    return tuple(axis % 3 for axis, size in enumerate(sections) for _ in range(size))


QWEN2_VL = DecoderFamily("qwen2_vl_text", biased_targets=biased_targets, rope_axes=_rope_axes)
QWEN2_5_VL = DecoderFamily("qwen2_5_vl_text", biased_targets=biased_targets, rope_axes=_rope_axes)


# Qwen3 and Qwen3-VL: each query and key head is normalized before it is rotated.


_NAMES = WeightNames(head_norms=("self_attn.q_norm", "self_attn.k_norm"))


def _interleaved_axes(text: Any) -> tuple[int, ...]:
    """Return the axes. Height and width get every third frequency, up to the size of their section.

    All other frequencies are for time.
    """
    time, height, width = text.rope_parameters["mrope_section"]
    axes = [0] * (time + height + width)
    axes[1 : 3 * height : 3] = [1] * len(axes[1 : 3 * height : 3])
    axes[2 : 3 * width : 3] = [2] * len(axes[2 : 3 * width : 3])
    return tuple(axes)


QWEN3 = DecoderFamily("qwen3", names=_NAMES)
QWEN3_VL = DecoderFamily("qwen3_vl_text", names=_NAMES, rope_axes=_interleaved_axes)


FAMILIES: dict[str, DecoderFamily] = {
    family.model_type: family
    for family in (LLAMA, MISTRAL, QWEN, QWEN2, QWEN3, QWEN2_VL, QWEN2_5_VL, QWEN3_VL)
}


def refusal(model_type: object) -> str | None:
    """Return why a checkpoint of this `model_type` is not served; None if it is."""
    if isinstance(model_type, str) and model_type in (*MULTIMODAL, *FAMILIES):
        return None
    text_only = (name for name in FAMILIES if not takes_images(name) and "_" not in name)
    return (
        f"config.json has model type {shown(model_type)}, which is not supported; supported:"
        f" {', '.join(MULTIMODAL)}, and without images {', '.join(text_only)}"
    )
