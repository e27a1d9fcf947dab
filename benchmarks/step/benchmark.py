"""The step benchmark: one decode or prefill step against the roofline, part by part."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import RenderableType

from benchmarks.benchmark import (
    GRIDS,
    Bar,
    Benchmark,
    DeviceOption,
    EngineThreadsOption,
    GridOption,
    QuickOption,
    RootOption,
    Row,
    at_least,
    at_most,
    parse_types,
    server_threads,
)

if TYPE_CHECKING:
    from benchmarks.step.measurement import StepCell, StepResult


class StepBenchmark(Benchmark["tuple[StepCell, ...]"]):
    """Steps of a mid-size model. A cell of the run is all steps of one model and storage type.

    The roofline of a quantized type counts the bytes of its quantized weights.
    """

    name = "step"
    bars: ClassVar[Mapping[str, Bar]] = {
        **{
            f"{phase}_{dtype}": at_least(0.7)
            for phase in ("decode", "prefill")
            for dtype in ("fp32", "bf16")
        },
        **{
            f"decode_{kind}_{rows}": at_least(0.65)
            for kind in ("int8", "int4", "int8-bf16", "int4-bf16")
            for rows in (1, 4, 16)
        },
        "lora_cost_1": at_most(1.05),
        "lora_cost_16_over_bytes": at_most(1.1),
        "elsewhere": at_most(0.08),
        "repeated": at_most(1.0),
        "python": at_most(0.03),
        "busy_neighbour": at_most(2.3),
    }

    def __init__(
        self,
        *,
        dtypes: Annotated[
            str,
            typer.Option(
                metavar="TYPES",
                help="Comma-separated: fp32, bf16, int8, int4, int8-bf16, int4-bf16.",
            ),
        ] = "fp32,bf16",
        models: Annotated[
            str | None,
            typer.Option(
                metavar="MODELS", help="whole, grouped, or both; default: those of the grid."
            ),
        ] = None,
        threads: EngineThreadsOption = None,
        device: DeviceOption = "cpu",
        quick: QuickOption = False,
        grid: GridOption = None,
        root: RootOption = None,
    ) -> None:
        super().__init__(quick=quick, grid=grid or GRIDS / "step.json")
        from benchmarks import machine
        from benchmarks.step.measurement import FULL, QUICK, load_grid

        self._threads = threads or server_threads()
        machine.set_threads(self._threads)
        chosen = None if models is None else models.split(",")
        types = parse_types(dtypes, quantized=True)
        self._cells = load_grid(self.grid_path, types, chosen, quick=quick)
        self._effort = QUICK if quick else FULL
        self._device, self._on_gpu = device, device != "cpu"
        self.rooflines = self._rooflines = machine.RooflineByThreads(device)
        self._root = root
        self._results: list[StepResult] = []
        self._slow_downs: list[float] = []
        self._memory: dict[str, Any] = {}

    def settings(self) -> dict[str, Any]:
        return {"threads": self._threads, "device": self._device}

    def cells(self) -> Sequence[tuple[StepCell, ...]]:
        groups = itertools.groupby(self._cells, key=lambda cell: (cell.model, cell.dtype))
        return [tuple(cells) for _, cells in groups]

    def run(self, cell: tuple[StepCell, ...]) -> Iterator[Row]:
        from benchmarks import llava
        from benchmarks.step.measurement import (
            measure,
            measure_interpreter,
            measure_memory,
            model_for,
        )

        dtype, first = cell[0].dtype, cell[0].model == self._cells[0].model
        self.status(f"loading {cell[0].model}, {dtype}")
        checkpoint = llava.make(llava.MODELS[cell[0].model], self._root)
        typical = self._typical(cell[0])
        # The roofline of a GPU is measured before the model takes its memory.
        roofline = self._rooflines(self._threads)
        model = model_for([*cell, typical] if first else cell, checkpoint, dtype, self._device)
        start = len(self._results)
        for step_cell in cell:
            self.status(step_cell.name)
            result = measure(step_cell, model, self._effort, roofline, on_gpu=self._on_gpu)
            self._results.append(result)
            yield result.as_row()
        if self._on_gpu:
            return
        if first:
            self.status("a busy core")
            self._slow_downs.append(self._measure_slow_down(typical, model))
        del model
        self.status("the same steps in a tiny model")
        tiny = model_for(cell, llava.make(llava.tiny(checkpoint.sizes), self._root), dtype)
        for index, step_cell in enumerate(cell, start):
            interpreter = measure_interpreter(step_cell, tiny, self._effort)
            self._results[index] = replace(self._results[index], interpreter=interpreter)
            self.rows[index] = self._results[index].as_row()
        if len(self._results) == len(self._cells):
            self.status("memory")
            self._memory = measure_memory(self._cells, self._root)

    def _typical(self, cell: StepCell) -> StepCell:
        """Return the typical decode step of a cell's model and type."""
        from benchmarks.step.measurement import TYPICAL_CONTEXT, TYPICAL_ROWS

        return replace(cell, phase="decode", rows=TYPICAL_ROWS, context=TYPICAL_CONTEXT)

    def _measure_slow_down(self, typical: StepCell, model: Any) -> float:
        """Return the slow-down of the typical decode step while another process uses one core."""
        from benchmarks.step.busy_core import slow_down

        model.stage(typical.rows, typical.length(0), typical.context)
        step = model.step(model.mix(typical.rows, 0))
        return slow_down(step, rounds=self._effort.rounds, budget=self._effort.budget)

    def summarize(self) -> dict[str, Any]:
        from benchmarks.step.measurement import summarize

        slow_down = round(max(self._slow_downs), 3) if self._slow_downs else None
        return summarize(self._results) | {"busy_neighbour": slow_down} | self._memory

    def tables(self) -> Iterable[RenderableType]:
        from benchmarks.report import figure_table
        from benchmarks.step.parts import PARTS

        adapters = sorted({n for result in self._results for n in result.timings})
        columns = (
            *("step", "limit ms", *(f"{n} adapters ms" for n in adapters), "limit/time"),
            *("each call ms", *PARTS, "rest", "python", "noise"),
        )
        table = figure_table(
            columns,
            "one step; the limit, limit/time and shares are the base model's; the shares are of a"
            " step that makes each kernel call from Python",
        )
        for result in self._results:
            timings = result.timings
            table.add_row(
                result.cell.name,
                f"{result.limit(0) * 1e3:.1f}",
                *(f"{timings[n].median * 1e3:.1f}" if n in timings else "–" for n in adapters),
                f"{result.share_of_limit():.2f}",
                "–" if result.each_call is None else f"{result.each_call.median * 1e3:.1f}",
                *(f"{result.shares[0][part]:.0%}" if result.shares else "–" for part in PARTS),
                "–" if result.elsewhere is None else f"{result.elsewhere:.0%}",
                "–" if result.python is None else f"{result.python:.1%}",
                f"±{timings[0].noise:.0%}",
            )
        return [table]

    def summary_title(self) -> str:
        return "fraction of the roofline by phase and type, and other figures of a step"
