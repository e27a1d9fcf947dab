"""Decoder families by model type. A new family needs a file beside this one and an entry here."""

from __future__ import annotations

from vlora.model.families.base import DecoderFamily
from vlora.model.families.llama import LLAMA
from vlora.model.families.mistral import MISTRAL
from vlora.model.families.qwen2 import QWEN2
from vlora.model.families.qwen2_vl import QWEN2_5_VL, QWEN2_VL
from vlora.model.families.qwen3 import QWEN3, QWEN3_VL

FAMILIES: dict[str, DecoderFamily] = {
    family.model_type: family
    for family in (LLAMA, QWEN2, QWEN2_VL, QWEN2_5_VL, QWEN3, QWEN3_VL, MISTRAL)
}
