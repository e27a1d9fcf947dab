"""`vlora bench adapters`: what many adapters cost, resident and not (the paper's figure 23).

On the demo checkpoint, whose steps are short: what the engine adds to a step and what a load takes
weigh more here than on any larger model. Adapters are random, of one rank, on all projections.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.driver import Ask, Driver, Outcome
from benchmarks.roofline import Limits
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.lora.adapter import read_adapter
from vlora.lora.slab import ATTENTION
from vlora.model.decoder_config import DecoderConfig, load_config

WORDS = tuple("what is the number of red things in this picture and where are they".split())  # noqa: SIM905
ZIPF = 1.0
BLOCK = 16
TOGETHER = 16
"""Requests of a trace that come at once."""


@dataclass(frozen=True)
class Row:
    """One cell: what was varied, and the outcome of the middle repeat."""

    what: str
    setting: str
    outcome: Outcome
    more: Mapping[str, Any]

    def as_row(self) -> dict[str, Any]:
        return {"what": self.what, "setting": self.setting, **self.outcome.as_row(), **self.more}


def load_grid(path: Path, *, quick: bool) -> dict[str, Any]:
    given: dict[str, Any] = json.loads(path.read_text())
    return given | (given["quick"] if quick else {})


def save_adapters(root: Path, config: DecoderConfig, rank: int, count: int) -> list[str]:
    """So many folders of random weights, as PEFT saves them; their names."""
    generator = torch.Generator().manual_seed(rank)
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    described |= {"target_modules": sorted(config.target_shapes)}
    names = [f"a{index:04}" for index in range(count)]
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "adapter_config.json").write_text(json.dumps(described))
        weights = {}
        for layer in range(config.layers):
            for target, (d_out, d_in) in config.target_shapes.items():
                block = "self_attn" if target in ATTENTION else "mlp"
                stem = f"base_model.model.{config.prefix}layers.{layer}.{block}.{target}"
                for half, shape in (("A", (rank, d_in)), ("B", (d_out, rank))):
                    drawn = torch.empty(shape).normal_(0.0, 0.02, generator=generator)
                    weights[f"{stem}.lora_{half}.weight"] = drawn
        save_file(weights, root / name / "adapter_model.safetensors")
    return names


class Bench:
    """One checkpoint, one set of adapter folders, engines over them."""

    def __init__(self, model: Path, scratch: Path, grid: Mapping[str, Any]) -> None:
        self._model = model
        self._scratch = scratch
        self._grid = grid
        config = load_config(model)
        most = max(grid["burst"]["adapters"], grid["traces"]["registered"], *grid["resident"])
        self.names = save_adapters(scratch / "all", config, grid["rank"], most)
        self.run_bytes = self._run_bytes()
        self.host_bytes = self._host_bytes

    def _run_bytes(self) -> int:
        """Of one adapter's pages."""
        engine = Engine(self.options(self.linked("one", self.names[:1])))
        handle = engine.adapters.handle(self.names[0])
        self._host_bytes = handle.description.host_bytes
        self.packed_bytes = engine.adapters.packed_bytes(handle)
        return engine.adapters.pages_of(handle) * engine.memory.kv_cache.page_bytes

    def options(self, root: Path, **more: Any) -> Options:
        """Keys and values for just what runs at once: adapters have their own room."""
        length = self._grid["prompt"] + self._grid["output"] + BLOCK
        given: dict[str, Any] = {
            "max_num_seqs": self._grid["sequences"],
            "kv_cache_tokens": max(more.get("max_num_seqs", 0), self._grid["sequences"]) * length,
            "block_size": BLOCK,
            "max_model_len": length,
            "merging": "off",
            "enable_prefix_caching": False,
        }
        return Options(model=self._model, adapters=root, **(given | more))

    def linked(self, name: str, real: Sequence[str], aliases: int = 0) -> Path:
        """A root with these adapters, and so many more names for them: links, as in a hub."""
        root = self._scratch / name
        root.mkdir()
        for adapter in real:
            (root / adapter).symlink_to(self._scratch / "all" / adapter)
        for index in range(aliases):
            target = self._scratch / "all" / real[index % len(real)]
            (root / f"z{index:04}").symlink_to(target)
        return root

    def asks(self, adapters: Sequence[str], seed: int, shared: int = 0) -> list[Ask]:
        """shared: tokens that all prompts of one adapter begin with, whatever the seed."""
        rng = random.Random(seed)

        def prompt(name: str) -> str:
            first = random.Random(name).choices(WORDS, k=shared // 2)
            return "<s>" + " ".join(first + rng.choices(WORDS, k=self._grid["prompt"] // 2))

        return [Ask(prompt(name), name, self._grid["output"]) for name in adapters]

    def registered(self) -> list[Row]:
        """The same working set of five, few and many others known."""
        few, many = self._grid["registered"]
        working = self.names[:few]
        roots = [
            self.linked("few", working),
            self.linked("many", working, many - few),
        ]
        # The others are known and not in memory: described alone.
        host = few * self.host_bytes
        return self._side_by_side(
            "registered",
            [
                (str(count), root, {"adapter_host_bytes": host})
                for count, root in zip((few, many), roots, strict=True)
            ],
            [working[i % few] for i in range(4 * self._grid["sequences"])],
        )

    def resident(self) -> list[Row]:
        """Eight distinct adapters a batch, with few and many others resident."""
        few, many = self._grid["resident"]
        asked = [self.names[i % few] for i in range(4 * few)]
        settings: list[tuple[str, Path, Mapping[str, Any]]] = [
            (str(count), self.linked(f"resident{count}", self.names[:count]), {})
            for count in (few, many)
        ]
        return self._side_by_side("resident", settings, asked)

    def distinct(self, limits: Limits) -> list[Row]:
        """More and more distinct adapters in a batch of 32, and what their bytes predict."""
        most = max(self._grid["distinct"])
        root = self.linked("distinct", self.names[:most])
        driver = Driver(Engine(self.options(root, max_num_seqs=most)))
        rate = limits.measure_bandwidth(most * self.packed_bytes, 0.2)
        found: dict[int, list[Outcome]] = {count: [] for count in self._grid["distinct"]}
        for repeat in range(self._grid["repeats"]):
            for count, outcomes in found.items():
                asked = [self.names[i % count] for i in range(most)]
                outcomes.append(driver.run(self.asks(asked, repeat), watch=False))
        driver.close()
        rows = []
        base = _middle(found[min(found)])
        for count, outcomes in found.items():
            outcome = _middle(outcomes)
            step = median(base.steps) + (count - 1) * self.packed_bytes / rate
            over = median(outcome.steps) / step
            rows.append(Row("distinct", str(count), outcome, {"over_predicted": round(over, 3)}))
        return rows

    def burst(self) -> list[Row]:
        """All at once over many adapters: with room for all, and for few in the pool and in host
        memory, so that most come from disk."""
        given = self._grid["burst"]
        names = self.names[: given["adapters"]]
        asked = [names[i % len(names)] for i in range(given["requests"])]
        random.Random(0).shuffle(asked)
        root = self.linked("burst", names)
        rows: list[Row] = []
        for setting, room, host in (
            ("resident", len(names), len(names)),
            ("room for few", given["room"], given["host"]),
        ):
            options = self.options(
                root,
                adapter_pool_bytes=room * self.run_bytes,
                adapter_host_bytes=host * self.host_bytes,
            )
            driver = Driver(Engine(options))
            outcome = driver.run(self.asks(asked, 1))
            driver.close()
            more = tiers(driver.engine)
            if rows:
                load = median(_load_seconds(driver.engine, name) for name in names)
                needed = (len(names) - given["host"]) * load
                more |= {"load_ms": round(load * 1e3, 3)}
                more |= {"limit": round(min(1.0, rows[0].outcome.span / needed), 3)}
            rows.append(Row("burst", setting, outcome, more))
        return rows

    def traces(self, told: Callable[[str], None]) -> list[Row]:
        """Who is asked for how often: hit rates by tier, with the working set within and beyond
        the pool's and the host's budgets."""
        given = self._grid["traces"]
        names = self.names[: given["registered"]]
        root = self.linked("traces", names)
        rows = []
        for kind in given["kinds"]:
            asked = draw(kind, names, given["requests"])
            for room in given["room"]:
                told(f"{kind}, room for {room}")
                options = self.options(
                    root,
                    adapter_pool_bytes=room * self.run_bytes,
                    adapter_host_bytes=given["host"] * self.host_bytes,
                )
                driver = Driver(Engine(options))
                outcomes = [
                    driver.run(self.asks(asked[start : start + TOGETHER], start))
                    for start in range(0, len(asked), TOGETHER)
                ]
                setting = f"{kind}, room for {room} of {len(names)}"
                rows.append(Row("trace", setting, joined(outcomes), tiers(driver.engine)))
                driver.close()
        return rows

    def _side_by_side(
        self,
        what: str,
        settings: Sequence[tuple[str, Path, Mapping[str, Any]]],
        asked: Sequence[str],
    ) -> list[Row]:
        """The same load on one engine after the other, round by round, the first of a round the
        second of the next. The second's row has the medians of its ratios to the first, by round.
        """
        drivers = [Driver(Engine(self.options(root, **more))) for _, root, more in settings]
        found: list[list[Outcome]] = [[] for _ in settings]
        for number in range(-1, self._grid["rounds"]):
            sides = list(zip(drivers, found, strict=True))
            for driver, outcomes in sides if number % 2 else sides[::-1]:
                outcome = driver.run(self.asks(asked, number))
                if number >= 0:
                    outcomes.append(outcome)
        for driver in drivers:
            driver.close()
        pairs = list(zip(*found, strict=True))
        over = {
            "throughput_over_first": median(b.throughput / a.throughput for a, b in pairs),
            "latency_over_first": median(b.token_latency / a.token_latency for a, b in pairs),
        }
        rows = zip(settings, found, drivers, ({}, over), strict=True)
        return [
            Row(
                what,
                setting,
                _middle(outcomes),
                tiers(driver.engine) | {key: round(ratio, 3) for key, ratio in more.items()},
            )
            for (setting, _, _), outcomes, driver, more in rows
        ]


def _load_seconds(engine: Engine, name: str) -> float:
    """From its files to host memory, with nothing beside it."""
    handle = engine.adapters.handle(name)
    began = perf_counter()
    read_adapter(name, handle.folder, handle.description, engine.config.hidden)
    return perf_counter() - began


def draw(kind: str, names: Sequence[str], count: int) -> list[str]:
    """zipf: few are asked for most; uniform; churning: a working set of eight that moves on."""
    rng = random.Random(kind)
    if kind == "zipf":
        weights = [1 / (rank + 1) ** ZIPF for rank in range(len(names))]
        return rng.choices(names, weights, k=count)
    if kind == "uniform":
        return rng.choices(names, k=count)
    return [names[(i // 40 * 4 + rng.randrange(8)) % len(names)] for i in range(count)]


def _middle(outcomes: Sequence[Outcome]) -> Outcome:
    """The one of the median throughput."""
    return sorted(outcomes, key=lambda one: one.throughput)[len(outcomes) // 2]


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """Loads one after another, each from its own start."""
    whole = Outcome()
    for one in outcomes:
        whole.first += one.first
        whole.end += one.end
        whole.steps += one.steps
        whole.beside += one.beside
        whole.alone += one.alone
        whole.stalled += one.stalled
        whole.span += one.span
        whole.disk_steps += one.disk_steps
        whole.rows += one.rows
        whole.tokens += one.tokens
        whole.failed += one.failed
    return whole


def tiers(engine: Engine) -> dict[str, Any]:
    """Where requests found their adapters."""
    found = engine.adapters.counters
    asked = max(1, found.hits + found.host_hits + found.misses)
    return {
        "pool_hits": round(found.hits / asked, 3),
        "host_hits": round(found.host_hits / asked, 3),
        "misses": round(found.misses / asked, 3),
        "loads": found.loads,
        "evictions": found.evictions,
        "moved": engine.pool.pages_moved,
    }


def _beside(outcome: Outcome) -> float | None:
    """Steps while something was loaded or packed over the others, medians."""
    if not outcome.beside or not outcome.alone:
        return None
    return round(median(outcome.beside) / median(outcome.alone), 3)


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """The keys of the issue."""
    found = {(row.what, row.setting): row for row in rows}

    def ratio(what: str, one: str, other: str) -> float:
        a, b = found[what, one].outcome, found[what, other].outcome
        return round(a.throughput / b.throughput, 3)

    registered, resident = (
        next(row.more for row in rows if row.what == what and "latency_over_first" in row.more)
        for what in ("registered", "resident")
    )
    distinct = [row.more["over_predicted"] for row in rows if row.what == "distinct"]
    return {
        "registered_2000_vs_5": registered["throughput_over_first"],
        "resident_64_vs_8": resident["latency_over_first"],
        "distinct_over_predicted": max(distinct),
        "overcommit_throughput_ratio": ratio("burst", "room for few", "resident"),
        "overcommit_limit": found["burst", "room for few"].more["limit"],
        "overcommit_p99_s": found["burst", "room for few"].outcome.as_row()["p99_s"],
        "overcommit_failed": found["burst", "room for few"].outcome.failed,
        "step_beside_load_over_step": _beside(found["burst", "room for few"].outcome),
        "steps_that_waited_for_disk": sum(row.outcome.disk_steps for row in rows),
    }
