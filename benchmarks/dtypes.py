"""Storage types, by their names in grids and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vlora.kernels.quantized import Format

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

ENGINE_NAMES = {"fp32": "float32", "bf16": "bfloat16"}
"""Names of the types of DTYPES in the engine's options."""


@dataclass(frozen=True)
class ModelType:
    """Type in which a whole model is stored.

    dtype: key of DTYPES, the type of everything that is not quantized, and of products.
    quantization: "int8" or "int4", the type of the decoder's linear layers; None if they are not
        quantized. With either type, the LM head is int8.
    """

    dtype: str
    quantization: str | None = None

    @property
    def itemsize(self) -> int:
        """Number of bytes of a value that is not quantized."""
        return DTYPES[self.dtype].itemsize

    @property
    def form(self) -> Format | None:
        """Quantized format of the linear layers; None if they are not quantized."""
        if self.quantization is None:
            return None
        return Format(8, None) if self.quantization == "int8" else Format(4, 32, zeros=True)

    @property
    def options(self) -> dict[str, Any]:
        """Options of the engine that store a model in this type."""
        options: dict[str, Any] = {"dtype": ENGINE_NAMES[self.dtype]}
        return options | ({"quantization": self.quantization} if self.quantization else {})


MODEL_TYPES: Mapping[str, ModelType] = {
    "fp32": ModelType("fp32"),
    "bf16": ModelType("bf16"),
    "int8": ModelType("fp32", "int8"),
    "int4": ModelType("fp32", "int4"),
    "int8-bf16": ModelType("bf16", "int8"),
    "int4-bf16": ModelType("bf16", "int4"),
}
"""Types of models by name. In a quantized type, everything but the linear layers and the LM head is
stored in fp32, or in bf16 if the name ends in "-bf16".
"""
