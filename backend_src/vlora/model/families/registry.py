"""Decoder families by model type.

A new family needs an entry here and its model type in `multimodal.py`. One that differs from these
in more than an option also needs a file beside this one. The decoder of a family with images
follows from that family's row in `MULTIMODAL`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vlora.model.families.base import BiasedFamily, DecoderFamily, WeightNames
from vlora.model.families.qwen import QWEN
from vlora.model.multimodal import OWN_DECODERS, Multimodal
from vlora.model.rotary import head_dim

_HEAD_NORMS = WeightNames(head_norms=("self_attn.q_norm", "self_attn.k_norm"))


class _Mistral(DecoderFamily):
    def sliding_window(self, text: Any) -> bool:
        # `sliding_window` in the configuration applies to every layer.
        return super().sliding_window(text) or bool(getattr(text, "sliding_window", None))


def _in_sections(text: Any) -> tuple[int, ...]:
    # The first section of frequencies is for time, then height, then width (M-RoPE).
    sections = text.rope_parameters.get("mrope_section", [16, 24, 24])
    return tuple(axis % 3 for axis, size in enumerate(sections) for _ in range(size))


def _interleaved(text: Any) -> tuple[int, ...]:
    # Height and width each get every third frequency, up to the number of frequencies in their
    # section. All other frequencies are for time, whatever its section is.
    _, height, width = text.rope_parameters.get("mrope_section", [24, 20, 20])
    axes = [0] * (head_dim(text) // 2)
    axes[1 : 3 * height : 3] = [1] * len(axes[1 : 3 * height : 3])
    axes[2 : 3 * width : 3] = [2] * len(axes[2 : 3 * width : 3])
    return tuple(axes)


# Functions for `DecoderFamily.rope_axes`, by the names that rows of MULTIMODAL have for them.
AXES: dict[str, Callable[[Any], tuple[int, ...]]] = {
    "": lambda text: (),
    "sections": _in_sections,
    "interleaved": _interleaved,
}

_LISTED = {
    family.model_type: family
    for family in (
        DecoderFamily("llama"),
        _Mistral("mistral"),
        QWEN,
        BiasedFamily("qwen2"),
        DecoderFamily("qwen3", _HEAD_NORMS),
    )
}


def own_decoders(rows: Mapping[str, Multimodal]) -> dict[str, DecoderFamily]:
    """Return the decoders of families with images. rows: the families, by the decoder's type."""
    return {
        name: replace(_LISTED[row.like], model_type=name, rope_axes=AXES[row.axes])
        for name, row in rows.items()
    }


FAMILIES = _LISTED | own_decoders(OWN_DECODERS)
