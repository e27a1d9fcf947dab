"""Vision families by model type. A new family needs a file in this folder and an entry here."""

from __future__ import annotations

from vlora.vision.families.base import VisionFamily
from vlora.vision.families.llava import LLAVA, LLAVA_NEXT, LLAVA_ONEVISION
from vlora.vision.families.qwen import QWEN_VL
from vlora.vision.families.qwen_vl import QWEN2_5_VL, QWEN2_VL, QWEN3_VL

VISION_FAMILIES: dict[str, VisionFamily] = {
    family.model_type: family
    for family in (LLAVA, LLAVA_NEXT, LLAVA_ONEVISION, QWEN_VL, QWEN2_VL, QWEN2_5_VL, QWEN3_VL)
}
