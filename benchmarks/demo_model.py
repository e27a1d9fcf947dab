"""Base class of benchmarks that run the demo model, or another checkpoint."""

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
    """Benchmark of one checkpoint. The grid file is `grids/`, its name, and `.json`."""

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
        """Set the attributes of the subclass. `__init__` calls it last."""

    def settings(self) -> dict[str, Any]:
        return {"threads": self._threads}
