"""Weights of GPTQ, AWQ and compressed-tensors checkpoints, repacked into the slab.

All three methods store scale · (value − zero), with a scale and a zero for each group of inputs.
They differ in which values they pack into a 32-bit word, and in the order of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from vlora.errors import InvalidArgument, in_one_line
from vlora.ids import MatrixId
from vlora.kernels.quantized import QuantizedWeight
from vlora.model.quantization_config import StoredQuantization
from vlora.weights.quantized_slab import QuantizedSlab
from vlora.weights.slab import GROUPS

# Functions that read the tensors of one quantized module, by the names of the tensors.
Parts = dict[str, Callable[[], torch.Tensor]]
# Position of each of 8 adjacent outputs in a 32-bit word of AWQ. Positions are counted in units of
# 4 bits from the lowest bits.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class StoredMatrix:
    """A quantized matrix: weight = scale · (value − zero).

    values: [d_out, d_in] int32, at least 0; or as in `QuantizedWeight.copy_values`.
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
                try:
                    matrix = _READERS[stored.method](parts[layer, target], stored, where)
                    orders.append(_store(matrix, stored, slab.target(layer, target), where))
                except (IndexError, RuntimeError, TypeError, ValueError) as error:
                    raise InvalidArgument(
                        f"{where}: its tensors do not fit each other: {in_one_line(error)}"
                    ) from error
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


def pack_words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return unsigned integers [rows, n] as rows of 32-bit words, the inverse of `unpack`."""
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % (32 // bits))).to(torch.uint8)
    if bits == 4:
        values = values[:, ::2] | values[:, 1::2] << 4
    return values.contiguous().view(torch.int32)


def _gptq(parts: Parts, stored: StoredQuantization, where: str) -> StoredMatrix:
    """Return a matrix [in, out], with weights packed along inputs and zeros along outputs."""
    values = unpack(_part(parts, "qweight", torch.int32, where).T, stored.bits)
    # The writers subtract the offset from whole words, so that a zero of 0 borrows from the next.
    # Adding it to whole words, modulo 2³², restores both.
    ones = stored.zero_offset * sum(1 << shift for shift in range(0, 32, stored.bits))
    zeros = unpack(_part(parts, "qzeros", torch.int32, where) + ones, stored.bits).T
    scales = _part(parts, "scales", None, where).T
    groups = _part(parts, "g_idx", torch.int32, where, (1,)) if "g_idx" in parts else None
    return StoredMatrix(values, scales, zeros, groups)


def _awq(parts: Parts, stored: StoredQuantization, where: str) -> StoredMatrix:
    """Return a matrix [in, out], packed along outputs in AWQ_ORDER."""

    def ordered(name: str) -> torch.Tensor:
        packed = unpack(_part(parts, name, torch.int32, where), 4)
        return packed.view(len(packed), -1, 8)[:, :, list(AWQ_ORDER)].reshape(len(packed), -1).T

    values, scales = ordered("qweight"), _part(parts, "scales", None, where).T
    return StoredMatrix(values, scales, ordered("qzeros"))


def _compressed(parts: Parts, stored: StoredQuantization, where: str) -> StoredMatrix:
    """Return a matrix of signed weights, packed along inputs, with zeros along outputs."""
    scales = _part(parts, "weight_scale", None, where, (0, 1, 2))
    middle = 2 ** (stored.bits - 1)
    groups = None
    if "weight_g_idx" in parts:
        groups = _part(parts, "weight_g_idx", torch.int32, where, (1,))
    if "weight_packed" not in parts:
        values = _part(parts, "weight", torch.int8, where)
        if stored.bits == 4 or groups is not None:
            values = values.int() + middle
            if stored.bits == 4 and (values & ~15).any():
                raise ValueError("'weight' has integers beyond -8 to 7")
        else:
            values = values.view(torch.uint8)
    else:
        values = _part(parts, "weight_packed", torch.int32, where)
        if groups is not None:
            values = unpack(values, stored.bits)
        else:
            # The bytes need no unpacking. Those of 8 bits have no sign yet.
            values = values.view(torch.uint8)
            values = values if stored.bits == 4 else values.bitwise_xor_(middle)
    if scales.ndim < 2 or len(scales) == 1:  # There is one scale for all outputs.
        scales = scales.reshape(1, 1).expand(len(values), 1)
    if stored.form.zeros:
        zeros = unpack(_part(parts, "weight_zero_point", torch.int32, where).T, 4).T[: len(values)]
    else:
        zeros = torch.full(scales.shape, middle, dtype=torch.int32)
    return StoredMatrix(values, scales, zeros, groups)


_READERS: Mapping[str, Callable[[Parts, StoredQuantization, str], StoredMatrix]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
}


def _store(
    matrix: StoredMatrix, stored: StoredQuantization, target: QuantizedWeight, where: str
) -> torch.Tensor | None:
    """Write a matrix to the slab. Return the order of its inputs there."""
    depth = target.shape[1]
    group = stored.group or depth
    in_bytes = matrix.values.dtype == torch.uint8
    per_column = 8 // stored.bits if in_bytes else 1
    values = matrix.values[:, : -(-depth // per_column)]
    columns = min(values.shape[1] * per_column, depth)
    _check_shapes(matrix, (len(values), columns), target.shape, -(-depth // group), where)
    middle = 2 ** (stored.bits - 1)
    if not target.format.zeros and not (matrix.zeros == middle).all():
        raise InvalidArgument(
            f"{where}: some zeros are not {middle}; this is supported only for 4 bits and with"
            " 'sym': false in config.json"
        )
    # A large group in the files is split into several groups in the slab. The last one may have
    # fewer inputs, so it may be split into fewer.
    of_group = torch.arange(0, depth, target.format.group or depth) // group
    scales, zeros = matrix.scales.float(), matrix.zeros
    if len(of_group) > scales.shape[1]:
        scales, zeros = scales[:, of_group], zeros[:, of_group]
    if in_bytes:
        target.copy_values(values)
        target.fill(None, scales, zeros)
        return None
    groups = matrix.input_groups
    order = None if groups is None else _order(groups, depth, group, where)
    if order is not None:
        values = values[:, order]
    target.fill(values - middle if target.format.bits == 8 else values, scales, zeros)
    return order


def _check_shapes(
    matrix: StoredMatrix,
    values: tuple[int, int],
    expected: tuple[int, int],
    groups: int,
    where: str,
) -> None:
    for name, shape, must in (
        ("weights", values, expected),
        ("scales", tuple(matrix.scales.shape), (expected[0], groups)),
        ("zeros", tuple(matrix.zeros.shape), (expected[0], groups)),
    ):
        if shape != must:
            raise InvalidArgument(
                f"{where}: {name} of shape {shape}; by config.json it must be {must}"
            )


def _order(input_groups: torch.Tensor, depth: int, group: int, where: str) -> torch.Tensor | None:
    """Return the inputs sorted by group; None if they are sorted already."""
    if len(input_groups) != depth:
        raise InvalidArgument(
            f"{where}: 'g_idx' has {len(input_groups)} inputs; by config.json it must have {depth}"
        )
    adjacent = torch.arange(depth, dtype=input_groups.dtype) // group
    if torch.equal(input_groups, adjacent) or (input_groups == -1).all():
        return None
    order = input_groups.argsort(stable=True)
    if not torch.equal(input_groups[order], adjacent):
        raise InvalidArgument(
            f"{where}: 'g_idx' must have each of {-(-depth // group)} groups {group} times"
        )
    return order


def _part(
    parts: Parts, name: str, dtype: torch.dtype | None, where: str, axes: tuple[int, ...] = (2,)
) -> torch.Tensor:
    if name not in parts:
        raise InvalidArgument(f"{where}: '{name}' is missing; the files hold {sorted(parts)}")
    tensor = parts[name]()
    fits = tensor.is_floating_point() if dtype is None else tensor.dtype == dtype
    if not fits:
        raise InvalidArgument(f"{where}: '{name}' is {tensor.dtype}; it must be {dtype or 'float'}")
    if tensor.ndim not in axes:
        shape, count = tuple(tensor.shape), axes[-1]
        raise InvalidArgument(f"{where}: '{name}' has shape {shape}; it must have {count} axes")
    return tensor
