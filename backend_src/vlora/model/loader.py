"""A checkpoint folder → the decoder's weights.

Reads the language model of any checkpoint of the Llama family, alone or inside a multimodal one;
vision towers and connectors are left to `vision/encoder.py`. Names are recognised by their ends,
so the layouts of transformers 4 and 5 and bare decoders all load.
"""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vlora.errors import InvalidArgument
from vlora.lora.adapter import ModelShape
from vlora.lora.slab import TARGETS, WeightSlab
from vlora.memory import hugepages
from vlora.model.decoder_config import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    NORMS,
    DecoderConfig,
    bias_of,
    norm_of,
    rotary,
    weight_of,
)

log = logging.getLogger(__name__)

STORED = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Types in which a checkpoint's weights may be stored."""

INDEX = "model.safetensors.index.json"

_NAME = re.compile(
    r"^(?:model\.|language_model\.)*("
    r"layers\.\d+\.(?:(?:self_attn|mlp)\.\w+_proj\.(?:weight|bias)|\w+_layernorm\.weight)"
    r"|(?:embed_tokens|norm|lm_head)\.weight)$"
)


@dataclass(frozen=True)
class DecoderWeights:
    """Target matrices lie in the slab, all else beside it. Matrices are of one type, fp32 or bf16;
    norms and biases are fp32.

    biases: (layer, target) → [d_out]. norms: (layer, name) → [hidden].
    inverse_frequencies: [head_dim / 2], with `rope_scale` on cos and sin.
    """

    slab: WeightSlab
    embedding: torch.Tensor
    lm_head: torch.Tensor
    final_norm: torch.Tensor
    norms: Mapping[tuple[int, str], torch.Tensor]
    biases: Mapping[tuple[int, str], torch.Tensor]
    inverse_frequencies: torch.Tensor
    rope_scale: float


def load_weights(
    folder: Path, config: DecoderConfig, dtype: torch.dtype = torch.float32
) -> DecoderWeights:
    """Reads the folder's safetensors one tensor at a time, each straight to where it stays, so
    that loading needs the memory of the model and of its largest tensor. dtype: of matrices.

    Raises InvalidArgument naming the file and the tensor that is missing or does not fit.
    """
    holders = _holders(folder, config)
    slab = WeightSlab(config.layers, config.target_shapes, dtype)
    rooms = {
        weight_of(layer, target): slab.region(layer, target).view(slab.base)
        for layer in range(config.layers)
        for target in TARGETS
    }
    beside = {name: shape for name, shape in config.weight_shapes.items() if name not in rooms}
    rooms |= {
        name: hugepages.hugepage_zeros(*shape, dtype=dtype)
        if len(shape) == 2
        else torch.empty(shape)
        for name, shape in beside.items()
    }
    by_file: dict[Path, list[tuple[str, str]]] = defaultdict(list)
    for name, (file, key) in holders.items():
        by_file[file].append((name, key))
    for file, names in by_file.items():
        with _opened(file) as opened:
            for name, key in names:
                if name in rooms:
                    _store(rooms[name], _tensor(opened, file, key), f"{file} holds '{key}'")
    if config.tied and LM_HEAD in holders:
        _tell_stale(rooms[EMBEDDING], *holders[LM_HEAD])
    frequencies, scale = rotary(folder)
    return DecoderWeights(
        slab=slab,
        embedding=rooms[EMBEDDING],
        lm_head=rooms[EMBEDDING if config.tied else LM_HEAD],
        final_norm=rooms[FINAL_NORM],
        norms={
            (layer, norm): rooms[norm_of(layer, norm)]
            for layer in range(config.layers)
            for norm in NORMS
        },
        biases={
            (layer, target): rooms[bias_of(layer, target)]
            for layer in range(config.layers)
            for target in config.biased
        },
        inverse_frequencies=frequencies,
        rope_scale=scale,
    )


def check_files(folder: Path) -> None:
    """Raises InvalidArgument naming the first weights file that is missing, cut short or broken."""
    for file in _files(folder)[0]:
        _opened(file)


def adapter_shape(
    folder: Path, config: DecoderConfig, lm_head: torch.Tensor | None = None
) -> ModelShape:
    """What adapters of this checkpoint have to fit. Without `lm_head`, no weight is read but for
    an adapter that needs it."""
    return ModelShape(
        layers=config.layers,
        hidden=config.hidden,
        vocabulary=config.vocabulary,
        shapes=config.target_shapes,
        prefix=config.prefix,
        lm_head=cache(lambda: load_lm_head(folder, config) if lm_head is None else lm_head),
        other_modules=cache(lambda: _modules(folder)),
    )


def _modules(folder: Path) -> frozenset[str]:
    """Paths of all modules with weights, as the folder's files name them."""
    keys = (key for file in _files(folder)[0] for key in _opened(file).keys())  # noqa: SIM118
    return frozenset(key.rpartition(".")[0] for key in keys)


def load_lm_head(folder: Path, config: DecoderConfig) -> torch.Tensor:
    """The LM head alone, [vocabulary, hidden]. Raises as `load_weights`."""
    file, key = _holders(folder, config)[EMBEDDING if config.tied else LM_HEAD]
    room = torch.empty(config.vocabulary, config.hidden, dtype=torch.float32)
    with _opened(file) as opened:
        _store(room, _tensor(opened, file, key), f"{file} holds '{key}'")
    return room


def _store(room: torch.Tensor, tensor: torch.Tensor, what: str) -> None:
    """Copy a stored tensor to where it stays; the one place where its type changes."""
    if tensor.dtype not in STORED:
        served = ", ".join(str(dtype).removeprefix("torch.") for dtype in STORED)
        raise InvalidArgument(f"model: {what} as {tensor.dtype}; served are {served}")
    if tensor.shape != room.shape:
        raise InvalidArgument(
            f"model: {what} of shape {tuple(tensor.shape)}; by config.json it must be"
            f" {tuple(room.shape)}"
        )
    room.copy_(tensor)


def _tell_stale(embedding: torch.Tensor, file: Path, key: str) -> None:
    """config.json decides: tied is tied, whatever else the file holds (decision 20)."""
    with _opened(file) as opened:
        head = _tensor(opened, file, key)
    if head.shape != embedding.shape or not torch.equal(head.to(embedding.dtype), embedding):
        log.warning(
            "%s holds '%s', which differs from the embeddings; config.json ties the two, so the"
            " embeddings are used",
            file,
            key,
        )


def _holders(folder: Path, config: DecoderConfig) -> dict[str, tuple[Path, str]]:
    """name → (file, key there) of every weight of the decoder that the folder holds.

    Complete for `config`. As in transformers, tied embeddings may be stored as the LM head.
    """
    holders: dict[str, tuple[Path, str]] = {}
    files, listed = _files(folder)
    for file in files:
        with _opened(file) as opened:
            keys = list(opened.keys())
        for key in keys:
            if (name := _name(key)) is None:
                continue
            if name in holders:
                other, known = holders[name]
                raise InvalidArgument(f"model: {file} holds '{key}', which is '{known}' of {other}")
            holders[name] = (file, key)
    if config.tied and EMBEDDING not in holders and LM_HEAD in holders:
        holders[EMBEDDING] = holders.pop(LM_HEAD)
    for name in config.weight_shapes:
        if name not in holders:
            untied = " (config.json does not tie it to the embeddings)" * (name == LM_HEAD)
            promised = (file for key, file in listed.items() if _name(key) == name)
            where = next(promised, files[0] if len(files) == 1 else folder)
            raise InvalidArgument(f"model: {where} lacks {name}{untied}")
    return holders


def _name(key: str) -> str | None:
    """A stored tensor's name without the layout's prefix; None if it is not the decoder's."""
    match = _NAME.match(key)
    return match[1] if match else None


def _files(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """The folder's weight files, found as transformers does, and what its index lists."""
    index = folder / INDEX
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"], {}
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise InvalidArgument(f"model: {folder} holds no .safetensors file")
        return files, {}
    try:
        listed = {
            str(key): folder / str(file)
            for key, file in json.loads(index.read_text())["weight_map"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidArgument(f"model: {index} cannot be read: {error!r}") from error
    return sorted(set(listed.values())), listed


def _opened(file: Path) -> Any:
    # Not mapped: a mapped file would count as memory beside the slab, and one that is cut short
    # while it is read would end the process.
    try:
        return safe_open(file, framework="pt", backend="pread")
    except (SafetensorError, OSError) as error:
        raise InvalidArgument(f"model: {file} cannot be read: {error}") from error


def _tensor(opened: Any, file: Path, key: str) -> torch.Tensor:
    try:
        tensor: torch.Tensor = opened.get_tensor(key)
    except (SafetensorError, OSError) as error:
        raise InvalidArgument(f"model: {file}: '{key}' cannot be read: {error}") from error
    return tensor
