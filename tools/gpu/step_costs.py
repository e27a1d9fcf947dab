"""Print the calculated launches and bytes of a decode step on a GPU.

usage: python -m tools.gpu.step_costs

For a 7B model in bf16, it compares what all kernels of a step read and write with what every
implementation must read. `tests/unit/gpu/test_engine.py` counts the launches of a real step.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlora.model.attention_gpu import splits

BANDWIDTH = 3.35e12
"""Bytes per second of an H100 SXM, from its data sheet."""

GAP_SECONDS = 1.5e-6
"""Predicted time between two launches of a captured graph."""

FP32, BF16 = 4, 2

RANK = 64
"""Rank of the adapters in the table. Each row has its own adapter, for all projections."""


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder. The defaults are those of Qwen2-VL-7B."""

    layers: int = 28
    hidden: int = 3584
    inner: int = 18944
    heads: int = 28
    kv_heads: int = 4
    dim: int = 128
    vocabulary: int = 152064

    @property
    def query(self) -> int:
        """Number of values in all query heads of a row."""
        return self.heads * self.dim

    @property
    def qkv(self) -> int:
        """Number of values in all heads of a row: queries, keys and values."""
        return self.query + 2 * self.kv_heads * self.dim


@dataclass(frozen=True)
class Kernel:
    """One launch.

    needed: bytes of weights, adapters or pages that it must read.
    rows: bytes of rows that it reads and writes.
    """

    name: str
    needed: int
    rows: int


def product(name: str, d_in: int, d_out: int, rows: int) -> Kernel:
    return Kernel(name, BF16 * d_in * d_out, BF16 * rows * (d_in + d_out))


def add_norm(model: Model, rows: int) -> Kernel:
    return Kernel("add_norm", FP32 * model.hidden, (2 * FP32 + 2 * BF16) * rows * model.hidden)


def atmm(d_in: int, d_out: int, rows: int, rank: int) -> Kernel:
    """Return ATMM's launch for a group of projections, if each row has an adapter of its own.

    d_out: mean number of outputs of the group's projections.
    rank: sum of the ranks of an adapter's pairs for these projections.
    """
    adapters = BF16 * rows * rank * (d_in + d_out)
    return Kernel("atmm", adapters, BF16 * rows * (d_in + 2 * d_out) + 2 * FP32 * rows * rank)


def layer(model: Model, rows: int, context: int, rank: int = 0) -> list[Kernel]:
    """Return the launches of a layer for decoding rows; rank 0 means no adapters."""
    parts = splits(rows, model.kv_heads, context)
    pages = BF16 * 2 * model.kv_heads * model.dim * context * rows
    partial = 2 * FP32 * parts * rows * model.query if parts > 1 else 0
    attended = BF16 * rows * model.query

    def projections(name: str, d_in: int, *d_outs: int) -> list[Kernel]:
        kernels = [product(name, d_in, sum(d_outs), rows)]
        if rank:
            # An adapter has a pair (A, B) of this rank for each projection. All pairs together have
            # as many bytes as one pair with the sum of the ranks and the mean number of outputs.
            width = sum(d_outs) // len(d_outs)
            kernels.append(atmm(d_in, width, rows, rank * len(d_outs)))
        return kernels

    kv = model.kv_heads * model.dim
    return [
        add_norm(model, rows),
        *projections("qkv", model.hidden, model.query, kv, kv),
        Kernel("decode", pages, BF16 * rows * model.qkv + attended + partial),
        *projections("o", model.query, model.hidden),
        add_norm(model, rows),
        *projections("gate_up", model.hidden, model.inner, model.inner),
        Kernel("gate", 0, 3 * BF16 * rows * model.inner),
        *projections("down", model.inner, model.hidden),
    ]


def around_layers(model: Model, rows: int) -> list[Kernel]:
    """Return the launches of a greedy step that belong to no layer."""
    logits = rows * model.vocabulary
    angles = FP32 * rows * model.dim // 2
    return [
        Kernel("upload", 0, 0),
        Kernel("embed", 0, (BF16 + FP32) * rows * model.hidden),
        Kernel("cosines", 0, 2 * angles),
        Kernel("sines", 0, 2 * angles),
        add_norm(model, rows),
        product("lm_head", model.hidden, model.vocabulary, rows),
        Kernel("logits in fp32", 0, (BF16 + FP32) * logits),
        Kernel("chunk_max", 0, FP32 * logits),
        Kernel("argmax", 0, 0),
    ]


def step(model: Model, rows: int, context: int, rank: int = 0) -> list[Kernel]:
    return layer(model, rows, context, rank) * model.layers + around_layers(model, rows)


def table(model: Model) -> str:
    """Return a table in Markdown: bytes and times of steps by batch, context and adapters."""
    columns = "rows | context | adapters | needed GB | moved GB | moved / needed | needed ms"
    columns += " | launches (per layer) | gaps ms | predicted / needed time"
    lines = [f"| {columns} |", "|---" * 10 + "|"]
    for rows in (1, 16, 64):
        for context, rank in ((1024, 0), (1024, RANK), (8192, 0)):
            kernels = step(model, rows, context, rank)
            needed = sum(kernel.needed for kernel in kernels)
            moved = needed + sum(kernel.rows for kernel in kernels)
            gaps = len(kernels) * GAP_SECONDS
            least = needed / BANDWIDTH
            lines.append(
                f"| {rows} | {context} | {rows if rank else 0} | {needed / 1e9:.2f}"
                f" | {moved / 1e9:.2f} | {moved / needed:.3f} | {1e3 * least:.2f}"
                f" | {len(kernels)} ({len(layer(model, rows, context, rank))}) | {1e3 * gaps:.2f}"
                f" | {(moved / BANDWIDTH + gaps) / least:.2f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Model()))
