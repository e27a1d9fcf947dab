"""The kernels benchmark: ATMM against its baselines, over hot and cold adapters.

The weights of hot adapters stay in the caches. The weights of cold adapters come from memory.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import typer

from benchmarks import frame
from benchmarks.frame import Benchmark, Row, matching, mean_of
from benchmarks.lora_operators import (
    BASELINES,
    Atmm,
    InFloat32,
    KernelCell,
    LoraCall,
    LoraOperator,
    StaticTile,
    load_grid,
    static_tiles,
)
from benchmarks.machine import (
    COLD_BYTES,
    Roofline,
    has_bf16_instructions,
    medians,
    noises,
    set_threads,
    timed_with_rates,
)
from vlora import native
from vlora.atmm.search.timing import Timing

COLD_TOTAL_BYTES = COLD_BYTES
"""Size in bytes that the adapters of all layers of a cold cell should have together. The calls use
one layer after another."""
MIN_LAYERS, MAX_LAYERS = 2, 512
POSSIBLY_FASTEST = ("slice_loop", "padded")
"""Baselines that can be the fastest. The others take several times as long."""
MULTIPLY_ROUNDS = 100_000
"""Iterations of the peak microbenchmark per sample: 0.2 ms on a core that does 250 GFLOP/s."""
QUICK, FULL = (5, 0.01), (9, 0.03)
"""Number of rounds, in which each operator is measured once, and seconds per operator."""
NAMES = tuple(baseline.name for baseline in BASELINES)
TORCH_ISAS = {
    "scalar": ("default", "SSE4_2", "SSE41"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512", "AVX512_CORE"),
    "avx512_bf16": ("avx512", "AVX512", "AVX512_CORE_BF16"),
    "amx": ("avx512", "AVX512", "AVX512_CORE_AMX"),
}
"""Names that ATen, MKL and oneDNN have for our instruction sets."""
TORCH_VARIABLES = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")


@dataclass(kw_only=True)
class Kernels(Benchmark):
    """Speed-up of ATMM over each baseline, and its share of the roofline.

    A cell is a shape and a thread count.
    """

    name = "kernels"
    title = "geometric means over cells and thread counts"
    bars: ClassVar = {
        "decode_vs_peft_loop": "≥ 4",
        "decode_vs_slice_loop": "≥ 2.5",
        "decode_vs_einsum": "≥ 10",
        "decode_vs_padded": "≥ 4",
        "prefill_vs_peft_loop": "≥ 3",
        "prefill_vs_slice_loop": "≥ 2",
        "prefill_vs_einsum": "≥ 20",
        "prefill_vs_padded": "≥ 2",
        **{f"roofline_decode_cold{suffix}": "≥ 0.667" for suffix in ("", "_bf16")},
        **{f"roofline_prefill{suffix}": "≥ 0.741" for suffix in ("", "_bf16")},
        **{f"cells_slower_beyond_noise{suffix}": "≤ 0" for suffix in ("", "_bf16")},
    }
    shown: ClassVar = {
        "speed-up of ATMM over each baseline; roofline: 1 is at the roofline": " ".join(
            ("cell threads us.atmm roofline", *(f"speed_up.{name}" for name in NAMES))
        )
        + " vs_fastest_baseline fastest_baseline slower_than_noise noise"
    }

    threads: frame.ThreadCounts = "1,2"
    dtypes: frame.Types = "fp32,bf16"
    isa: Annotated[
        str | None,
        typer.Option(
            metavar="ISA", help=f"Restrict us and torch to one of {', '.join(TORCH_ISAS)}."
        ),
    ] = None

    def prepare(self) -> None:
        super().prepare()
        if self.isa is not None:
            use_isa(self.isa)
        assert self.grid is not None
        self._counts = frame.parse_thread_counts(self.threads)
        self._shapes = load_grid(self.grid, frame.parse_types(self.dtypes), quick=self.quick)

    def cells(self) -> Sequence[tuple[KernelCell, int]]:
        return [(shape, count) for count in self._counts for shape in self._shapes]

    def measure(self, cell: tuple[KernelCell, int]) -> Iterator[Row]:
        shape, threads = cell
        set_threads(threads)
        self.status(shape.name)
        yield measure_cell(shape, threads, self.roofline(threads), quick=self.quick)

    def summarize(self) -> dict[str, Any]:
        return summarize(self.rows)


def use_isa(isa: str) -> None:
    """Restrict our kernels and torch to an instruction set.

    Torch and its libraries read environment variables when torch is first imported, so the process
    starts again with these variables.
    """
    if isa not in TORCH_ISAS:
        raise typer.BadParameter(f"--isa {isa!r}: valid names are {', '.join(TORCH_ISAS)}")
    variables = dict(zip(TORCH_VARIABLES, TORCH_ISAS[isa], strict=True))
    if not variables.items() <= os.environ.items():
        os.environ.update(variables)
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]])
    native.kernels().runtime.request_isa(isa)


@torch.inference_mode()
def measure_cell(cell: KernelCell, threads: int, roofline: Roofline, *, quick: bool) -> Row:
    """Time ATMM and all operators that it is compared with on one cell, interleaved.

    The calls of an operator use one layer after another. A hot cell has one layer. A cold cell has
    so many layers that each should have left the caches before it is used again.
    """
    operators = _operators(cell, quick=quick)
    left_out = {o.name: why for o in operators if (why := o.why_not(cell)) is not None}
    generator = torch.Generator().manual_seed(cell.total_rows * cell.width)
    x = cell.draw_rows(generator)
    pairs = cell.draw_pairs(generator)  # All layers have the same values.
    layers = -(-COLD_TOTAL_BYTES // cell.adapter_bytes)
    layers = min(MAX_LAYERS, max(MIN_LAYERS, layers)) if cell.cold else 1
    chosen = [operator for operator in operators if operator.name not in left_out]
    # The layers of all operators alternate in memory, so that none reads ahead into its next layer.
    prepared = [[operator.prepare(pairs, cell) for operator in chosen] for _ in range(layers)]
    calls = {
        operator.name: _in_turn(operator, own, x)
        for operator, own in zip(chosen, zip(*prepared, strict=True), strict=True)
    }
    rounds, budget = QUICK if quick else FULL
    timings, rates = timed_with_rates(
        calls,
        cell.dtype,
        MULTIPLY_ROUNDS,
        # For a cold cell, a read takes about as many bytes as all layers hold.
        read_bytes=layers * cell.adapter_bytes if cell.cold else 0,
        rounds=rounds,
        warm=not cell.cold,
        lead=cell.cold,
        budget=budget,
    )
    # The rate of memory is that of these rounds. The other rates are the best of the run so far.
    moved = ((cell.adapter_bytes, cell.cold), (cell.row_bytes, False))
    limit = roofline.seconds(cell.flops, moved, cell.dtype, rates.read)
    return row_of(cell, threads, timings, limit, left_out)


def _in_turn(
    operator: LoraOperator, layers: Sequence[LoraCall], x: torch.Tensor
) -> Callable[[], None]:
    x = x.to(operator.dtype or x.dtype, copy=True)
    y, turns = torch.zeros_like(x), itertools.cycle(layers)
    return lambda: next(turns)(y, x)


def _operators(cell: KernelCell, *, quick: bool) -> list[LoraOperator]:
    operators: list[LoraOperator] = [Atmm(), *BASELINES]
    if cell.dtype == "bf16" and not has_bf16_instructions():
        measured = POSSIBLY_FASTEST if quick else NAMES
        operators += [InFloat32(baseline) for baseline in BASELINES if baseline.name in measured]
    return operators if cell.cold else operators + static_tiles(cell.dtype)


def row_of(
    cell: KernelCell,
    threads: int,
    timings: Mapping[str, Timing],
    limit: float,
    left_out: Mapping[str, str],
) -> Row:
    """Return the row of a cell. ATMM is slower than a baseline only beyond the noise of both."""
    atmm = timings[Atmm.name]
    baselines = {name: t for name, t in timings.items() if _is_baseline(name)}
    fastest = min(baselines, key=lambda name: baselines[name].median)
    noise = max(atmm.noise, baselines[fastest].noise)
    ratio = baselines[fastest].median / atmm.median
    return {
        **cell.as_row(),
        "threads": threads,
        "limit_us": limit * 1e6,
        "roofline": limit / atmm.median,
        "fastest_baseline": fastest,
        "vs_fastest_baseline": ratio,
        "noise": noise,
        "slower_than_noise": ratio < 1 - noise,
        "us": medians(timings, 1e6),
        "speed_up": {name: t.median / atmm.median for name, t in baselines.items()},
        "noise_of": noises(timings),
        "left_out": dict(left_out),
    }


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figures of the summary by key. Keys of bf16 end in `_bf16`.

    Speed-ups and fractions of the roofline are geometric means over cells and thread counts.
    """
    summary: dict[str, Any] = {}
    for dtype, suffix in (("fp32", ""), ("bf16", "_bf16")):
        if of_type := matching(rows, dtype=dtype):
            summary |= {key + suffix: value for key, value in _summary_of(of_type).items()}
    return summary


def _summary_of(rows: Sequence[Row]) -> dict[str, Any]:
    hot, cold = (matching(rows, regime="decode", cold=heat) for heat in (False, True))
    prefill = matching(rows, regime="prefill")
    summary: dict[str, Any] = {}
    for regime, chosen in (("decode", hot), ("prefill", prefill)):
        in_fp32 = {name for row in chosen for name in row["us"] if name.endswith("_in_fp32")}
        for name in (*NAMES, *sorted(in_fp32)):
            summary[f"{regime}_vs_{name}"] = mean_of(speed_up(row, name) for row in chosen)
    summary["adaptive_vs_best_static"], summary["best_static"] = _over_best_static(rows)
    worst = min(rows, key=lambda row: float(row["vs_fastest_baseline"]))
    summary["worst_cell_vs_best_baseline"] = worst["vs_fastest_baseline"]
    summary["worst_cell"] = f"{worst['cell']} {worst['threads']}t vs {worst['fastest_baseline']}"
    summary["cells"] = len(rows)
    summary["cells_slower_beyond_noise"] = sum(row["slower_than_noise"] for row in rows)
    for name, chosen in (("decode_hot", hot), ("decode_cold", cold), ("prefill", prefill)):
        summary[f"roofline_{name}"] = mean_of(row["roofline"] for row in chosen)
    return summary


def _over_best_static(rows: Sequence[Row]) -> tuple[float | None, str | None]:
    """Return ATMM's mean speed-up over the best static tile in hot cells, and that tile's name.

    The best static tile is the tile over which ATMM's mean speed-up is smallest, not the best tile
    of each cell. Only the candidates of `static_tiles` are timed, so the speed-up is an upper bound
    of the gain of adaptive choice.
    """
    hot = matching(rows, cold=False)
    timed = [{name for name in row["us"] if name.startswith(StaticTile.prefix)} for row in hot]
    common = set.intersection(*timed) if timed else set()
    means = [(mean_of(speed_up(row, name) for row in hot), name) for name in common]
    best, name = min(((mean, name) for mean, name in means if mean), default=(None, None))
    return best, name and name.removeprefix(StaticTile.prefix)


def speed_up(row: Row, name: str) -> float | None:
    """Return the speed-up of ATMM over an operator, or None if the operator was left out."""
    return row["us"][name] / row["us"]["atmm"] if name in row["us"] else None


def _is_baseline(name: str) -> bool:
    return name != Atmm.name and not name.startswith(StaticTile.prefix)
