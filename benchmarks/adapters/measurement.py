"""Measurements of the cost of many adapters, resident or not (figure 23 of the paper).

The model is the demo checkpoint. Its steps are short, so the engine's overhead per step and the
time to load an adapter weigh more here than with any larger model. All adapters have random
weights and the same rank, and change all projections.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.adapters.requests import draw_names, save_adapters
from benchmarks.driver import WORDS, Driver, DriverRequest, Outcome
from benchmarks.roofline import Roofline
from vlora.adapters.files import read_adapter
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.model.decoder_config import load_config

BLOCK = 16
CONCURRENT_REQUESTS = 16
"""Number of requests of a trace that are submitted at the same time."""


@dataclass(frozen=True)
class AdaptersResult:
    """Result of one setting of one part of the benchmark.

    outcome: outcome of the repeat with the median throughput. In parts without repeats, it is the
        outcome of all runs together.
    figures: further columns of the row.
    """

    part: str
    setting: str
    outcome: Outcome
    figures: Mapping[str, Any]

    def as_row(self) -> dict[str, Any]:
        row = {"what": self.part, "setting": self.setting}
        return {**row, **self.outcome.as_row(), **self.figures}


class ManyAdapters:
    """Measurements on one checkpoint, with engines that serve some of many adapter folders."""

    def __init__(self, model: Path, scratch: Path, grid: Mapping[str, Any]) -> None:
        self._model = model
        self._scratch = scratch
        self._grid = grid
        count = max(grid["burst"]["adapters"], grid["traces"]["registered"], *grid["resident"])
        self.names = save_adapters(scratch / "all", load_config(model), grid["rank"], count)
        engine = Engine(self.options(self.link_folders("one", self.names[:1])))
        handle = engine.adapters.handle(self.names[0])
        # All adapters have the same rank and targets, hence the same sizes.
        self.host_bytes = handle.description.host_bytes
        self.packed_bytes = engine.adapters.tiers.packed_bytes(handle)
        self.pool_bytes = engine.adapters.tiers.pages_of(handle) * engine.memory.kv_cache.page_bytes
        """Bytes of the pages of one resident adapter."""

    def options(self, root: Path, **options: Any) -> Options:
        """Return options with a KV cache just large enough for the concurrent requests.

        The engine adds the memory for adapters (`adapter_pool_bytes`) to that of the cache.
        """
        length = self._grid["prompt"] + self._grid["output"] + BLOCK
        sequences = max(options.get("max_num_seqs", 0), self._grid["sequences"])
        defaults: dict[str, Any] = {
            "max_num_seqs": self._grid["sequences"],
            "kv_cache_tokens": sequences * length,
            "block_size": BLOCK,
            "max_model_len": length,
            "merging": "off",
            "enable_prefix_caching": False,
        }
        return Options(model=self._model, adapters=root, **(defaults | options))

    def link_folders(self, name: str, adapters: Sequence[str], aliases: int = 0) -> Path:
        """Return a new folder with a link to each adapter and `aliases` additional links."""
        root = self._scratch / name
        root.mkdir()
        for adapter in adapters:
            (root / adapter).symlink_to(self._scratch / "all" / adapter)
        for index in range(aliases):
            target = self._scratch / "all" / adapters[index % len(adapters)]
            (root / f"z{index:04}").symlink_to(target)
        return root

    def requests(self, adapters: Sequence[str], seed: int, shared: int = 0) -> list[DriverRequest]:
        """Return one request per name in `adapters`.

        shared: number of leading prompt tokens that all requests for an adapter share. They do
            not depend on the seed.
        """
        rng = random.Random(seed)

        def prompt(name: str) -> str:
            prefix = random.Random(name).choices(WORDS, k=shared // 2)
            return "<s>" + " ".join(prefix + rng.choices(WORDS, k=self._grid["prompt"] // 2))

        return [DriverRequest(prompt(name), name, self._grid["output"]) for name in adapters]

    def run_registered(self) -> list[AdaptersResult]:
        """Measure requests for a few adapters, on an engine that knows only these and on one that
        knows many more.
        """
        few, many = self._grid["registered"]
        in_use = self.names[:few]
        roots = [
            self.link_folders("few", in_use),
            self.link_folders("many", in_use, many - few),
        ]
        # The second engine has only the descriptions of the other adapters in memory.
        host = few * self.host_bytes
        return self._interleaved(
            "registered",
            [
                (str(count), root, {"adapter_host_bytes": host})
                for count, root in zip((few, many), roots, strict=True)
            ],
            [in_use[i % few] for i in range(4 * self._grid["sequences"])],
        )

    def run_resident(self) -> list[AdaptersResult]:
        """Measure requests for a few adapters, on an engine in which only these are resident and on
        one in which many are.
        """
        few, many = self._grid["resident"]
        names = [self.names[i % few] for i in range(4 * few)]
        settings: list[tuple[str, Path, Mapping[str, Any]]] = [
            (str(count), self.link_folders(f"resident{count}", self.names[:count]), {})
            for count in (few, many)
        ]
        return self._interleaved("resident", settings, names)

    def run_distinct(self, roofline: Roofline) -> list[AdaptersResult]:
        """Measure steps with a growing number of adapters, and compare them with a prediction.

        The prediction is the time of the step with the fewest adapters (the grid must contain 1),
        plus the time to read the bytes of the other adapters. `over_predicted` is the measured time
        divided by this prediction.
        """
        batch = max(self._grid["distinct"])
        root = self.link_folders("distinct", self.names[:batch])
        driver = Driver(Engine(self.options(root, max_num_seqs=batch)))
        rate = roofline.measure_bandwidth(batch * self.packed_bytes, 0.2)
        outcomes: dict[int, list[Outcome]] = {count: [] for count in self._grid["distinct"]}
        for repeat in range(self._grid["repeats"]):
            for count in outcomes:
                names = [self.names[i % count] for i in range(batch)]
                outcomes[count].append(driver.run(self.requests(names, repeat), watch=False))
        driver.close()
        base = _middle(outcomes[min(outcomes)])
        results = []
        for count, repeats in outcomes.items():
            outcome = _middle(repeats)
            predicted = median(base.steps) + (count - 1) * self.packed_bytes / rate
            over = median(outcome.steps) / predicted
            figures = {"over_predicted": round(over, 3)}
            results.append(AdaptersResult("distinct", str(count), outcome, figures))
        return results

    def run_burst(self) -> list[AdaptersResult]:
        """Measure a burst of requests over many adapters.

        In the first run all adapters fit into the pool. In the second run few fit into the pool
        and into host memory, so most are read from disk. The second run's figure `limit` is an
        upper bound of its throughput, as a fraction of the throughput of the first run.
        """
        grid = self._grid["burst"]
        names = self.names[: grid["adapters"]]
        order = [names[i % len(names)] for i in range(grid["requests"])]
        random.Random(0).shuffle(order)
        root = self.link_folders("burst", names)
        results: list[AdaptersResult] = []
        for setting, in_pool, in_host in (
            ("resident", len(names), len(names)),
            ("room for few", grid["room"], grid["host"]),
        ):
            options = self.options(
                root,
                adapter_pool_bytes=in_pool * self.pool_bytes,
                adapter_host_bytes=in_host * self.host_bytes,
            )
            driver = Driver(Engine(options))
            outcome = driver.run(self.requests(order, 1))
            driver.close()
            figures = tier_figures(driver.engine)
            if results:
                # The second run takes at least as long as its loads, which run one by one.
                load = median(_load_seconds(driver.engine, name) for name in names)
                all_loads = (len(names) - grid["host"]) * load
                figures |= {"load_ms": round(load * 1e3, 3)}
                figures |= {"limit": round(min(1.0, results[0].outcome.span / all_loads), 3)}
            results.append(AdaptersResult("burst", setting, outcome, figures))
        return results

    def run_traces(self, status: Callable[[str], None]) -> list[AdaptersResult]:
        """Measure traces whose adapters fit, or do not fit, into the pool and into host memory."""
        grid = self._grid["traces"]
        names = self.names[: grid["registered"]]
        root = self.link_folders("traces", names)
        results = []
        for kind in grid["kinds"]:
            order = draw_names(kind, names, grid["requests"])
            for in_pool in grid["room"]:
                status(f"{kind}, room for {in_pool}")
                options = self.options(
                    root,
                    adapter_pool_bytes=in_pool * self.pool_bytes,
                    adapter_host_bytes=grid["host"] * self.host_bytes,
                )
                driver = Driver(Engine(options))
                outcomes = [
                    driver.run(self.requests(order[start : start + CONCURRENT_REQUESTS], start))
                    for start in range(0, len(order), CONCURRENT_REQUESTS)
                ]
                setting = f"{kind}, room for {in_pool} of {len(names)}"
                figures = tier_figures(driver.engine)
                results.append(AdaptersResult("trace", setting, Outcome.joined(outcomes), figures))
                driver.close()
        return results

    def _interleaved(
        self,
        part: str,
        settings: Sequence[tuple[str, Path, Mapping[str, Any]]],
        names: Sequence[str],
    ) -> list[AdaptersResult]:
        """Measure the same requests on two engines, which take turns in running first.

        In each round, the figures of the engine with `settings[1]` are divided by those of the
        engine with `settings[0]`. The result for `settings[1]` also has the medians of these
        ratios.
        """
        drivers = [Driver(Engine(self.options(root, **options))) for _, root, options in settings]
        outcomes: list[list[Outcome]] = [[] for _ in settings]
        for number in range(-1, self._grid["rounds"]):
            sides = list(zip(drivers, outcomes, strict=True))
            for driver, own_outcomes in sides if number % 2 else sides[::-1]:
                outcome = driver.run(self.requests(names, number))
                if number >= 0:
                    own_outcomes.append(outcome)
        for driver in drivers:
            driver.close()
        pairs = list(zip(*outcomes, strict=True))
        ratios = {
            "throughput_over_first": median(b.throughput / a.throughput for a, b in pairs),
            "latency_over_first": median(b.token_latency / a.token_latency for a, b in pairs),
        }
        rounded = {key: round(ratio, 3) for key, ratio in ratios.items()}
        return [
            AdaptersResult(part, setting, _middle(repeats), tier_figures(driver.engine) | figures)
            for (setting, _, _), repeats, driver, figures in zip(
                settings, outcomes, drivers, ({}, rounded), strict=True
            )
        ]


def tier_figures(engine: Engine) -> dict[str, Any]:
    """Return the share of requests whose adapter was in each tier, and counts of events."""
    counters = engine.adapters.tiers.counters
    requests = max(1, counters.hits + counters.host_hits + counters.misses)
    return {
        "pool_hits": round(counters.hits / requests, 3),
        "host_hits": round(counters.host_hits / requests, 3),
        "misses": round(counters.misses / requests, 3),
        "loads": counters.loads,
        "evictions": counters.evictions,
        "moved": engine.pool.pages_moved,
    }


def summarize(results: Sequence[AdaptersResult]) -> dict[str, Any]:
    """Return the summary, with None for parts that were not run."""
    last = {result.part: result for result in results if result.part in ("registered", "resident")}
    distinct = [r.figures["over_predicted"] for r in results if r.part == "distinct"]
    burst = {result.setting: result for result in results if result.part == "burst"}
    fits, overcommitted = burst.get("resident"), burst.get("room for few")
    summary: dict[str, Any] = {
        "registered_2000_vs_5": _figure(last.get("registered"), "throughput_over_first"),
        "resident_64_vs_8": _figure(last.get("resident"), "latency_over_first"),
        "distinct_over_predicted": max(distinct, default=None),
    }
    keys = ("overcommit_throughput_ratio", "overcommit_limit", "overcommit_p99_s")
    summary |= dict.fromkeys((*keys, "overcommit_failed", "step_beside_load_over_step"))
    if fits is not None and overcommitted is not None:
        outcome = overcommitted.outcome
        ratio = outcome.throughput / fits.outcome.throughput
        summary |= {
            "overcommit_throughput_ratio": round(ratio, 3),
            "overcommit_limit": overcommitted.figures["limit"],
            "overcommit_p99_s": outcome.as_row()["p99_s"],
            "overcommit_failed": outcome.failed,
            "step_beside_load_over_step": _loading_over_quiet(outcome),
        }
    summary["steps_that_waited_for_disk"] = sum(r.outcome.disk_steps for r in results)
    return summary


def _figure(result: AdaptersResult | None, key: str) -> Any:
    return None if result is None else result.figures[key]


def _loading_over_quiet(outcome: Outcome) -> float | None:
    """Return the median time of `loading_steps` divided by that of `quiet_steps`, or None."""
    if not outcome.loading_steps or not outcome.quiet_steps:
        return None
    return round(median(outcome.loading_steps) / median(outcome.quiet_steps), 3)


def _load_seconds(engine: Engine, name: str) -> float:
    """Return the seconds an idle engine takes to read an adapter's files into host memory."""
    handle = engine.adapters.handle(name)
    started = perf_counter()
    read_adapter(handle.folder, handle.description)
    return perf_counter() - started


def _middle(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome with the median throughput."""
    return sorted(outcomes, key=lambda outcome: outcome.throughput)[len(outcomes) // 2]
