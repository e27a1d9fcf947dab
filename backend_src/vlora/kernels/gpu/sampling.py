"""GPU kernels that draw tokens without sorting the vocabulary; `model/sampler.py` defines the
draws.

The weight of a token is exp((logit - maximum of the row) / temperature) in fp32. Sums of weights
are fp64. The candidates of a row are the tokens whose weight is at least a floor, which is so low
that they include every token that top-k and top-p leave. `pick_kernel` finds these by bisection,
and draws one of them with a random number from the host.
"""

import triton
import triton.language as tl

FLOORS = tl.constexpr(4)  # Number of floors: TINY, e^-15, e^-10 and e^-5.
FLOOR_1 = tl.constexpr(3.0590232e-07)
FLOOR_2 = tl.constexpr(4.5399930e-05)
FLOOR_3 = tl.constexpr(6.7379470e-03)
TINY = tl.constexpr(1.17549435e-38)  # Smallest normal fp32 number. Smaller weights count as zero.


@triton.jit
def _weights(logits, largest, temperature, min_p):
    """Return the weights of logits. Weights below `min_p` and weights below TINY become 0."""
    weights = tl.exp((logits - largest) / temperature)
    return tl.where(weights < tl.maximum(min_p, TINY), 0.0, weights)


@triton.jit
def _floor(number):
    floor = tl.where(number == 1, FLOOR_1, TINY)
    return tl.where(number == 2, FLOOR_2, tl.where(number == 3, FLOOR_3, floor))


@triton.jit
def chunk_max_kernel(logits, maxima, places, finite, width, chunks, CHUNK: tl.constexpr):
    """Find the maximum of a chunk, its first index, and whether all values are finite."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = columns < width
    x = tl.load(logits + row * width + columns, mask=inside, other=0.0)
    is_finite = (x - x) == 0.0
    largest = tl.max(tl.where(inside & (x == x), x, float("-inf")), 0)
    place = tl.min(tl.where(inside & (x == largest), columns, width), 0)
    tl.store(maxima + row * chunks + chunk, largest)
    tl.store(places + row * chunks + chunk, place)
    tl.store(finite + row * chunks + chunk, tl.min(is_finite.to(tl.int32), 0))


@triton.jit
def argmax_kernel(maxima, places, finite, indices, all_finite, chunks, CHUNKS: tl.constexpr):
    """Compute `ops.argmax` for a row, from the results of its chunks."""
    row = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, CHUNKS)
    inside = numbers < chunks
    values = tl.load(maxima + row * chunks + numbers, mask=inside, other=float("-inf"))
    is_largest = inside & (values == tl.max(values, 0))
    at = tl.load(places + row * chunks + numbers, mask=is_largest, other=2147483647)
    tl.store(indices + row, tl.min(at, 0).to(tl.int64))
    flags = tl.load(finite + row * chunks + numbers, mask=inside, other=1)
    tl.store(all_finite + row, (tl.min(flags, 0) != 0).to(all_finite.dtype.element_ty))


@triton.jit
def chunk_mass_kernel(
    logits,
    rows,
    maxima,
    temperatures,
    min_ps,
    counts,
    masses,
    width,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Count and add up, for each floor, the weights of a chunk that are at least the floor.

    counts, masses: [draws, chunks, FLOORS] int32 and fp64.
    """
    number = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row = tl.load(rows + number).to(tl.int64)
    others = tl.arange(0, CHUNKS)
    of_chunks = tl.load(maxima + row * chunks + others, mask=others < chunks, other=float("-inf"))
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * width + columns, mask=columns < width, other=float("-inf"))
    temperature, min_p = tl.load(temperatures + number), tl.load(min_ps + number)
    weights = _weights(x, tl.max(of_chunks, 0), temperature, min_p)
    for floor in tl.static_range(FLOORS):
        above = weights >= _floor(floor)
        target = (number * chunks + chunk) * FLOORS + floor
        tl.store(counts + target, tl.sum(above.to(tl.int32), 0))
        tl.store(masses + target, tl.sum(tl.where(above, weights, 0.0).to(tl.float64), 0))


@triton.jit
def compact_kernel(
    logits,
    rows,
    maxima,
    temperatures,
    min_ps,
    top_ks,
    top_ps,
    counts,
    masses,
    weights_out,
    tokens_out,
    found,
    all_masses,
    width,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Write the candidates of one chunk of a row to the row's list, in ascending order.

    The candidates are the tokens whose weight is at least a floor. It is the highest floor that
    keeps every token that can be drawn: at least `top_k` tokens or, without top-k, a share of more
    than `top_p` of the mass. All chunks of a row choose the same one.

    weights_out, tokens_out: [draws, width] fp32 and int32.
    found: [draws] number of candidates.
    all_masses: [draws] fp64, sum of the weights of all tokens.
    """
    number = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row = tl.load(rows + number).to(tl.int64)
    top_k, top_p = tl.load(top_ks + number), tl.load(top_ps + number)
    others = tl.arange(0, CHUNKS)
    exists = others < chunks
    of_draw = (number * chunks + others) * FLOORS
    all_mass = tl.sum(tl.load(masses + of_draw, mask=exists, other=0.0), 0)
    chosen = 0
    for floor in tl.static_range(1, FLOORS):
        count = tl.sum(tl.load(counts + of_draw + floor, mask=exists, other=0), 0)
        mass = tl.sum(tl.load(masses + of_draw + floor, mask=exists, other=0.0), 0)
        # Sums in different orders differ. The margin makes sure that the floor is low enough.
        holds_p = (top_p < 1.0) & (mass > top_p * all_mass * 1.000001)
        suffices = tl.where(top_k > 0, count >= top_k, holds_p)
        chosen = tl.where(suffices, floor, chosen)
    of_chunks = tl.load(counts + of_draw + chosen, mask=exists, other=0)
    first = tl.sum(tl.where(others < chunk, of_chunks, 0), 0)

    largest = tl.load(maxima + row * chunks + others, mask=exists, other=float("-inf"))
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * width + columns, mask=columns < width, other=float("-inf"))
    temperature, min_p = tl.load(temperatures + number), tl.load(min_ps + number)
    weights = _weights(x, tl.max(largest, 0), temperature, min_p)
    above = weights >= _floor(chosen)
    target = number * width + first + tl.cumsum(above.to(tl.int32), 0) - 1
    tl.store(weights_out + target, weights, mask=above)
    tl.store(tokens_out + target, columns, mask=above)
    if chunk == 0:
        tl.store(found + number, tl.sum(of_chunks, 0))
        tl.store(all_masses + number, all_mass)


@triton.jit
def _count_and_mass(weights, found, least, BLOCK: tl.constexpr):
    """Return the number and the sum of the weights whose bits are at least `least`."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, found, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        w = tl.load(weights + columns, mask=columns < found, other=0.0)
        above = (columns < found) & (w.to(tl.int32, bitcast=True) >= least)
        count += above.to(tl.int32)
        mass += tl.where(above, w, 0.0).to(tl.float64)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _kept(weights, columns, count, low, equals):
    """Return the weights of a block, flags of those to keep, and the number that equal `low`.

    low: bits of the smallest kept weight.
    equals: maximum number of weights equal to `low` to keep.
    """
    w = tl.load(weights + columns, mask=columns < count, other=0.0)
    bits = w.to(tl.int32, bitcast=True)
    is_equal = ((bits == low) & (columns < count)).to(tl.int32)
    kept = (bits > low) | ((is_equal > 0) & (tl.cumsum(is_equal, 0) <= equals))
    return w, kept, tl.sum(is_equal, 0)


@triton.jit
def pick_kernel(
    drawn,
    weights,
    tokens,
    found,
    all_masses,
    top_ks,
    top_ps,
    uniforms,
    width,
    BLOCK: tl.constexpr,
):
    """Apply top-k and top-p to the candidates of a row, and draw one in proportion to its weight.

    Top-k keeps all tokens whose weight is at least the k-th largest. Of the tokens with the
    smallest weight in the top-p set, top-p keeps only as many as it needs, those with the smallest
    ids.

    Bisection over the bits of the weights finds the smallest one to keep: positive fp32 numbers
        have
    the same order as their bits.
    """
    number = tl.program_id(0).to(tl.int64)
    weights += number * width
    count = tl.load(found + number)
    top_k, top_p = tl.load(top_ks + number), tl.load(top_ps + number)
    low = 1  # The smallest weight that is kept, by its bits.
    if (top_k > 0) & (top_k < count):
        high = 0x3F800001  # One more than the bits of 1.0, the largest weight.
        while low + 1 < high:
            middle = (low + high) // 2
            above, _ = _count_and_mass(weights, count, middle, BLOCK)
            enough = above >= top_k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
    equals = 2147483647  # Number of kept weights that equal the smallest kept weight.
    if top_p < 1.0:
        _, total = _count_and_mass(weights, count, low, BLOCK)
        # Without top-k, the sum includes tokens below the floor.
        wanted = top_p * tl.where(top_k > 0, total, tl.load(all_masses + number))
        high = 0x3F800001
        while low + 1 < high:
            middle = (low + high) // 2
            _, mass = _count_and_mass(weights, count, middle, BLOCK)
            enough = mass >= wanted
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        _, larger = _count_and_mass(weights, count, low + 1, BLOCK)
        smallest = low.to(tl.float32, bitcast=True).to(tl.float64)
        equals = tl.maximum(tl.ceil((wanted - larger) / smallest), 1.0).to(tl.int32)

    # The first pass over the candidates adds up the kept weights. The second finds the candidate at
    # which the running sum exceeds the random share of that total.
    kept_mass = tl.zeros([BLOCK], tl.float64)
    seen_equals = 0
    for begin in range(0, count, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        w, kept, found_equals = _kept(weights, columns, count, low, equals - seen_equals)
        kept_mass += tl.where(kept, w, 0.0).to(tl.float64)
        seen_equals += found_equals
    goal = tl.load(uniforms + number) * tl.sum(kept_mass, 0)
    seen_equals = 0
    before = tl.sum(tl.zeros([BLOCK], tl.float64), 0)
    place = count
    last = 0
    for begin in range(0, count, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        w, kept, found_equals = _kept(weights, columns, count, low, equals - seen_equals)
        mass = tl.where(kept, w, 0.0).to(tl.float64)
        beyond = kept & (before + tl.cumsum(mass, 0) > goal)
        place = tl.minimum(place, tl.min(tl.where(beyond, columns, count), 0))
        last = tl.maximum(last, tl.max(tl.where(kept, columns, 0), 0))
        before += tl.sum(mass, 0)
        seen_equals += found_equals
    token = tl.load(tokens + number * width + tl.where(place < count, place, last))
    tl.store(drawn + number, token.to(tl.int64))
