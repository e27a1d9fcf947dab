"""Base class of benchmarks whose engine runs the demo model, or another checkpoint."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from benchmarks.benchmark import (
    GRIDS,
    Benchmark,
    CellT,
    DemoModelOption,
    QuickOption,
    demo_folder,
    load_grid_values,
)


class DemoModelBenchmark(Benchmark[CellT]):
    """A benchmark of one checkpoint, with a number of threads and the grid file of its name."""

    def __init__(
        self,
        *,
        model: DemoModelOption = None,
        threads: Annotated[int, typer.Option(help="Threads of the engine.")] = 1,
        quick: QuickOption = False,
    ) -> None:
        super().__init__(quick=quick, grid=GRIDS / f"{self.name}.json")
        from benchmarks import machine

        machine.set_threads(threads)
        self._threads = threads
        self._model = model or demo_folder() / "checkpoint"
        self._grid = load_grid_values(self.grid_path, quick=quick)
        self.set_up()

    def set_up(self) -> None:
        """Set the attributes of the subclass. Called when the options have been parsed."""

    def settings(self) -> dict[str, Any]:
        return {"threads": self._threads}
