"""Settings of the tests of GPU kernels: the device that runs them, and the types to test."""

from __future__ import annotations

import os

import torch

ON_GPU = "VLORA_GPU_TESTS" in os.environ
"""True for `make gpu`: the kernels run on a GPU instead of in the interpreter."""

DTYPES = [torch.float32, torch.float16, *[torch.bfloat16] * ON_GPU]
"""Types of rows and weights. The interpreter multiplies bf16 wrongly."""
