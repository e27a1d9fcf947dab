"""Storage types, by their names in grids and options."""

from __future__ import annotations

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

ENGINE_NAMES = {"fp32": "float32", "bf16": "bfloat16"}
"""Names of the same types in the engine's options."""
