"""Decoder families by model type. A new family needs a file beside this one and an entry here."""

from __future__ import annotations

from vlora.errors import shown
from vlora.model.families.base import DecoderFamily
from vlora.model.families.llama import LLAMA
from vlora.model.families.mistral import MISTRAL
from vlora.model.families.qwen import QWEN
from vlora.model.families.qwen2 import QWEN2
from vlora.model.families.qwen2_vl import QWEN2_5_VL, QWEN2_VL
from vlora.model.families.qwen3 import QWEN3, QWEN3_VL
from vlora.model.multimodal import MULTIMODAL, takes_images

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
