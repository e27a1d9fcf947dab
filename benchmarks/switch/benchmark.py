"""The switch benchmark: merges, changes of mode, mixture mode, and drift of merging in place."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import RenderableType

from benchmarks.benchmark import (
    GRIDS,
    Bar,
    Benchmark,
    GridOption,
    QuickOption,
    RootOption,
    Row,
    ThreadsOption,
    TypesOption,
    at_least,
    at_most,
    below,
    parse_thread_counts,
    parse_types,
)

if TYPE_CHECKING:
    from benchmarks.switch.delora_work import DeloraResult
    from benchmarks.switch.merges import MergeModel, MergeResult
    from benchmarks.switch.mode_changes import ModeChangeGaps

ROUNDS, QUICK_ROUNDS = 7, 3
CHANGES, DRIFT = "changes", "drift"

Job = tuple["MergeModel | str", "int | str"]
"""A model to merge and its thread count; or CHANGES or DRIFT and the storage type."""


class SwitchBenchmark(Benchmark[Job]):
    """Benchmark of changing the live adapter: times of merges, and delays that requests see."""

    name = "switch"
    bars: ClassVar[Mapping[str, Bar]] = {
        "unmerge_us": below(100),
        "merge_vs_limit": at_least(0.77),
        "merge_vs_limit_bf16": at_least(0.77),
        "delora_error_decode": at_most(0.15),
        "delora_error_prefill": at_most(0.15),
    }

    def __init__(
        self,
        *,
        threads: ThreadsOption = "1,2",
        dtypes: TypesOption = "fp32,bf16",
        plot: Annotated[
            Path | None, typer.Option(metavar="FOLDER", help="Draw figure 20 into this folder.")
        ] = None,
        quick: QuickOption = False,
        grid: GridOption = None,
        root: RootOption = None,
    ) -> None:
        super().__init__(quick=quick, grid=grid or GRIDS / "switch.json")
        from benchmarks import machine
        from benchmarks.switch.merges import load_models

        counts = parse_thread_counts(threads)
        self._counts = counts[-1:] if quick else counts
        self._dtypes = parse_types(dtypes)
        self._grid: dict[str, Any] = json.loads(self.grid_path.read_text())
        self._models = load_models(self.grid_path, self._dtypes, quick=quick)
        self._plot, self._root = plot, root
        self.rooflines = self._rooflines = machine.RooflineByThreads()
        self._merges: list[MergeResult] = []
        self._changes: list[ModeChangeGaps] = []
        self._delora: list[DeloraResult] = []
        self._drifts: list[Row] = []

    def cells(self) -> Sequence[Job]:
        return [
            *((model, count) for count in self._counts for model in self._models),
            *((part, dtype) for part in (CHANGES, DRIFT) for dtype in self._dtypes),
        ]

    def run(self, cell: Job) -> Iterator[Row]:
        from benchmarks import machine
        from benchmarks.switch import mode_changes
        from benchmarks.switch.merges import measure

        part, setting = cell
        if isinstance(setting, int):
            assert not isinstance(part, str)
            machine.set_threads(setting)
            self.status(f"merging, {part.name}")
            rounds = QUICK_ROUNDS if self.quick else ROUNDS
            self._merges.append(measure(part, setting, self._rooflines(setting), rounds))
            yield self._merges[-1].as_row()
            return
        machine.set_threads(self._counts[-1])
        if part == CHANGES:
            yield from self._run_changes(setting)
        else:
            self.status("merging in place")
            drifts = mode_changes.measure_drift(self._grid["drift"], setting)
            self._drifts += drifts
            yield from drifts

    def _run_changes(self, dtype: str) -> Iterator[Row]:
        """Measure changes of mode and, in fp32, LoRA in mixture mode, on one engine."""
        from benchmarks.switch import delora_work, mode_changes

        self.status("a mode switch between two tokens")
        grid = self._grid["request"]
        model = mode_changes.model_for(grid, dtype, self._root)
        change = mode_changes.measure_changes(grid, model, dtype, quick=self.quick)
        self._changes.append(change)
        if dtype == "fp32":
            self.status("deLoRA's work")
            roofline = self._rooflines(self._counts[-1])
            self._delora = delora_work.measure(
                self._grid["mixture"], model, roofline, quick=self.quick
            )
            yield from (result.as_row() for result in self._delora)
        yield from change.as_rows()

    def summarize(self) -> dict[str, Any]:
        from benchmarks.switch import delora_work, merges, mode_changes

        summary = merges.summarize(self._merges)
        summary |= mode_changes.summarize(self._changes, self._drifts)
        return summary | delora_work.summarize(self._delora)

    def tables(self) -> Iterable[RenderableType]:
        from benchmarks.switch import tables

        return [
            tables.merge_table(self._merges),
            tables.change_table(self._changes),
            tables.delora_table(self._delora),
            tables.drift_table(self._drifts),
        ]

    def summary_title(self) -> str:
        return f"merges: geometric means over threads {', '.join(map(str, self._counts))}"

    def draw(self) -> Iterable[Path]:
        from benchmarks.switch.tables import draw_delora

        return [draw_delora(self._delora, self._plot)] if self._plot and self._delora else []
