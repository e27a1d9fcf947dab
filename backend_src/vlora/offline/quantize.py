"""Quantization of a checkpoint folder, in a layout that vLLM and transformers read, too.

It is `pack-quantized` of compressed-tensors, also for 8 bits, but `int-quantized` for 8 bits with
quantized activations: vLLM expects so. Matrices are read and written one by one.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import torch

from vlora.atomic_file import new_folder
from vlora.errors import InvalidArgument
from vlora.kernels.formats import Format
from vlora.kernels.quantize import quantize
from vlora.kernels.quantized import SYMMETRIC_ZERO, ZERO_STEPS, allocate, in_order
from vlora.model.checkpoint import check, read
from vlora.model.decoder_config import DecoderConfig
from vlora.model.folder_checks import CONFIG, TOWER, read_object
from vlora.model.loader import find_weights
from vlora.model.quantized_checkpoint import pack_words
from vlora.model.weight_files import INDEX, PICKLES, open_weights, weight_files
from vlora.weights.safetensors import FLOATS, read_header
from vlora.weights.slab import TARGETS

COPIED_AT_ONCE = 1 << 26  # Number of bytes of an unchanged tensor in memory.
Entry = dict[str, Any]  # A tensor in the header of a safetensors file.
Shapes = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class WeightFile:
    """A weight file and its quantized copy.

    matrices: shapes of the matrices to quantize, by key.
    stored, planned: tensors in the headers of the file and of its copy, by key.
    start: number of bytes before the first tensor of the file.
    metadata: of both files.
    """

    path: Path
    matrices: Shapes
    stored: dict[str, Entry]
    planned: dict[str, Entry]
    start: int
    metadata: dict[str, str] | None

    @classmethod
    def plan(cls, path: Path, matrices: Shapes, form: Format) -> WeightFile:
        """Return the plan for a valid file. Raise InvalidArgument for a matrix of another shape."""
        with path.open("rb") as opened:
            header = read_header(opened)
        stored = json.loads(header[8:])
        metadata = stored.pop("__metadata__", None)
        tensors: dict[str, Entry] = {}
        for key, entry in stored.items():
            if key in matrices:
                dtype = FLOATS.get(entry["dtype"], entry["dtype"])
                check(matrices[key], tuple(entry["shape"]), dtype, f"{path} holds '{key}'")
                tensors |= _planned_parts(key, entry["dtype"], matrices[key], form)
            else:
                tensors[key] = entry
        planned, end = {}, 0
        # Larger types come first, so that each tensor is aligned to its type.
        for key, entry in sorted(tensors.items(), key=lambda item: -_item_bytes(item[1])):
            planned[key] = entry | {"data_offsets": [end, end + _bytes(entry)]}
            end += _bytes(entry)
        return cls(path, matrices, stored, planned, len(header), metadata)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the copy's tensors."""
        return sum(map(_bytes, self.planned.values()))

    def write(self, target: Path, form: Format, progress: Callable[[str], None]) -> None:
        """Write the copy. `progress` is called with the key of each matrix."""
        header = json.dumps(
            ({"__metadata__": self.metadata} if self.metadata else {}) | self.planned
        ).encode()
        header += b" " * (-len(header) % 8)
        with (
            open_weights(self.path) as opened,
            self.path.open("rb") as source,
            target.open("wb") as written,
        ):
            written.write(len(header).to_bytes(8, "little") + header)
            first = written.tell()
            for key, entry in self.stored.items():
                if key not in self.matrices:
                    source.seek(self.start + entry["data_offsets"][0])
                    written.seek(first + self.planned[key]["data_offsets"][0])
                    _copy(source, written, _bytes(entry), f"{self.path}: '{key}'")
                    continue
                progress(key)
                parts = self._quantized(read(opened, self.path, key), key, form)
                for name, part in parts.items():
                    written.seek(first + self.planned[name]["data_offsets"][0])
                    written.write(part.view(torch.uint8).numpy().data)

    def _quantized(self, weight: torch.Tensor, key: str, form: Format) -> dict[str, torch.Tensor]:
        try:
            parts = quantized_parts(weight, form)
        except ValueError as error:
            raise InvalidArgument(
                f"model: {self.path} holds '{key}', which cannot be quantized: {error}"
            ) from error
        return {f"{key.removesuffix('weight')}{name}": part for name, part in parts.items()}


def quantize_folder(
    source: Path,
    out: Path,
    config: DecoderConfig,
    form: Format,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[int, int]:
    """Write the checkpoint in `source`, with the decoder's linear layers quantized, to the new
    folder `out`. Return the sizes of the weights before and after, in bytes.

    form: int4, or int8 with one scale for each output. If it is dynamic, the copy's description
        quantizes activations, too. vLLM and transformers then read no zeros.
    progress: called with a description of each step.

    Raises InvalidArgument if `out` exists or is in `source`, if the disk is too small, or if the
    checkpoint is quantized already or cannot be quantized.
    """
    if out.resolve().is_relative_to(source.resolve()):
        raise InvalidArgument(f"{out} is in {source}; name a folder outside of it")
    matrices = _matrices(source, config, form)
    files = [WeightFile.plan(file, matrices.get(file, {}), form) for file in weight_files(source)]
    before, after = sum(f.path.stat().st_size for f in files), sum(f.nbytes for f in files)
    _check_space(out, after)
    with new_folder(out) as part:
        others = shutil.ignore_patterns("*.safetensors", *PICKLES, INDEX, ".git", ".cache")
        shutil.copytree(source, part, ignore=others, dirs_exist_ok=True)
        numbers, total = count(1), sum(map(len, matrices.values()))
        for file in files:
            file.write(
                part / file.path.name,
                form,
                lambda key: progress(f"matrix {next(numbers)} of {total}: {key}"),
            )
        config_json = read_object(source / CONFIG) | {"quantization_config": description(form)}
        _write_json(part / CONFIG, config_json)
        if [file.path.name for file in files] != ["model.safetensors"]:
            keys = {key: file.path.name for file in files for key in file.planned}
            _write_json(part / INDEX, {"metadata": {"total_size": after}, "weight_map": keys})
    return before, after


def description(form: Format) -> dict[str, Any]:
    """Return the value of `quantization_config` in `config.json`."""
    activations = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }
    layout = "int-quantized" if _in_bytes(form) else "pack-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        # If transformers dequantizes weights at load, it does not quantize activations.
        "dequantize": not form.dynamic,
        # All linear layers outside of the decoder, whatever a program calls the decoder.
        "ignore": ["re:.*lm_head", f"re:.*{TOWER.pattern}"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                # compressed-tensors would guess another one for 4 bits with activations.
                "format": layout,
                "input_activations": activations if form.dynamic else None,
                "output_activations": None,
                "weights": {
                    "num_bits": form.bits,
                    "type": "int",
                    "symmetric": not form.zeros,
                    "strategy": "group" if form.group else "channel",
                    "group_size": form.group,
                    "dynamic": False,
                },
            }
        },
    }


def quantized_parts(weight: torch.Tensor, form: Format) -> dict[str, torch.Tensor]:
    """Return the tensors that are stored for a matrix [d_out, d_in], by the last parts of their
    names. Raises ValueError as `quantize`.

    Scales have the type of the weight, as in published checkpoints, but at most 32 bits. Their
    rounding is small beside that of the weights.
    """
    rows, depth = weight.shape
    matrix = allocate(form, rows, depth, torch.float32)
    quantize(weight, matrix, whole_zeros=True)
    groups = depth // (form.group or depth)
    scales = matrix.scales[:, :groups].to(min(weight.dtype, torch.float32, key=_size))
    parts = {"weight_scale": scales}
    if _in_bytes(form):
        parts["weight"] = matrix.values[:, :depth].view(torch.int8)
    else:
        packed = in_order(matrix.values) if form.bits == 4 else matrix.values ^ 128
        words = packed[:, : -(-depth * form.bits // 32) * 4].view(torch.int32)
        parts |= {"weight_packed": words, "weight_shape": torch.tensor(weight.shape)}
    if matrix.zeros is not None:
        zeros = SYMMETRIC_ZERO + matrix.zeros[:, :groups].int() // ZERO_STEPS
        parts["weight_zero_point"] = pack_words(zeros.T, form.bits).T
    return {name: part.contiguous() for name, part in parts.items()}


def _in_bytes(form: Format) -> bool:
    """Return whether the weights are stored in bytes, not packed into words."""
    return form.bits == 8 and form.dynamic


def _size(dtype: torch.dtype) -> int:
    return dtype.itemsize


def _planned_parts(key: str, dtype: str, shape: tuple[int, int], form: Format) -> dict[str, Entry]:
    """Return the entries of `quantized_parts` in a header, with offsets from 0."""
    rows, depth = shape
    groups, per_word = depth // (form.group or depth), 32 // form.bits
    scale = "F32" if dtype == "F64" else dtype
    parts = {"weight_scale": (scale, [rows, groups], FLOATS[scale].itemsize)}
    if _in_bytes(form):
        parts["weight"] = ("I8", [rows, depth], 1)
    else:
        parts["weight_packed"] = ("I32", [rows, -(-depth // per_word)], 4)
        parts["weight_shape"] = ("I64", [2], 8)
    if form.zeros:
        parts["weight_zero_point"] = ("I32", [-(-rows // per_word), groups], 4)
    return {
        f"{key.removesuffix('weight')}{name}": {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [0, math.prod(shape) * size],
        }
        for name, (dtype, shape, size) in parts.items()
    }


def _matrices(source: Path, config: DecoderConfig, form: Format) -> dict[Path, Shapes]:
    """Return the shapes of the matrices to quantize, by file and key."""
    places = find_weights(source, config)
    matrices: dict[Path, Shapes] = defaultdict(dict)
    for target in TARGETS:
        shape = config.target_shapes[target]
        if form.group and shape[1] % form.group:
            raise InvalidArgument(
                f"model: {source}: {target} has {shape[1]} inputs, which is not a multiple of the"
                f" group size {form.group}; use a smaller group size, or int8"
            )
        for layer in range(config.layers):
            file, key = places[config.names.matrix(layer, target)]
            matrices[file][key] = shape
    return matrices


def _check_space(out: Path, needed: int) -> None:
    folder = next(parent for parent in out.absolute().parents if parent.is_dir())
    if (free := shutil.disk_usage(folder).free) < needed:
        raise InvalidArgument(
            f"{out} needs {needed / 1e9:.3f} GB, but the disk has {free / 1e9:.3f} GB free"
        )


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _copy(source: BinaryIO, written: BinaryIO, left: int, what: str) -> None:
    while left:
        piece = source.read(min(left, COPIED_AT_ONCE))
        if not piece:
            raise InvalidArgument(f"model: {what} cannot be read: the file ends early")
        written.write(piece)
        left -= len(piece)


def _bytes(entry: Entry) -> int:
    first, last = entry["data_offsets"]
    return int(last - first)


def _item_bytes(entry: Entry) -> int:
    return _bytes(entry) // max(1, math.prod(entry["shape"]))
