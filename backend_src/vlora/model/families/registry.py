"""Decoder families by model type. A new family is one file beside this one and one entry here."""

from __future__ import annotations

from vlora.model.families.base import DecoderFamily
from vlora.model.families.llama import LLAMA
from vlora.model.families.mistral import MISTRAL
from vlora.model.families.qwen2 import QWEN2

FAMILIES: dict[str, DecoderFamily] = {
    family.model_type: family for family in (LLAMA, QWEN2, MISTRAL)
}
