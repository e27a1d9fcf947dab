"""Loading of the decoder's weights from a checkpoint folder, alone or inside a multimodal model.

Weights are recognized by their names without the layout's prefix, so all layouts can be loaded.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from vlora.adapters.model_shape import ModelShape, vision_path
from vlora.device.device import HOST, Device
from vlora.errors import InvalidArgument
from vlora.ids import MatrixId
from vlora.kernels.formats import Format
from vlora.kernels.quantize import quantize
from vlora.kernels.quantized import (
    QuantizedWeight,
    allocate,
    arrange,
    why_dynamic_is_slower,
)
from vlora.model.checkpoint import ReusedMemory, StoredRows, check, declared_weights, read
from vlora.model.decoder_config import DecoderConfig, lm_head_format, read_config
from vlora.model.folder_checks import check_weights
from vlora.model.quantized_checkpoint import Parts, read_quantized
from vlora.model.rotary import rope_frequencies
from vlora.model.weight_files import indexed_weight_files, open_weights, weight_files
from vlora.weights.quantized_slab import QuantizedSlab
from vlora.weights.slab import TARGETS, WeightSlab

logger = logging.getLogger(__name__)

# Ends of the paths of a vision tower's position embeddings, which no product multiplies.
POSITIONS = (".position_embedding", ".pos_embed")


@dataclass(frozen=True)
class DecoderWeights:
    """Weights of the decoder. The target matrices are in the slab; all others are separate tensors.

    All matrices have the same type: fp32, bf16, or on a GPU fp16. Those in the slab may instead be
    quantized, and so may the LM head. Norms and biases are fp32.

    embedding, lm_head: [vocabulary, hidden]. If they are tied, they are the same tensor, or a
        quantized LM head has the values of the embedding.
    norms: (layer, name) → [hidden], or [head_dim] for the norms of heads.
    biases: (layer, target) → [d_out].
    inverse_frequencies, rope_scale: [head_dim / 2] fp32 of the rotary embedding, and the factor of
        its cosines and sines.
    """

    slab: WeightSlab | QuantizedSlab
    embedding: torch.Tensor
    lm_head: torch.Tensor | QuantizedWeight
    final_norm: torch.Tensor
    norms: Mapping[tuple[int, str], torch.Tensor]
    biases: Mapping[tuple[int, str], torch.Tensor]
    inverse_frequencies: torch.Tensor
    rope_scale: float


def load_weights(
    folder: Path,
    config: DecoderConfig,
    dtype: torch.dtype = torch.float32,
    quantization: Format | None = None,
    device: Device = HOST,
) -> DecoderWeights:
    """Return the weights in the folder's safetensors files, with matrices as `dtype` on `device`.

    Each tensor is copied directly to its final location, so loading needs as much memory as the
    model and its largest tensor. Raises InvalidArgument, which names the file and the tensor.

    quantization: format of the target matrices; None to store them as `dtype`, too.
    """
    names = config.names
    check_weights(folder, config.quantization)
    stored = find_weights(folder, config, matrices=config.quantization is None, alone=False)
    slab: WeightSlab | QuantizedSlab
    if quantization is None:
        slab = WeightSlab(config.layers, config.target_shapes, dtype, device)
    else:
        slab = QuantizedSlab(config.layers, config.target_shapes, quantization, dtype)
        if quantization.dynamic and (reason := why_dynamic_is_slower(quantization, dtype)):
            faster = f"'quantization' = 'int{quantization.bits}'"
            logger.warning("%s would be faster on this CPU: %s", faster, reason)
    head = _quantized_head(config, quantization, dtype)
    tensors = _read_floats(config, stored, slab, head, dtype)
    if isinstance(slab, QuantizedSlab):
        if config.quantization is not None:
            read_quantized(quantized_parts(folder, config), config.quantization, slab)
        slab.arrange()
        head = None if head is None else arrange(head)
    frequencies, scale = rope_frequencies(read_config(folder).get_text_config())
    lm_head = tensors[names.embedding if config.tied else names.lm_head] if head is None else head
    norms, layers = (*names.norms, *names.head_norms), range(config.layers)
    return DecoderWeights(
        slab,
        tensors[names.embedding],
        lm_head,
        tensors[names.final_norm],
        norms={(layer, n): tensors[names.norm(layer, n)] for layer in layers for n in norms},
        biases={(n, t): tensors[names.bias(n, t)] for n in layers for t in config.biased},
        inverse_frequencies=frequencies,
        rope_scale=scale,
    )


def _read_floats(
    config: DecoderConfig,
    stored: Mapping[str, tuple[Path, str]],
    slab: WeightSlab | QuantizedSlab,
    head: QuantizedWeight | None,
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    names, device = config.names, slab.device
    targets: dict[str, torch.Tensor | QuantizedWeight] = {
        names.matrix(layer, target): slab.target(layer, target)
        for layer in range(config.layers)
        for target in TARGETS
    }
    if head is not None and not config.tied:
        targets[names.lm_head] = head
    tensors = {
        name: device.zeros(*shape, dtype=dtype)
        if len(shape) == 2
        else torch.empty(shape, device=device.torch_device)
        for name, shape in config.weight_shapes.items()
        if name not in targets
    }
    if config.quantization is not None:
        targets.clear()
    targets |= tensors
    by_file: dict[Path, list[tuple[str, str]]] = defaultdict(list)
    for name, (file, key) in stored.items():
        if name in targets:
            by_file[file].append((name, key))
    memory = ReusedMemory()
    for file, entries in by_file.items():
        declared = declared_weights(file)
        for name, key in entries:
            tensor = memory.read(file, key, declared[key])
            part = _part(tensor, name, names.stored(key))
            _store(targets[name], part, f"{file} holds '{key}'")
            if head is not None and config.tied and name == names.embedding:
                _store(head, part, f"{file} holds '{key}'")
    return tensors


def _quantized_head(
    config: DecoderConfig, quantization: Format | None, dtype: torch.dtype
) -> QuantizedWeight | None:
    form = lm_head_format(quantization, config)
    if form is None:
        return None
    shape = config.vocabulary, config.hidden
    return allocate(form, *shape, dtype, HOST.zeros(form.matrix_bytes(*shape), dtype=torch.uint8))


def adapter_shape(
    folder: Path, config: DecoderConfig, weights: DecoderWeights | None = None
) -> ModelShape:
    """Return the shapes that adapters of this checkpoint must fit.

    weights: the loaded weights. If they have no LM head of floats, an adapter's copy of the LM head
        is compared with the one in the folder.
    """

    def lm_head() -> torch.Tensor | StoredRows:
        if weights is None:
            return stored_lm_head(folder, config)
        head = weights.embedding if config.tied else weights.lm_head
        if isinstance(head, torch.Tensor):
            return head
        return stored_lm_head(folder, config, weights.embedding.dtype)

    return ModelShape(
        layers=config.layers,
        hidden=config.hidden,
        vocabulary=config.vocabulary,
        shapes=config.target_shapes,
        prefix=config.prefix,
        lm_head=cache(lm_head),
        vision=cache(lambda: _vision_shapes(folder)),
        modules=config.names.modules,
    )


def stored_lm_head(
    folder: Path, config: DecoderConfig, dtype: torch.dtype = torch.float32
) -> StoredRows:
    """Return the LM head in a folder, [vocabulary, hidden], whose rows are read as `dtype`. Raises
    InvalidArgument if it is missing.
    """
    names = config.names
    stored = find_weights(folder, config, matrices=config.quantization is None, alone=False)
    file, key = stored[names.embedding if config.tied else names.lm_head]
    return StoredRows(file, key, (config.vocabulary, config.hidden), dtype)


def read_weight(file: Path, key: str) -> torch.Tensor:
    """Return a stored weight in fp32. Raise InvalidArgument if it cannot be read."""
    with open_weights(file) as opened:
        return read(opened, file, key).to(torch.float32)


def _part(tensor: torch.Tensor, name: str, names: Sequence[str]) -> torch.Tensor:
    # The tensor contains the weights `names`, which have equal shapes.
    if len(names) == 1 or not tensor.ndim or len(tensor) % len(names):
        return tensor
    return tensor.chunk(len(names))[names.index(name)]


def _store(target: torch.Tensor | QuantizedWeight, tensor: torch.Tensor, origin: str) -> None:
    if isinstance(target, QuantizedWeight):
        check(target.shape, tensor.shape, tensor.dtype, origin)
        try:
            quantize(tensor, target)
        except ValueError as error:
            raise InvalidArgument(f"model: {origin}, which cannot be quantized: {error}") from error
    else:
        check(tuple(target.shape), tensor.shape, tensor.dtype, origin)
        target.copy_(tensor)


def _vision_shapes(folder: Path) -> dict[str, tuple[int, int]]:
    # By `vision_path`. The encoder checks that all but position tables belong to linear layers.
    shapes = {}
    for file in weight_files(folder):
        with open_weights(file) as opened:
            for key in opened.keys():  # noqa: SIM118
                path = vision_path(key.removesuffix(".weight"))
                if path is not None and key.endswith(".weight") and not path.endswith(POSITIONS):
                    shape = opened.get_slice(key).get_shape()
                    if len(shape) == 2:
                        shapes[path] = (int(shape[0]), int(shape[1]))
    return shapes


def find_weights(
    folder: Path, config: DecoderConfig, *, matrices: bool = True, alone: bool = True
) -> dict[str, tuple[Path, str]]:
    """Return (file, key) of every decoder weight in the folder, by name without prefix.

    As in transformers, tied embeddings may be stored as the LM head. Raises InvalidArgument if a
    weight is missing or is stored twice, or if matrices are needed but are stored quantized.

    matrices: whether the target matrices are needed.
    alone: whether to reject a stored tensor that contains several weights.
    """
    if alone and config.names.modules:
        limit = "this operation supports only checkpoints with one tensor per matrix"
        what = "stores several matrices of a layer in one tensor"
        raise InvalidArgument(f"model: {folder} {what}; {limit}")
    if matrices and config.quantization is not None:
        needed = "this operation needs weights stored as float32, float16 or bfloat16"
        method = config.quantization.method
        raise InvalidArgument(f"model: {folder} is quantized by {method}; {needed}")
    names = config.names
    locations: dict[str, tuple[Path, str]] = {}
    files, index = indexed_weight_files(folder)
    for file in files:
        with open_weights(file) as opened:
            keys = list(opened.keys())
        for key in keys:
            for name in names.stored(key):
                if name in locations:
                    first, first_key = locations[name]
                    same = f"the same weight as '{first_key}' in {first}"
                    raise InvalidArgument(f"model: {file} holds '{key}', {same}")
                locations[name] = (file, key)
    if config.tied and names.embedding not in locations and names.lm_head in locations:
        locations[names.embedding] = locations.pop(names.lm_head)
    targets = {names.matrix(n, target) for n in range(config.layers) for target in TARGETS}
    for name in config.weight_shapes:
        if name not in locations and (matrices or name not in targets):
            untied = " (config.json does not tie it to the embeddings)" * (name == names.lm_head)
            listed = (file for key, file in index.items() if name in names.stored(key))
            where = next(listed, files[0] if len(files) == 1 else folder)
            raise InvalidArgument(f"model: {where} lacks {name}{untied}")
    return locations


def quantized_parts(folder: Path, config: DecoderConfig) -> dict[MatrixId, Parts]:
    """Return functions that read each part of each quantized matrix, by the part's name.

    A part is valid until the same part of another matrix is read.
    """
    matrices = {
        config.names.matrix(layer, target): (layer, target)
        for layer in range(config.layers)
        for target in TARGETS
    }
    parts: dict[MatrixId, Parts] = {matrix: {} for matrix in matrices.values()}
    memories: dict[str, ReusedMemory] = defaultdict(ReusedMemory)
    for file in weight_files(folder):
        for key, declared in declared_weights(file).items():
            module, _, part = key.rpartition(".")
            matrix = matrices.get(config.names.without_prefix(f"{module}.weight") or "")
            if matrix is not None:
                parts[matrix][part] = partial(memories[part].read, file, key, declared)
    return parts
