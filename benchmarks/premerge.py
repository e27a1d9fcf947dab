"""The premerge benchmark: the same steps on the base model and on a premerged base.

It repeats figure 3 of the paper that `vlora.offline.premerge` follows. Premerging folds the hot
adapter into the base weights. The hot adapter's share of the requests goes from 0 to 1; the other
requests are spread over the cold adapters. The model is the mid-size one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import RenderableType

from benchmarks.benchmark import (
    GRIDS,
    Bar,
    Benchmark,
    EngineThreadsOption,
    QuickOption,
    RootOption,
    Row,
    at_most,
    load_grid_values,
    server_threads,
)

if TYPE_CHECKING:
    from benchmarks.llava import Checkpoint
    from benchmarks.synthetic_model import SyntheticModel

Cell = tuple[str, str]
"""Storage type, and name of the step."""

BUDGET_SECONDS = 6.0


def premerged(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with its first adapter premerged. The folder is made once."""
    from benchmarks.llava import Checkpoint
    from vlora.adapters.files import load_adapter
    from vlora.model.decoder_config import load_config
    from vlora.model.loader import adapter_shape
    from vlora.offline.premerge import premerge

    out = checkpoint.folder.with_name("premerged")
    if not out.exists():
        config = load_config(checkpoint.folder)
        shape = adapter_shape(checkpoint.folder, config)

        def read(name: str) -> Any:
            folder = checkpoint.adapters / name
            return folder, load_adapter(name, folder, shape)

        hot, *cold = checkpoint.adapter_names
        readers = {name: lambda name=name: read(name) for name in cold}
        premerge(checkpoint.folder, config, shape, read(hot), readers, out)
    return Checkpoint(out / "model", out / "adapters", checkpoint.sizes)


def adapters_of(requests: int, share: float, cold: int) -> list[int]:
    """Return the adapter of each request: 0 for the hot adapter, else 1 to `cold` in turn.

    share: share of the requests that use the hot adapter.
    """
    hot = round(requests * share)
    return [0] * hot + [1 + i % cold for i in range(requests - hot)]


class PremergeBenchmark(Benchmark[Cell]):
    """Time of a step after premerging, divided by its time before, by the hot adapter's share."""

    name = "premerge"
    bars: ClassVar[Mapping[str, Bar]] = {"decode_hot": at_most(1.0), "prefill_hot": at_most(1.0)}

    def __init__(
        self,
        *,
        threads: EngineThreadsOption = None,
        plot: Annotated[
            Path | None, typer.Option(metavar="FOLDER", help="Draw figure 3 into this folder.")
        ] = None,
        quick: QuickOption = False,
        root: RootOption = None,
    ) -> None:
        super().__init__(quick=quick, grid=GRIDS / "premerge.json")
        from benchmarks import machine

        self._threads = threads or server_threads()
        machine.set_threads(self._threads)
        self._grid = load_grid_values(self.grid_path, quick=quick)
        self._root: Path | None = root
        self._plot = plot
        self._models: dict[str, tuple[SyntheticModel, SyntheticModel]] = {}

    def settings(self) -> dict[str, Any]:
        return {"threads": self._threads}

    def cells(self) -> Sequence[Cell]:
        return [(dtype, step) for dtype in self._grid["dtypes"] for step in self._grid["cells"]]

    def run(self, cell: Cell) -> Iterator[Row]:
        from benchmarks.timing import interleaved
        from vlora.ids import BASE

        dtype, name = cell
        step = self._grid["cells"][name]
        before, after = self._pair(dtype)
        cold = len(before.slots) - 1
        for share in self._grid["shares"]:
            self.status(f"{name}, {dtype}, {share:.0%} hot")
            chosen = adapters_of(step["requests"], share, cold)
            for model in (before, after):
                model.stage(step["requests"], step["length"], step["computed"])
            slots = [after.slots[index] if index else BASE for index in chosen]
            timings = interleaved(
                {
                    "before": before.step([before.slots[index] for index in chosen]),
                    "after": after.step(slots),
                    "base": after.step([BASE] * len(chosen)),
                },
                rounds=self._grid["rounds"],
                warm=False,
                budget=BUDGET_SECONDS,
            )
            yield {
                "step": name,
                "dtype": dtype,
                "hot_share": share,
                **{f"{key}_ms": round(t.median * 1e3, 3) for key, t in timings.items()},
                "ratio": round(timings["after"].median / timings["before"].median, 4),
                "noise": round(max(t.noise for t in timings.values()), 4),
            }

    def _pair(self, dtype: str) -> tuple[SyntheticModel, SyntheticModel]:
        """Return engines of the base and of the premerged checkpoint.

        Release the engines of other types.
        """
        from benchmarks import llava
        from benchmarks.synthetic_model import SyntheticModel

        if dtype not in self._models:
            self._models.clear()
            sizes = {**self._grid["sizes"], "ranks": tuple(self._grid["sizes"]["ranks"])}
            checkpoint = llava.make(llava.Sizes(**sizes), self._root)
            steps = self._grid["cells"].values()
            positions = max(step["requests"] * (step["length"] + 32) for step in steps)
            rows = max(s["requests"] * (s["length"] - s["computed"]) for s in steps)
            before, after = (
                SyntheticModel(model, dtype, positions, rows, adapters=True)
                for model in (checkpoint, premerged(checkpoint))
            )
            self._models[dtype] = before, after
        return self._models[dtype]

    def summarize(self) -> dict[str, Any]:
        """Return the largest ratio of all storage types, for each step and two shares.

        If a key ends in `hot`, all requests use the hot adapter. If it ends in `cold`, none does.
        """

        def worst(step: str, share: float) -> float | None:
            ratios = [
                row["ratio"]
                for row in self.rows
                if row["step"] == step and row["hot_share"] == share
            ]
            return max(ratios, default=None)

        return {
            f"{step}_{name}": worst(step, share)
            for step in ("decode", "prefill")
            for name, share in (("hot", 1.0), ("cold", 0.0))
        }

    def tables(self) -> Iterable[RenderableType]:
        from benchmarks.report import figure_table

        table = figure_table(
            ("step", "type", "hot share", "before, ms", "premerged, ms", "base alone, ms", "ratio"),
            "one step before and after premerging",
        )
        for row in self.rows:
            table.add_row(
                row["step"],
                row["dtype"],
                f"{row['hot_share']:.0%}",
                *(f"{row[key]:.5g}" for key in ("before_ms", "after_ms", "base_ms", "ratio")),
            )
        return [table]

    def draw(self) -> Iterable[Path]:
        return [draw_sweep(self.rows, self._plot)] if self._plot and self.rows else []


def draw_sweep(rows: Sequence[Row], folder: Path) -> Path:
    """Draw each step's time after premerging, divided by its time before. Return the file."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    plot = figure.subplots()
    for step, dtype in dict.fromkeys((row["step"], row["dtype"]) for row in rows):
        points = [
            (row["hot_share"], row["ratio"])
            for row in rows
            if (row["step"], row["dtype"]) == (step, dtype)
        ]
        shares, ratios = zip(*points, strict=True)
        plot.plot(shares, ratios, "o-", label=f"{step}, {dtype}")
    plot.axhline(1.0, color="grey", linewidth=1)
    plot.set_xlabel("share of requests for the hot adapter")
    plot.set_ylabel("time of a step, premerged over before")
    plot.legend(fontsize=7)
    path = folder / "premerge.png"
    figure.savefig(path, dpi=120)
    return path
