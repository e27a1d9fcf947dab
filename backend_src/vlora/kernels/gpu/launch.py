"""Launchers of the GPU kernels of the layers, whose callers check the shapes.

Rows, keys and values are fp32, fp16 or bf16. `hidden` and norm weights are fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from vlora.kernels.gpu import attention, rows

MAX_COLUMNS = 1024  # Maximum number of columns of a row per program of the gate and the embedding.
HEADS_PER_PROGRAM = 4  # Number of heads per program of the rotary kernel.
MIN_DOT = 16  # Minimum size of each dimension of a product on tensor cores.
# Number of rows per tile of the prefill kernel, by bytes per element of the keys. Products in fp32
# use no tensor cores, and both operands are in registers, so tiles are smaller.
PREFILL_ROWS = {4: 16, 2: 64}
# Number of positions per iteration of the attention kernels, by bytes per element.
DECODE_TILE = {4: 16, 2: 64}
PREFILL_TILE = {4: 16, 2: 64}
# Number of positions per iteration of the prefill kernel where it masks, by bytes per element. The
# values there pass through registers, in which 64 positions take too much space.
MASKED_TILE = {4: 16, 2: 32}
# Number of warps per program of the prefill kernel, by bytes per element of the keys. With 4 warps
# in 16 bits, version 3.6 of the package `triton` spills registers for sm_80.
PREFILL_WARPS = {4: 4, 2: 8}
# Number of warps per program of the decode kernel, by bytes per element of the keys. With 4 warps,
# the fp32 kernel spills registers.
DECODE_WARPS = {4: 8, 2: 4}
LOG2_E = math.log2(math.e)


def add_norm(
    out: torch.Tensor,
    hidden: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
) -> None:
    """Compute `ops.add_norm`, with the result in `out`."""
    count, width = hidden.shape
    if count:
        columns = triton.next_power_of_2(width)
        rows.add_norm_kernel[(count,)](
            out,
            hidden,
            hidden if delta is None else delta,
            weight,
            eps,
            width,
            HAS_DELTA=delta is not None,
            COLUMNS=columns,
            num_warps=min(max(columns // 512, 1), 16),
        )


def head_norm(
    qkv: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
) -> None:
    """Compute `ops.head_norm`."""
    dim = len(query_weight)
    if len(qkv):
        rows.head_norm_kernel[(len(qkv), heads + kv_heads)](
            qkv,
            query_weight,
            key_weight,
            eps,
            qkv.stride(0),
            heads,
            dim,
            COLUMNS=triton.next_power_of_2(dim),
            num_warps=1,
        )


def gate(out: torch.Tensor, x: torch.Tensor) -> None:
    """Compute `ops.gate`, with the result in `out`."""
    count, width = out.shape
    if count:
        columns = min(triton.next_power_of_2(width), MAX_COLUMNS)
        grid = (count, triton.cdiv(width, columns))
        rows.gate_kernel[grid](out, x, width, COLUMNS=columns)


def embed(
    out: torch.Tensor,
    tokens: torch.Tensor,
    table: torch.Tensor,
    feature_rows: torch.Tensor | None,
    features: torch.Tensor | None,
) -> None:
    """Write the embedding of each token, or the image feature that replaces it, to `out`.

    feature_rows: [T], row of `features`, or negative for a token; None without images.
    """
    count, width = out.shape
    if count:
        columns = min(triton.next_power_of_2(width), MAX_COLUMNS)
        rows.embed_kernel[(count, triton.cdiv(width, columns))](
            out,
            tokens,
            table,
            tokens if feature_rows is None else feature_rows,
            out if features is None else features,
            len(table),
            width,
            HAS_IMAGES=features is not None,
            COLUMNS=columns,
        )


def rotate(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    slots: torch.Tensor,
    heads: int,
    dim: int,
) -> None:
    """Rotate the queries in place, and write the rotated keys and the values to their pages.

    qkv: [T, (heads + 2 · kv heads) · dim].
    keys, values: [pages, kv heads, tokens per page, ≥ dim].
    slots: [T], page · tokens per page + position in the page; a negative one writes nothing.
    """
    _, kv_heads, page, _ = keys.shape
    if len(qkv):
        rows.rotate_kernel[(len(qkv), triton.cdiv(heads + 2 * kv_heads, HEADS_PER_PROGRAM))](
            qkv,
            keys,
            values,
            cosines,
            sines,
            slots,
            qkv.stride(0),
            *keys.stride()[:3],
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            PAGE=page,
            GROUP=HEADS_PER_PROGRAM,
            COLUMNS=triton.next_power_of_2(dim // 2),
            num_warps=2,
        )


@dataclass(frozen=True)
class DecodeRows:
    """The decode rows of a step, which are its chunks of one row, and their contexts.

    rows, ends: [n] row of the step, and number of positions; 0 for a padding row.
    tables: [n, pages], pages of each row's context.
    counters: [n · kv heads], zeros between launches; not read if contexts are not split.
    splits: number of parts into which each context is divided.
    """

    rows: torch.Tensor
    ends: torch.Tensor
    tables: torch.Tensor
    counters: torch.Tensor
    splits: int


@dataclass(frozen=True)
class Rotation:
    """Norms and rotation that `decode` applies to the rows of the query, key and value projections.

    cosines, sines: [T, dim / 2] fp32.
    norms: weights of the RMS norms of query and key heads, [dim] fp32, and eps; or None.
    """

    cosines: torch.Tensor
    sines: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None


def decode(
    out: torch.Tensor,
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    contexts: DecodeRows,
    heads: int,
    dim: int,
    rotation: Rotation | None = None,
) -> None:
    """Write the attention of the rows in `contexts` to `out`, [T, heads · dim].

    rotation: None if the queries are rotated and the pages are written. Otherwise the kernel
        rotates the rows, which stay unchanged, and writes to the pages.
    """
    kv_heads, page = keys.shape[1:3]
    group, count, splits = heads // kv_heads, len(contexts.rows), contexts.splits
    if not count:
        return
    partial, log_sums = out, out
    if splits > 1:
        partial = torch.empty(count, heads, splits, dim, device=out.device)
        log_sums = torch.empty(count, heads, splits, device=out.device)
    cosines = sines = query_norm = key_norm = out
    eps = 0.0
    if rotation is not None:
        cosines, sines = rotation.cosines, rotation.sines
        if rotation.norms is not None:
            query_norm, key_norm, eps = rotation.norms
    columns = max(triton.next_power_of_2(dim), MIN_DOT)
    attention.decode_kernel[(count, kv_heads, splits)](
        out,
        partial,
        log_sums,
        contexts.counters,
        qkv,
        keys,
        values,
        contexts.rows,
        contexts.ends,
        contexts.tables,
        cosines,
        sines,
        query_norm,
        key_norm,
        eps,
        dim**-0.5 * LOG2_E,
        out.stride(0),
        qkv.stride(0),
        contexts.tables.stride(0),
        *keys.stride()[:3],
        HEADS=heads,
        GROUP=group,
        GROUP_PADDED=max(triton.next_power_of_2(group), MIN_DOT),
        DIM=dim,
        COLUMNS=columns,
        PAGE=page,
        SPLITS=splits,
        TILE=DECODE_TILE[keys.itemsize],
        ROTATE=rotation is not None,
        NORM=rotation is not None and rotation.norms is not None,
        num_warps=DECODE_WARPS[keys.itemsize],
        num_stages=_stages(keys.dtype, columns),
    )


def prefill(
    out: torch.Tensor,
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tiles: torch.Tensor,
    tables: torch.Tensor,
    heads: int,
    dim: int,
) -> None:
    """Write the attention of the rows of `tiles` to `out`. The queries must be rotated.

    tiles: [n, 4] int32: first row, number of rows (at most PREFILL_ROWS), position of the first
        row, line of `tables`.
    """
    kv_heads, page = keys.shape[1:3]
    if not len(tiles):
        return
    columns = max(triton.next_power_of_2(dim), MIN_DOT)
    attention.prefill_kernel[(len(tiles), heads)](
        out,
        qkv,
        keys,
        values,
        tiles,
        tables,
        dim**-0.5 * LOG2_E,
        out.stride(0),
        qkv.stride(0),
        tables.stride(0),
        *keys.stride()[:3],
        GROUP=heads // kv_heads,
        DIM=dim,
        COLUMNS=columns,
        PAGE=page,
        ROWS=PREFILL_ROWS[keys.itemsize],
        TILE=PREFILL_TILE[keys.itemsize],
        MASKED_TILE=MASKED_TILE[keys.itemsize],
        num_warps=PREFILL_WARPS[keys.itemsize],
        num_stages=_stages(keys.dtype, columns),
    )


def _stages(dtype: torch.dtype, columns: int) -> int:
    """Return how many tiles of keys the attention kernels load ahead (Triton's `num_stages`).

    Wide heads get fewer, because their tiles fill the shared memory.
    """
    return 2 if dtype.itemsize * columns > 128 else 3
