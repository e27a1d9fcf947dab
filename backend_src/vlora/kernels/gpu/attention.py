"""GPU kernels of paged attention, for decode rows and for tiles of prefill rows.

Keys and values of a layer are [pages, kv heads, PAGE, ≥ DIM]. Scores and sums are fp32.
Exponentials are powers of two, so `scale` includes log2(e). A row sees the positions up to its own.
A value that is not finite makes the attention of the rows that see it, and of no others, not
finite.
"""

import triton
import triton.language as tl


@triton.jit
def _offsets(positions, seen, table, page_stride, token_stride, PAGE: tl.constexpr):
    """Return the offset, in elements, of each position in the keys or values of one head."""
    pages = tl.load(table + positions // PAGE, mask=seen, other=0).to(tl.int64)
    return pages * page_stride + (positions % PAGE) * token_stride


@triton.jit
def _scores(q, k, scale):
    """Return the scaled products of queries and keys, fp32."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    # Otherwise a score of minus infinity, from a key that is not finite, would get weight 0 and be
    # hidden.
    return tl.where(scores == float("-inf"), float("nan"), scores)


@triton.jit
def _softmax_step(largest, total, scores):
    """Add a tile's scores to a running softmax.

    Returns the new largest score, the new sum of exponentials, the factor for earlier sums of
    values, and the weights of the tile's values.
    """
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    decay = tl.exp2(largest - new_largest)
    weights = tl.exp2(scores - new_largest[:, None])
    return new_largest, total * decay + tl.sum(weights, 1), decay, weights


@triton.jit
def _load_rotated(
    head, heads_mask, norm, cosines, sines, eps, NORM: tl.constexpr, DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Load heads, normalize them if NORM is set, and rotate them. Keep their stored type."""
    dtype = head.dtype.element_ty
    columns = tl.arange(0, COLUMNS)
    half: tl.constexpr = DIM // 2
    in_dim = columns < DIM
    inside = heads_mask[:, None] & in_dim[None, :]
    # The other half of each head, which the rotation combines with this half.
    other = tl.where(columns < half, columns + half, columns - half)
    x = tl.load(head[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.load(head[:, None] + other[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = (1.0 / tl.sqrt(tl.sum(x * x, 1) / DIM + eps))[:, None]
        x *= scale * tl.load(norm + columns, mask=in_dim, other=0.0)[None, :]
        y *= scale * tl.load(norm + other, mask=in_dim, other=0.0)[None, :]
        x, y = x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)
    cos = tl.load(cosines + columns % half, mask=in_dim, other=0.0)[None, :]
    sin = tl.load(sines + columns % half, mask=in_dim, other=0.0)[None, :]
    return (x * cos + tl.where(columns < half, -y, y) * sin).to(dtype)


@triton.jit
def _combine(
    target, partial, log_sums, in_query, heads, head, DIM: tl.constexpr, SPLITS: tl.constexpr
):
    """Combine the results of all splits for the heads numbered `head`; write them to `target`.

    heads, in_query: masks of the heads and of the elements [heads, columns] that exist.
    """
    columns = tl.arange(0, in_query.shape[1])
    largest = tl.full([in_query.shape[0]], float("-inf"), tl.float32)
    # Other programs of the same launch have written the parts, so L1 may have old values. `.cg`
    # bypasses L1.
    for split in tl.range(SPLITS, num_stages=1):
        part = tl.load(log_sums + head * SPLITS + split, mask=heads, other=float("-inf"),
                       cache_modifier=".cg")  # fmt: skip
        largest = tl.maximum(largest, part)
    total = tl.zeros([in_query.shape[0]], tl.float32)
    sums = tl.zeros([in_query.shape[0], in_query.shape[1]], tl.float32)
    for split in tl.range(SPLITS, num_stages=1):
        index = head * SPLITS + split
        part = tl.load(log_sums + index, mask=heads, other=float("-inf"), cache_modifier=".cg")
        # A row without context has no part, and a difference of infinities would be NaN.
        weight = tl.where(part == float("-inf"), 0.0, tl.exp2(part - largest))
        values = tl.load(partial + index[:, None] * DIM + columns[None, :], mask=in_query,
                         other=0.0, cache_modifier=".cg")  # fmt: skip
        total += weight
        sums += weight[:, None] * values
    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(target, result.to(target.dtype.element_ty), mask=in_query)


@triton.jit
def decode_kernel(
    out,
    partial,
    log_sums,
    counters,
    query,
    keys,
    values,
    rows,
    ends,
    tables,
    cosines,
    sines,
    query_norm,
    key_norm,
    eps,
    scale,
    out_stride,
    query_stride,
    table_stride,
    page_stride,
    head_stride,
    token_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    ROTATE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Compute attention for one row, one KV head and one part of the row's context.

    The context is divided into SPLITS parts, multiples of TILE. The last ones may be shorter or
    empty. A row whose `end` is 0 has no context.

    If SPLITS is 1, the program writes to `out`. Otherwise it writes its normalized result to
    `partial`, and the base-2 logarithm of its sum of exponentials to `log_sums`, and counts itself
    in `counters`. The program that finishes last combines all parts and resets the counter.

    With ROTATE, the program rotates the query heads. The program of the part with the row's own
    position also rotates the row's key, and writes it and the value to their page, which no other
    program reads. With NORM, RMS norm is applied to query and key heads before.
    """
    number = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(rows + number).to(tl.int64)
    end = tl.load(ends + number)
    part = tl.cdiv(tl.cdiv(end, SPLITS), TILE) * TILE
    first = split * part
    last = tl.minimum(first + part, end)

    heads = tl.arange(0, GROUP_PADDED)
    columns = tl.arange(0, COLUMNS)
    in_query = (heads < GROUP)[:, None] & (columns < DIM)[None, :]
    of_heads = (kv_head * GROUP + heads)[:, None] * DIM + columns[None, :]
    table = tables + number.to(tl.int64) * table_stride
    head_offset = kv_head.to(tl.int64) * head_stride
    largest = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    sums = tl.zeros([GROUP_PADDED, COLUMNS], tl.float32)
    stored = last
    if ROTATE:
        angles = row * (DIM // 2)
        source = query + row * query_stride
        q = _load_rotated(
            source + (kv_head * GROUP + heads) * DIM,
            heads < GROUP, query_norm, cosines + angles, sines + angles, eps, NORM, DIM, COLUMNS,
        ).to(keys.dtype.element_ty)  # fmt: skip
        stored = tl.minimum(last, end - 1)
        if (stored >= first) & (stored < last):
            # The row's own key is not in its page yet, so its score is computed here, before the
            # loop over the page's tokens.
            one = tl.arange(0, 1)  # Index 0 as a tensor, as the helpers expect.
            key = _load_rotated(
                source + (HEADS + kv_head + one) * DIM,
                one < 1, key_norm, cosines + angles, sines + angles, eps, NORM, DIM, COLUMNS,
            ).to(keys.dtype.element_ty)  # fmt: skip
            in_dim = (columns < DIM)[None, :]
            value = source + (HEADS + HEADS // GROUP + kv_head) * DIM + columns[None, :]
            value = tl.load(value, mask=in_dim, other=0.0).to(values.dtype.element_ty)
            target = _offsets(stored + one, one < 1, table, page_stride, token_stride, PAGE)
            target = (target + head_offset)[:, None] + columns[None, :]
            tl.store(keys + target, key, mask=in_dim)
            tl.store(values + target, value, mask=in_dim)
            score = tl.sum(q.to(tl.float32) * key.to(tl.float32), 1) * scale
            largest = tl.where(score == float("-inf"), float("nan"), score)  # As in `_scores`.
            total += 1.0
            sums += value.to(tl.float32)
    else:
        q = tl.load(query + row * query_stride + of_heads, mask=in_query, other=0.0)
        q = q.to(keys.dtype.element_ty)

    for begin in range(first, stored, TILE):
        positions = begin + tl.arange(0, TILE)
        seen = positions < stored
        offsets = _offsets(positions, seen, table, page_stride, token_stride, PAGE) + head_offset
        loaded = seen[:, None] & (columns < DIM)[None, :]
        k = tl.load(keys + offsets[:, None] + columns[None, :], mask=loaded, other=0.0)
        scores = _scores(q, k, scale)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        largest, total, decay, weights = _softmax_step(largest, total, scores)
        v = tl.load(values + offsets[:, None] + columns[None, :], mask=loaded, other=0.0)
        weighted = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        sums = sums * decay[:, None] + weighted

    empty = end <= first
    total = tl.where(empty, 1.0, total)
    result = sums / total[:, None]
    target = out + row * out_stride + of_heads
    if SPLITS == 1:
        tl.store(target, result.to(out.dtype.element_ty), mask=in_query)
    else:
        head = number.to(tl.int64) * HEADS + kv_head * GROUP + heads
        index = head * SPLITS + split
        tl.store(partial + index[:, None] * DIM + columns[None, :], result, mask=in_query)
        log_sum = tl.where(empty, float("-inf"), largest + tl.log2(total))
        tl.store(log_sums + index, log_sum, mask=heads < GROUP)
        # All threads of the program have written before one of them counts the part.
        tl.debug_barrier()
        counter = counters + number * (HEADS // GROUP) + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            _combine(target, partial, log_sums, in_query, heads < GROUP, head, DIM, SPLITS)
            tl.store(counter, 0)


@triton.jit
def prefill_kernel(
    out,
    query,
    keys,
    values,
    tiles,
    tables,
    scale,
    out_stride,
    query_stride,
    table_stride,
    page_stride,
    head_stride,
    token_stride,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    MASKED_TILE: tl.constexpr,
):
    """Compute the attention of one query head for up to ROWS rows of one chunk.

    Positions that all rows see are processed TILE at a time, the others MASKED_TILE at a time,
    which divides TILE.

    tiles: [n, 4] int32: first row, number of rows, position of the first row, line of `tables`.
    """
    tile = tiles + tl.program_id(0) * 4
    head = tl.program_id(1)
    first_row = tl.load(tile).to(tl.int64)
    count = tl.load(tile + 1)
    start = tl.load(tile + 2)
    table = tables + tl.load(tile + 3).to(tl.int64) * table_stride
    end = start + count

    offsets_in_tile = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    in_query = (offsets_in_tile < count)[:, None] & (columns < DIM)[None, :]
    row = first_row + offsets_in_tile
    of_rows = row[:, None] * query_stride + head * DIM + columns[None, :]
    q = tl.load(query + of_rows, mask=in_query, other=0.0).to(keys.dtype.element_ty)

    head_offset = (head // GROUP).to(tl.int64) * head_stride
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    # All rows see the positions before `diagonal`; no mask is needed there.
    diagonal = (start + 1) // TILE * TILE
    in_columns = (columns < DIM)[None, :]
    for begin in range(0, diagonal, TILE):
        positions = begin + tl.arange(0, TILE)
        seen = positions < end
        offsets = _offsets(positions, seen, table, page_stride, token_stride, PAGE) + head_offset
        k = tl.load(keys + offsets[:, None] + columns[None, :], mask=in_columns, other=0.0)
        scores = _scores(q, k, scale)
        largest, total, decay, weights = _softmax_step(largest, total, scores)
        v = tl.load(values + offsets[:, None] + columns[None, :], mask=in_columns, other=0.0)
        weighted = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        sums = sums * decay[:, None] + weighted

    faulty = tl.zeros([ROWS], tl.int32)
    for begin in range(diagonal, end, MASKED_TILE):
        positions = begin + tl.arange(0, MASKED_TILE)
        exists = positions < end
        offsets = _offsets(positions, exists, table, page_stride, token_stride, PAGE) + head_offset
        loaded = exists[:, None] & in_columns
        k = tl.load(keys + offsets[:, None] + columns[None, :], mask=loaded, other=0.0)
        seen = positions[None, :] <= (start + offsets_in_tile)[:, None]
        scores = _scores(q, k, scale)
        scores = tl.where(seen & exists[None, :], scores, float("-inf"))
        largest, total, decay, weights = _softmax_step(largest, total, scores)
        v = tl.load(values + offsets[:, None] + columns[None, :], mask=loaded, other=0.0)
        # Zero times a value that is not finite is NaN, even for a row that does not see the value.
        is_faulty = tl.sum(v.to(tl.float32) * 0.0, 1) != 0.0
        v = tl.where(is_faulty[:, None], 0.0, v).to(v.dtype)
        sees_fault = seen & is_faulty[None, :]
        faulty += tl.sum(sees_fault.to(tl.int32), 1)
        weighted = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        sums = sums * decay[:, None] + weighted

    result = tl.where((faulty > 0)[:, None], float("nan"), sums / total[:, None])
    target = out + row[:, None] * out_stride + head * DIM + columns[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=in_query)
