"""Writer of decoder matrices in the layouts of GPTQ, AWQ and compressed-tensors, and a reader.

They pack and unpack bit by bit, following the descriptions of the layouts, and share no code with
the server.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Outputs that AWQ stores in 32 bits, from the lowest four bits on."""
LINEAR = re.compile(r"(.*layers\.\d+\..*_proj)\.weight$")
VISION = "vision"
ACTIVATIONS = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
    "group_size": None,
    "actorder": None,
    "block_structure": None,
    "scale_dtype": None,
    "observer": "memoryless",
    "observer_kwargs": {},
}
"""Description of quantized activations, as llm-compressor writes it for W8A8 and W4A8."""


@dataclass(frozen=True)
class Layout:
    """Layout in which the matrices of a checkpoint are stored.

    group: number of inputs that share a scale, −1 for all. symmetric: whether all zeros are the
    middle value. reordered: whether the inputs of a group need not be adjacent. version: version of
    GPTQ's zeros. packed: whether compressed-tensors packs the values; by default only those of 4
    bits. dynamic: whether activations are quantized, too; scales and keys are then those of
    published checkpoints of several versions.
    """

    method: str
    bits: int = 4
    group: int = 32
    symmetric: bool = False
    reordered: bool = False
    version: str = "gptq"
    per_tensor: bool = False
    packed: bool | None = None
    dynamic: bool = False

    @property
    def is_packed(self) -> bool:
        return self.bits == 4 if self.packed is None else self.packed

    @property
    def config(self) -> dict[str, Any]:
        """Value of `quantization_config`."""
        if self.method == "gptq":
            return {
                "quant_method": "gptq",
                "bits": self.bits,
                "group_size": self.group,
                "sym": self.symmetric,
                "desc_act": self.reordered,
                "checkpoint_format": self.version,
            }
        if self.method == "awq":
            return {
                "quant_method": "awq",
                "bits": 4,
                "group_size": self.group,
                "zero_point": True,
                "version": "gemm",
            }
        strategy = "tensor" if self.per_tensor else "channel" if self.group < 0 else "group"
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": strategy,
            "group_size": self.group if strategy == "group" else None,
        }
        scheme = {"targets": ["Linear"], "input_activations": None, "weights": weights}
        if self.dynamic:
            scheme |= {"output_activations": None, "input_activations": ACTIVATIONS}
            weights |= {"dynamic": False, "actorder": None, "block_structure": None}
            weights |= {"observer": "mse", "observer_kwargs": {}, "zp_dtype": "torch.int8"}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized" if self.is_packed else "int-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head", "re:.*vision_tower.*", "re:.*multi_modal_projector.*"],
            "config_groups": {"group_0": scheme},
        }


def quantize_checkpoint(folder: Path, layout: Layout) -> dict[str, torch.Tensor]:
    """Quantize the decoder of a float checkpoint in place. Return its dequantized weights."""
    file = folder / "model.safetensors"
    stored, exact = {}, {}
    rng = np.random.default_rng(7)
    orders: dict[int, np.ndarray[Any, Any]] = {}
    for key, weight in load_file(file).items():
        match = LINEAR.match(key)
        if match is None or VISION in key:
            stored[key] = exact[key] = weight
            continue
        depth = weight.shape[1]
        if depth not in orders:  # projections with the same input share its order
            orders[depth] = rng.permutation(depth) if layout.reordered else np.arange(depth)
        parts, exact[key] = _quantize(weight.float().numpy(), layout, orders[depth])
        stored |= {f"{match[1]}.{name}": torch.as_tensor(part) for name, part in parts.items()}
    save_file(stored, file, {"format": "pt"})
    config = folder / "config.json"
    described = json.loads(config.read_text()) | {"quantization_config": layout.config}
    config.write_text(json.dumps(described))
    return exact


def quantized_parts_of(weight: Any, layout: Layout) -> dict[str, Callable[[], torch.Tensor]]:
    """Return functions that read the stored parts of a matrix, with adjacent groups."""
    parts, _ = _quantize(weight, layout, np.arange(weight.shape[1]))
    # Each call returns a new tensor, as from a file.
    return {name: torch.as_tensor(part).clone for name, part in parts.items()}


def dequantize_folder(folder: Path, exact: Path) -> None:
    """Copy a folder of `vlora models quantize`, and replace its weights by the floats that they
    represent, all in one file.
    """
    shutil.copytree(folder, exact)
    config = json.loads((exact / "config.json").read_text())
    (scheme,) = config.pop("quantization_config")["config_groups"].values()
    (exact / "config.json").write_text(json.dumps(config))
    (exact / "model.safetensors.index.json").unlink(missing_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(exact.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    for key in [key for key in tensors if key.endswith(".weight_packed")]:
        weight = key.removesuffix("_packed")
        parts = {
            part: tensors.pop(f"{weight}_{part}", torch.empty(0)).numpy()
            for part in ("packed", "shape", "scale", "zero_point")
        }
        tensors[weight] = torch.from_numpy(_dequantized(parts, scheme["weights"]["num_bits"]))
    for key in [key for key in tensors if key.endswith(".weight_scale")]:  # not packed
        weight = key.removesuffix("_scale")
        tensors[weight] = tensors[weight].float() * tensors.pop(key).float()
    save_file(tensors, exact / "model.safetensors", {"format": "pt"})


@contextmanager
def rounded_inputs(model: torch.nn.Module, group: int | None = None) -> Iterator[None]:
    """Round the inputs of the decoder's matrices to int8, with a scale for each `group` of them, or
    for each token, as published checkpoints describe it and compressed-tensors computes it.
    """

    def rounded(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        (x,) = inputs
        size = group or x.shape[-1]
        groups = torch.nn.functional.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))
        units = groups.abs().amax(-1, keepdim=True) / (127 if group else 127.5)
        return ((groups / units).round().clamp(-128, 127) * units).flatten(-2)[..., : x.shape[-1]]

    hooks = [
        module.register_forward_pre_hook(rounded)
        for name, module in model.named_modules()
        if LINEAR.match(f"{name}.weight") and VISION not in name
    ]
    yield
    for hook in hooks:
        hook.remove()


def _dequantized(parts: dict[str, Any], bits: int) -> Any:
    rows, depth = parts["shape"]
    groups = parts["scale"].shape[1]
    of_input = np.arange(depth) // (depth // groups)
    zeros = np.full((rows, groups), 2 ** (bits - 1))
    if parts["zero_point"].size:
        zeros = _unpack(parts["zero_point"].T, bits).T[:rows]
    values = _unpack(parts["packed"], bits)[:, :depth]
    return ((values - zeros[:, of_input]) * parts["scale"][:, of_input]).astype(np.float32)


def _quantize(weight: Any, layout: Layout, order: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the stored parts of a matrix, and the matrix that they represent."""
    rows, depth = weight.shape
    if not layout.symmetric:
        weight = np.where(np.arange(rows)[:, None] % 5 == 0, np.abs(weight), weight)
    size = depth if layout.group < 0 else layout.group
    group_of = np.empty(depth, np.int32)
    group_of[order] = np.arange(depth) // size
    levels, middle = 2**layout.bits - 1, 2 ** (layout.bits - 1)
    values = np.empty((rows, depth), np.int64)
    scales = np.empty((rows, group_of.max() + 1), np.float16)
    zeros = np.full(scales.shape, middle, np.int64)
    for group in range(scales.shape[1]):
        part = weight[:, group_of == group]
        # As the official quantizers do, so that the zero of positive weights is 0.
        low = np.minimum(part.min(1, keepdims=True), 0)
        high = np.maximum(part.max(1, keepdims=True), 0)
        if layout.symmetric:
            scale = np.abs(part).max(None if layout.per_tensor else 1, keepdims=True) / (middle - 1)
        else:
            scale = (high - low) / levels
        scales[:, group] = scale[:, 0]
        if layout.dynamic:  # They are stored as bfloat16, which has three bits less.
            scales.view(np.uint16)[:, group] &= 0xFFF8
        scale = scales[:, group, None].astype(np.float32)
        if not layout.symmetric:
            zeros[:, group] = np.clip(np.round(-low / scale), 0, levels)[:, 0]
        rounded = np.round(part / scale) + zeros[:, group, None]
        values[:, group_of == group] = np.clip(rounded, 0, levels)
    of_input = (scales.astype(np.float32)[:, group_of], zeros[:, group_of])
    exact = torch.from_numpy((values - of_input[1]) * of_input[0]).float()
    return _parts(values, scales, zeros, group_of, layout), exact


def _parts(values: Any, scales: Any, zeros: Any, group_of: Any, layout: Layout) -> dict[str, Any]:
    bits = layout.bits
    if layout.method == "gptq":
        qzeros = _pack(zeros.T, bits)
        if layout.version == "gptq":
            # GPTQModel subtracts 1 from each zero in whole words, so a zero of 0 borrows from the
            # zero above it.
            ones = np.array(0x11111111 if bits == 4 else 0x01010101, np.uint32)
            qzeros = (qzeros.view(np.uint32) - ones).view(np.int32)
        return {
            "qweight": _pack(values, bits).T.copy(),
            "qzeros": qzeros,
            "scales": scales.T.copy(),
            "g_idx": group_of,
        }
    if layout.method == "awq":
        columns = np.arange(len(values)).reshape(-1, 8)[:, AWQ_OUTPUTS].reshape(-1)
        return {
            "qweight": _pack(values.T[:, columns], 4),
            "qzeros": _pack(zeros.T[:, columns], 4),
            "scales": scales.T.copy(),
        }
    if layout.per_tensor:
        scales = scales[:1, 0].copy()
    parts: dict[str, Any] = {"weight_scale": scales.astype(np.float32)}
    if layout.dynamic:
        parts["weight_scale"] = torch.from_numpy(parts["weight_scale"]).bfloat16()
    if not layout.is_packed:
        middle = 2 ** (bits - 1)
        if layout.dynamic:  # Some versions store zeros of symmetric weights.
            parts["weight_zero_point"] = (zeros - middle).astype(np.int8)
        return parts | {"weight": (values - middle).astype(np.int8)}
    parts |= {"weight_packed": _pack(values, bits), "weight_shape": np.array(values.shape)}
    if not layout.symmetric:
        parts["weight_zero_point"] = _pack(zeros.T, 4).T.copy()
    if layout.reordered:
        parts["weight_g_idx"] = group_of
    return parts


def _pack(values: Any, bits: int) -> Any:
    """Return rows of integers packed into 32 bits, the first integer in the lowest bits."""
    rows, count = values.shape
    per_word = 32 // bits
    packed = np.zeros((rows, -(-count // per_word)), np.uint64)
    for column in range(count):
        shifted = values[:, column].astype(np.uint64) << np.uint64(column % per_word * bits)
        packed[:, column // per_word] |= shifted
    return packed.astype(np.uint32).view(np.int32)


def _unpack(packed: Any, bits: int) -> Any:
    """Return the integers in rows that `_pack` has packed, up to whole words."""
    words = packed.view(np.uint32).astype(np.int64)
    per_word = 32 // bits
    values = np.empty((len(words), words.shape[1] * per_word), np.int64)
    for column in range(values.shape[1]):
        shifted = words[:, column // per_word] >> column % per_word * bits
        values[:, column] = shifted & (2**bits - 1)
    return values
