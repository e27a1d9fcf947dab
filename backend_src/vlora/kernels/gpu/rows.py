"""GPU kernels over single rows: norms, gate, embedding and rotation. Sums are fp32."""

import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(
    out,
    hidden,
    delta,
    weight,
    eps,
    width,
    HAS_DELTA: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute `ops.add_norm` for one row, which one program keeps in registers."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = columns < width
    x = tl.load(hidden + row * width + columns, mask=inside, other=0.0)
    if HAS_DELTA:
        x += tl.load(delta + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(hidden + row * width + columns, x, mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    y = x * scale * tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + row * width + columns, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def head_norm_kernel(
    qkv,
    query_weight,
    key_weight,
    eps,
    row_stride,
    heads,
    dim,
    COLUMNS: tl.constexpr,
):
    """Compute `ops.head_norm` for one head of one row. Keys follow queries in the row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, COLUMNS)
    inside = columns < dim
    values = qkv + row * row_stride + head * dim + columns
    x = tl.load(values, mask=inside, other=0.0).to(tl.float32)
    of_query = tl.where(head < heads, dim, 0)
    of_key = dim - of_query
    weight = tl.load(query_weight + columns, mask=columns < of_query, other=0.0)
    weight += tl.load(key_weight + columns, mask=columns < of_key, other=0.0)
    y = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / dim + eps)) * weight
    tl.store(values, y.to(qkv.dtype.element_ty), mask=inside)


@triton.jit
def gate_kernel(out, x, width, COLUMNS: tl.constexpr):
    """Compute `ops.gate` for COLUMNS columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    gates = tl.load(x + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(x + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    y = gates / (1.0 + tl.exp(-gates)) * ups
    tl.store(out + row * width + columns, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def embed_kernel(
    out,
    tokens,
    table,
    feature_rows,
    features,
    words,
    width,
    HAS_IMAGES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copy COLUMNS columns of an image feature or of an embedding, NaN if it does not exist."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    feature = -1
    if HAS_IMAGES:
        feature = tl.load(feature_rows + row).to(tl.int64)
    # The embedding of a token that an image feature replaces is not read.
    token = tl.load(tokens + row).to(tl.int64)
    known = (token >= 0).to(tl.int32) * (token < words).to(tl.int32)
    of_token = tl.where(feature < 0, width * known, 0)
    y = tl.load(table + token * width + columns, mask=columns < of_token, other=float("nan"))
    y = y.to(tl.float32)
    if HAS_IMAGES:
        shown = columns < tl.where(feature < 0, 0, width)
        image = tl.load(features + feature * width + columns, mask=shown, other=0.0)
        y = tl.where(shown, image.to(tl.float32), y)
    tl.store(out + row * width + columns, y, mask=inside)


@triton.jit
def rotate_kernel(
    qkv,
    keys,
    values,
    cosines,
    sines,
    slots,
    row_stride,
    page_stride,
    head_stride,
    token_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Rotate the queries of GROUP heads of a row in place; write rotated keys and values to pages.

    slots: page · PAGE + position in the page, by row; a negative one writes nothing.
    """
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    columns = tl.arange(0, COLUMNS)
    half: tl.constexpr = DIM // 2
    in_half = columns < half
    inside = (heads < HEADS + 2 * KV_HEADS)[:, None] & in_half[None, :]
    source = qkv + row * row_stride + heads[:, None] * DIM + columns[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cosines + row * half + columns, mask=in_half, other=0.0)[None, :]
    sin = tl.load(sines + row * half + columns, mask=in_half, other=0.0)[None, :]
    rotated = first * cos - second * sin
    rotated_second = second * cos + first * sin
    is_query = inside & (heads < HEADS)[:, None]
    tl.store(source, rotated.to(qkv.dtype.element_ty), mask=is_query)
    tl.store(source + half, rotated_second.to(qkv.dtype.element_ty), mask=is_query)

    slot = tl.load(slots + row).to(tl.int64)
    inside &= (heads < tl.where(slot < 0, 0, HEADS + 2 * KV_HEADS))[:, None]
    kv_head = (heads - HEADS) % KV_HEADS
    in_page = (slot // PAGE) * page_stride + (slot % PAGE) * token_stride
    target = in_page + kv_head[:, None].to(tl.int64) * head_stride + columns[None, :]
    is_key = inside & ((heads >= HEADS) & (heads < HEADS + KV_HEADS))[:, None]
    tl.store(keys + target, rotated.to(keys.dtype.element_ty), mask=is_key)
    tl.store(keys + target + half, rotated_second.to(keys.dtype.element_ty), mask=is_key)
    is_value = inside & (heads >= HEADS + KV_HEADS)[:, None]
    tl.store(values + target, first.to(values.dtype.element_ty), mask=is_value)
    tl.store(values + target + half, second.to(values.dtype.element_ty), mask=is_value)
