"""Weights of GPTQ, AWQ and compressed-tensors checkpoints, repacked into the slab.

All three methods store scale · (value − zero), with a scale and a zero for each group of inputs.
They differ in which values they pack into a 32-bit word, and in the order of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vlora.errors import InvalidArgument
from vlora.ids import MatrixId
from vlora.kernels.quantized import GROUPS as GROUP_SIZES
from vlora.kernels.quantized import Format, QuantizedWeight
from vlora.weights.quantized_slab import QuantizedSlab
from vlora.weights.slab import GROUPS

# Supported values of `quant_method`, each with the variants that are supported.
METHODS = {
    "gptq": "gptq (4 and 8 bits)",
    "awq": "awq (4 bits, version 'gemm')",
    "compressed-tensors": "compressed-tensors (pack-quantized with 4 bits, int-quantized with 8)",
}

# Alternatives to some unsupported methods, which are appended to the error message.
INSTEAD = {
    "bitsandbytes": "; NF4 and LLM.int8() have no integer weights: serve the checkpoint that it was"
    " made from with 'quantization': 'int4' or 'int8'",
    "fp8": "; serve the checkpoint that it was made from with 'quantization': 'int8'",
}


@dataclass(frozen=True)
class StoredQuantization:
    """Layout of a checkpoint's quantized matrices.

    method: a key of METHODS.
    bits: 4 or 8.
    group: number of inputs that share a scale in the files; None if all inputs of an output do.
    form: format in memory. A larger group in the files is split into several of at most 128 inputs.
    zero_offset: number to add to stored zeros: 1 for GPTQ before its version 2, else 0.
    """

    method: str
    bits: int
    group: int | None
    form: Format
    zero_offset: int = 0


def stored_quantization(description: Mapping[str, Any] | None) -> StoredQuantization | None:
    """Return the quantization that a checkpoint's `quantization_config` describes; None for none.

    Raises InvalidArgument for anything that is not supported.
    """
    if not description:
        return None
    method = str(description.get("quant_method") or "unknown")
    if method not in METHODS:
        raise InvalidArgument(
            f"config.json has a 'quantization_config' of method '{method}'; supported:"
            f" {', '.join(METHODS.values())}{INSTEAD.get(method, '')}"
        )
    if method == "compressed-tensors":
        return _compressed_description(description)
    bits, group = _integer(description, "bits"), _group(description.get("group_size", 128))
    if description.get("lm_head"):
        raise _unsupported("a quantized LM head", "'lm_head': false")
    if method == "awq":
        version = str(description.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm":
            raise _unsupported(f"awq with {bits} bits, version '{version}'", METHODS["awq"])
        return StoredQuantization(method, 4, group, _format(4, group, zeros=True))
    version = str(description.get("checkpoint_format", "gptq")).lower()
    if bits not in (4, 8) or version not in ("gptq", "gptq_v2"):
        raise _unsupported(
            f"gptq with {bits} bits, 'checkpoint_format' '{version}'",
            "4 or 8 bits in 'gptq' or 'gptq_v2'",
        )
    form = _format(bits, group, zeros=bits == 4 and not description.get("sym", False))
    return StoredQuantization(method, bits, group, form, int(version == "gptq"))


def _compressed_description(description: Mapping[str, Any]) -> StoredQuantization:
    layout = description.get("format")
    groups = description.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise _unsupported("'config_groups' with other than one entry", "one entry")
    (scheme,) = groups.values()
    if scheme.get("input_activations") is not None:
        raise _unsupported("'input_activations'", "none: weights alone are quantized")
    weights = scheme.get("weights") or {}
    bits, kind = _integer(weights, "num_bits"), weights.get("type")
    if (layout, bits, kind) not in (("pack-quantized", 4, "int"), ("int-quantized", 8, "int")):
        raise _unsupported(
            f"compressed-tensors format '{layout}' with {bits} bits of type '{kind}'",
            METHODS["compressed-tensors"],
        )
    if bits == 8 and not weights.get("symmetric", True):
        raise _unsupported("'symmetric': false with 8 bits", "symmetric weights, or 4 bits")
    strategy = weights.get("strategy")
    if strategy not in ("tensor", "channel", "group"):
        raise _unsupported(f"'strategy' '{strategy}'", "tensor, channel or group")
    group = _group(weights.get("group_size")) if strategy == "group" else None
    form = _format(bits, group, zeros=not weights.get("symmetric", True))
    return StoredQuantization("compressed-tensors", bits, group, form)


def _format(bits: int, group: int | None, *, zeros: bool) -> Format:
    """Return the format that represents the weights of the files exactly."""
    if group is None:
        return Format(bits, None if bits == 8 else max(GROUP_SIZES), zeros)
    return Format(bits, max(size for size in GROUP_SIZES if group % size == 0), zeros)


def _group(size: Any) -> int | None:
    if size in (-1, None):
        return None
    if not isinstance(size, int) or size <= 0 or size % min(GROUP_SIZES):
        raise _unsupported(f"'group_size' {size!r}", f"-1 or a multiple of {min(GROUP_SIZES)}")
    return size


def _integer(description: Mapping[str, Any], key: str) -> int:
    value = description.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _unsupported(f"'{key}' {value!r}", "a number")
    return value


def _unsupported(what: str, valid: str) -> InvalidArgument:
    return InvalidArgument(
        f"config.json has a 'quantization_config' with {what}, which is not supported; supported:"
        f" {valid}"
    )


# Functions that read the tensors of one quantized module, by the names of the tensors.
Parts = dict[str, Callable[[], torch.Tensor]]
# Position of each of 8 adjacent outputs in a 32-bit word of AWQ. Positions are counted in units of
# 4 bits from the lowest bits.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class UnpackedMatrix:
    """A quantized matrix, unpacked to integers: weight = scale · (value − zero).

    values: [d_out, d_in] int32, at least 0.
    scales: [d_out, groups].
    zeros: [d_out, groups] int32.
    input_groups: [d_in] group of each input; None if groups consist of adjacent inputs.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    input_groups: torch.Tensor | None = None


def read_quantized(
    parts: Mapping[MatrixId, Parts], stored: StoredQuantization, slab: QuantizedSlab
) -> None:
    """Read all matrices into the slab.

    Raises InvalidArgument, which names the matrix, for a tensor that is missing or does not fit.
    """
    for layer in range(slab.layers):
        for number, group in enumerate(GROUPS):
            orders: list[torch.Tensor | None] = []
            for target in group:
                where = f"model: layer {layer}, {target}"
                matrix = _READERS[stored.method](parts[layer, target], stored, where)
                orders.append(_store(matrix, stored, slab.target(layer, target), where))
            known = [order for order in orders if order is not None]
            if not known:
                continue
            if len(known) < len(orders) or not all(torch.equal(o, known[0]) for o in known):
                raise InvalidArgument(
                    f"model: layer {layer}: {', '.join(group)} have different 'g_idx'; these must"
                    " be equal, because the matrices have the same input"
                )
            slab.set_order(layer, number, known[0])


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the unsigned integers in rows of 32-bit words, lowest bits first.

    packed: [rows, n] int32. Returns [rows, n · 32 / bits] int32.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values: torch.Tensor = (packed[:, :, None] >> shifts) & (2**bits - 1)
    return values.reshape(len(packed), -1)


def _gptq(parts: Parts, stored: StoredQuantization, where: str) -> UnpackedMatrix:
    """Return a matrix [in, out], with weights packed along inputs and zeros along outputs."""
    values = unpack(_part(parts, "qweight", torch.int32, where).T, stored.bits)
    # The writers subtract the offset from whole words, so that a zero of 0 borrows from the next.
    # Adding it to whole words, modulo 2³², restores both.
    ones = stored.zero_offset * sum(1 << shift for shift in range(0, 32, stored.bits))
    zeros = unpack(_part(parts, "qzeros", torch.int32, where) + ones, stored.bits).T
    scales = _part(parts, "scales", None, where).T
    groups = _part(parts, "g_idx", torch.int32, where) if "g_idx" in parts else None
    return UnpackedMatrix(values, scales, zeros, groups)


def _awq(parts: Parts, stored: StoredQuantization, where: str) -> UnpackedMatrix:
    """Return a matrix [in, out], packed along outputs in AWQ_ORDER."""

    def ordered(name: str) -> torch.Tensor:
        packed = unpack(_part(parts, name, torch.int32, where), 4)
        return packed.view(len(packed), -1, 8)[:, :, list(AWQ_ORDER)].reshape(len(packed), -1).T

    values, scales = ordered("qweight"), _part(parts, "scales", None, where).T
    return UnpackedMatrix(values, scales, ordered("qzeros"))


def _compressed(parts: Parts, stored: StoredQuantization, where: str) -> UnpackedMatrix:
    """Return a matrix of signed weights, packed along inputs, with zeros along outputs."""
    scales = _part(parts, "weight_scale", None, where)
    middle = 2 ** (stored.bits - 1)
    if stored.bits == 8:
        values = _part(parts, "weight", torch.int8, where).int() + middle
    else:
        values = unpack(_part(parts, "weight_packed", torch.int32, where), 4)
    if scales.ndim < 2 or len(scales) == 1:  # There is one scale for all outputs.
        scales = scales.reshape(1, 1).expand(len(values), 1)
    zeros = torch.full(scales.shape, middle, dtype=torch.int32)
    if stored.form.zeros:
        zeros = unpack(_part(parts, "weight_zero_point", torch.int32, where).T, 4).T[: len(values)]
    groups = _part(parts, "weight_g_idx", torch.int32, where) if "weight_g_idx" in parts else None
    return UnpackedMatrix(values, scales, zeros, groups)


_READERS: Mapping[str, Callable[[Parts, StoredQuantization, str], UnpackedMatrix]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
}


def _store(
    matrix: UnpackedMatrix, stored: StoredQuantization, target: QuantizedWeight, where: str
) -> torch.Tensor | None:
    """Write a matrix to the slab. Return the order of its inputs there."""
    rows, depth = target.shape
    group = stored.group or depth
    groups = -(-depth // group)
    values = matrix.values[:, :depth]
    for name, tensor, shape in (
        ("weights", values, (rows, depth)),
        ("scales", matrix.scales, (rows, groups)),
        ("zeros", matrix.zeros, (rows, groups)),
    ):
        if tensor.shape != shape:
            raise InvalidArgument(
                f"{where}: {name} of shape {tuple(tensor.shape)}; by config.json it must be {shape}"
            )
    order = None if matrix.input_groups is None else _order(matrix.input_groups, group, where)
    if order is not None:
        values = values[:, order]
    middle = 2 ** (stored.bits - 1)
    if not target.format.zeros and not (matrix.zeros == middle).all():
        raise InvalidArgument(
            f"{where}: some zeros are not {middle}; this is supported only for 4 bits and with"
            " 'sym': false in config.json"
        )
    if target.format.bits == 8:
        values = values - middle
    # A large group in the files is split into several groups in the slab. The last one may have
    # fewer inputs, so it may be split into fewer.
    of_group = torch.arange(0, depth, target.format.group or depth) // group
    target.fill(values, matrix.scales.float()[:, of_group], matrix.zeros[:, of_group])
    return order


def _order(input_groups: torch.Tensor, group: int, where: str) -> torch.Tensor | None:
    """Return the inputs sorted by group; None if they are sorted already."""
    depth = len(input_groups)
    adjacent = torch.arange(depth, dtype=input_groups.dtype) // group
    if torch.equal(input_groups, adjacent) or (input_groups == -1).all():
        return None
    order = input_groups.argsort(stable=True)
    if not torch.equal(input_groups[order], adjacent):
        raise InvalidArgument(
            f"{where}: 'g_idx' must have each of {-(-depth // group)} groups {group} times"
        )
    return order


def _part(parts: Parts, name: str, dtype: torch.dtype | None, where: str) -> torch.Tensor:
    if name not in parts:
        raise InvalidArgument(f"{where}: '{name}' is missing; the files hold {sorted(parts)}")
    tensor = parts[name]()
    fits = tensor.is_floating_point() if dtype is None else tensor.dtype == dtype
    if not fits:
        raise InvalidArgument(f"{where}: '{name}' is {tensor.dtype}; it must be {dtype or 'float'}")
    return tensor
