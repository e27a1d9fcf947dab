"""The premerge benchmark: the same steps on the base model and on a premerged base.

It repeats figure 3 of the paper that `vlora.offline.premerge` follows. Premerging folds the hot
adapter into the base weights. The hot adapter's share of the requests goes from 0 to 1; the other
requests are spread over the cold adapters. The model is the mid-size one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.console import RenderableType

from benchmarks import frame, llava
from benchmarks.frame import Bar, Row, ThreadedBenchmark, at_most, percent
from benchmarks.llava import Checkpoint
from benchmarks.models import SyntheticModel
from benchmarks.timing import interleaved
from vlora.adapters.files import load_adapter
from vlora.ids import BASE
from vlora.model.decoder_config import load_config
from vlora.model.loader import adapter_shape
from vlora.offline.premerge import premerge

BUDGET_SECONDS = 6.0


@dataclass(kw_only=True)
class Premerge(ThreadedBenchmark):
    """Time of a step after premerging, divided by its time before, by the hot adapter's share.

    A cell is a storage type and the name of a step.
    """

    name = "premerge"
    bars: ClassVar[Mapping[str, Bar]] = {"decode_hot": at_most(1.0), "prefill_hot": at_most(1.0)}

    plot: frame.PlotFolder = None
    root: frame.Root = None

    def prepare(self) -> None:
        super().prepare()
        self._models: dict[str, tuple[SyntheticModel, SyntheticModel]] = {}

    def cells(self) -> Sequence[tuple[str, str]]:
        return [(dtype, step) for dtype in self.values["dtypes"] for step in self.values["cells"]]

    def measure(self, cell: tuple[str, str]) -> Iterator[Row]:
        dtype, name = cell
        step = self.values["cells"][name]
        before, after = self._pair(dtype)
        for share in self.values["shares"]:
            self.status(f"{name}, {dtype}, {share:.0%} hot")
            chosen = adapters_of(step["requests"], share, len(before.slots) - 1)
            for model in (before, after):
                model.stage(step["requests"], step["length"], step["computed"])
            # In the premerged model, the base is the hot adapter, which is index 0.
            slots = [after.slots[index] if index else BASE for index in chosen]
            calls = {
                "before": before.step([before.slots[index] for index in chosen]),
                "after": after.step(slots),
                "base": after.step([BASE] * len(chosen)),
            }
            timings = interleaved(
                calls, rounds=self.values["rounds"], warm=False, budget=BUDGET_SECONDS
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
        """Return engines of the base and of the premerged checkpoint; release other types'."""
        if dtype not in self._models:
            self._models.clear()
            sizes = {**self.values["sizes"], "ranks": tuple(self.values["sizes"]["ranks"])}
            checkpoint = llava.make(llava.Sizes(**sizes), self.root)
            steps = self.values["cells"].values()
            positions = max(step["requests"] * (step["length"] + 32) for step in steps)
            rows = max(s["requests"] * (s["length"] - s["computed"]) for s in steps)
            before, after = (
                SyntheticModel(model, dtype, positions, rows)
                for model in (checkpoint, premerged(checkpoint))
            )
            self._models[dtype] = before, after
        return self._models[dtype]

    def summarize(self) -> dict[str, Any]:
        """Return the largest ratio of all storage types, for each step and two shares.

        If a key ends in `hot`, all requests use the hot adapter. If it ends in `cold`, none does.
        """
        ratios: dict[tuple[str, float], list[float]] = {}
        for row in self.rows:
            ratios.setdefault((row["step"], row["hot_share"]), []).append(row["ratio"])
        return {
            f"{step}_{name}": max(ratios.get((step, share), []), default=None)
            for step in ("decode", "prefill")
            for name, share in (("hot", 1.0), ("cold", 0.0))
        }

    def tables(self) -> Iterable[RenderableType]:
        columns: dict[str, Any] = {
            "step": "step",
            "type": "dtype",
            "hot share": lambda row: percent(row["hot_share"]),
            "before, ms": "before_ms",
            "premerged, ms": "after_ms",
            "base alone, ms": "base_ms",
            "ratio": "ratio",
        }
        yield frame.table("one step before and after premerging", self.rows, columns)

    def draw(self) -> Iterable[Path]:
        return [draw_sweep(self.rows, self.plot)] if self.plot and self.rows else []


def premerged(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with its first adapter premerged. The folder is made once."""
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


def draw_sweep(rows: Sequence[Row], folder: Path) -> Path:
    """Draw each step's time after premerging, divided by its time before. Return the file."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    plot = figure.subplots()
    for step, dtype in dict.fromkeys((row["step"], row["dtype"]) for row in rows):
        chosen = [row for row in rows if (row["step"], row["dtype"]) == (step, dtype)]
        shares, ratios = ([row[key] for row in chosen] for key in ("hot_share", "ratio"))
        plot.plot(shares, ratios, "o-", label=f"{step}, {dtype}")
    plot.axhline(1.0, color="grey", linewidth=1)
    plot.set_xlabel("share of requests for the hot adapter")
    plot.set_ylabel("time of a step, premerged over before")
    plot.legend(fontsize=7)
    path = folder / "premerge.png"
    figure.savefig(path, dpi=120)
    return path
