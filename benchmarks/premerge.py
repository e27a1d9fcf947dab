"""The premerge benchmark: the same steps on the base model and on a premerged base.

It repeats figure 3 of the paper that `vlora.offline.premerge` follows. Premerging folds the hot
adapter into the base weights. The hot adapter's share of the requests goes from 0 to 1; the other
requests are spread over the cold adapters. The model is the mid-size one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, ClassVar

from benchmarks import llava
from benchmarks.frame import Row, ThreadedBenchmark, matching
from benchmarks.llava import Checkpoint
from benchmarks.machine import interleaved
from benchmarks.models import SyntheticModel
from benchmarks.replay import PolicyEngine, Replay
from vlora.adapters.files import load_adapter
from vlora.atmm.search.timing import rotated
from vlora.ids import BASE
from vlora.load.trace import Workload
from vlora.model.decoder_config import load_config
from vlora.model.loader import adapter_shape
from vlora.offline.premerge import premerge

BUDGET_SECONDS = 6.0
POLICIES = ("unmerge_only", "paper")
SKEW, LOAD, SCALE = 0.7, 0.7, 1 / 8
"""Share of the hot adapter in the served trace, its rate as a share of the capacity, and the scale
of its lengths."""


@dataclass(kw_only=True)
class Premerge(ThreadedBenchmark):
    """Time of a step after premerging, divided by its time before, by the hot adapter's share.

    A cell is a storage type.
    """

    name = "premerge"
    bars: ClassVar = {"decode_hot": "≤ 1", "prefill_hot": "≤ 1"}
    shown: ClassVar = {
        "one step before and after premerging": (
            "step dtype hot_share before_ms after_ms base_ms ratio noise"
        ),
        "served traces, mean latency of three replays": "dtype policy model switches mean_s",
    }

    def cells(self) -> Sequence[str]:
        types: Sequence[str] = self.values["dtypes"]
        return types

    def measure(self, cell: str) -> Iterator[Row]:
        sizes = self.values["sizes"] | {"ranks": tuple(self.values["sizes"]["ranks"])}
        checkpoint = llava.make(llava.Sizes(**sizes), self.root)
        steps = self.values["cells"]
        positions = max(step["requests"] * (step["length"] + 32) for step in steps.values())
        rows = max(s["requests"] * (s["length"] - s["computed"]) for s in steps.values())
        before, after = (
            SyntheticModel(model, cell, positions, rows)
            for model in (checkpoint, premerged(checkpoint))
        )
        for name, step in steps.items():
            for share in self.values["shares"]:
                self.status(f"{name}, {cell}, {share:.0%} hot")
                # Index 0 is the hot adapter; the other requests use the cold ones in turn.
                hot, cold = round(step["requests"] * share), len(before.slots) - 1
                chosen = [0] * hot + [1 + i % cold for i in range(step["requests"] - hot)]
                for model in (before, after):
                    model.stage(step["requests"], step["length"], step["computed"])
                # In the premerged model, the base is the hot adapter.
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
                    "dtype": cell,
                    "hot_share": share,
                    **{f"{key}_ms": t.median * 1e3 for key, t in timings.items()},
                    "ratio": timings["after"].median / timings["before"].median,
                    "noise": max(t.noise for t in timings.values()),
                }
        yield from self._served(checkpoint, cell)

    def _served(self, checkpoint: Checkpoint, dtype: str) -> Iterator[Row]:
        """Replay one trace before and after premerging, in turn."""
        names = checkpoint.adapter_names
        work = Workload("retrieval", SKEW, len(names), scale=SCALE)
        # With this seed, number 0 is the hot adapter.
        seed, count = len(names), self.values["traced"]
        engines = {
            "before": PolicyEngine(checkpoint, dtype),
            "after": PolicyEngine(premerged(checkpoint), dtype, names),
        }
        at_once = engines["before"].simulate("unmerge_only", work.trace(seed, 1e9, count))
        trace = work.trace(seed, LOAD * count / at_once.outcome.span, count)
        runs: dict[str, list[Replay]] = {f"{p} {model}": [] for p in POLICIES for model in engines}
        for turn in range(3):
            for name in rotated([*runs], turn):
                policy, model = name.split()
                self.status(f"{policy}, {dtype}, {model} premerging")
                runs[name].append(engines[model].measure(policy, trace))
        for name, own in runs.items():
            policy, model = name.split()
            yield {
                "dtype": dtype,
                "policy": policy,
                "model": model,
                "switches": fmean(replay.switches for replay in own),
                "mean_s": median(fmean(replay.outcome.end) for replay in own),
            }

    def summarize(self) -> dict[str, Any]:
        """Return the largest ratio of all storage types, for each step and two shares.

        If a key ends in `hot`, all requests use the hot adapter. If it ends in `cold`, none does.
        Those of the served trace have the name of the policy.
        """
        summary: dict[str, Any] = {}
        for step in ("decode", "prefill"):
            for name, share in (("hot", 1.0), ("cold", 0.0)):
                ratios = (row["ratio"] for row in matching(self.rows, step=step, hot_share=share))
                summary[f"{step}_{name}"] = max(ratios, default=None)
        for policy in POLICIES:
            means = {
                model: [row["mean_s"] for row in matching(self.rows, policy=policy, model=model)]
                for model in ("before", "after")
            }
            ratios = (after / before for before, after in zip(*means.values(), strict=True))
            summary[f"served_{policy}"] = max(ratios, default=None)
        return summary


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
