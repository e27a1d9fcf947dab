"""The adapters benchmark: many registered or resident adapters, and more than fit (figure 23).

The model is the demo checkpoint. Its steps are short, so the engine's overhead per step and the
time to load an adapter weigh more here than with any larger model. All adapters have random
weights and the same rank, and change all projections.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch

from benchmarks.driver import Driver, DriverRequest, Outcome
from benchmarks.frame import DemoBenchmark, Row, matching
from benchmarks.llava import save_adapter
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.load.contents import WORDS
from vlora.model.decoder_config import DecoderConfig, load_config
from vlora.weights.slab import ATTENTION

BLOCK = 16


@dataclass(kw_only=True)
class Adapters(DemoBenchmark):
    """Throughput and latency with many adapters in the pool, in host memory and on disk."""

    name = "adapters"
    bars: ClassVar = {
        "registered_2000_vs_5": "≥ 0.95",
        "resident_64_vs_8": "≤ 1.05",
        "distinct_over_predicted": "≤ 1.1",
        "overcommit_throughput_ratio": "≥ 0.7",
        "overcommit_failed": "≤ 0",
        "steps_that_waited_for_disk": "≤ 0",
    }

    shown: ClassVar = {
        "many adapters; hits and misses: shares of the requests": (
            "what setting pool_hits host_hits misses loads failed tokens_per_s token_latency_ms"
            " p99_s step_ms"
        )
    }

    def cells(self) -> Sequence[Callable[[], Iterator[Row]]]:
        self.status("making adapters")
        scratch = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        many = ManyAdapters(self.model, scratch, self.values)
        rate = self.roofline(self.threads).measure_bandwidth
        distinct = lambda: many.run_distinct(rate)  # noqa: E731
        return [many.run_registered, many.run_resident, distinct, many.run_burst]

    def measure(self, cell: Callable[[], Iterator[Row]]) -> Iterator[Row]:
        for row in cell():
            self.status(f"{row['what']}: {row['setting']}")
            yield row

    def summarize(self) -> dict[str, Any]:
        return summarize(self.rows)


class ManyAdapters:
    """Measurements on one checkpoint, with engines that serve some of many adapter folders.

    Each row has the figures of the repeat with the median throughput. In parts without repeats, it
    has those of all runs together.
    """

    def __init__(self, model: Path, scratch: Path, grid: Mapping[str, Any]) -> None:
        self._model, self._scratch, self._grid = model, scratch, grid
        count = max(grid["burst"]["adapters"], *grid["resident"])
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

    def requests(self, adapters: Sequence[str], seed: int) -> list[DriverRequest]:
        """Return one request per name in `adapters`."""
        rng = random.Random(seed)
        length, output = self._grid["prompt"] // 2, self._grid["output"]
        prompts = ["<s>" + " ".join(rng.choices(WORDS, k=length)) for _ in adapters]
        return [DriverRequest(*pair, output) for pair in zip(prompts, adapters, strict=True)]

    def run_registered(self) -> Iterator[Row]:
        """Measure requests for a few adapters, on an engine that knows only these and on one that
        knows many more.
        """
        few, many = self._grid["registered"]
        in_use = self.names[:few]
        roots = {
            str(few): self.link_folders("few", in_use),
            str(many): self.link_folders("many", in_use, many - few),
        }
        order = [in_use[i % few] for i in range(4 * self._grid["sequences"])]
        # The second engine has only the descriptions of the other adapters in memory.
        return self._compared("registered", roots, order, adapter_host_bytes=few * self.host_bytes)

    def run_resident(self) -> Iterator[Row]:
        """Measure requests for a few adapters, on an engine in which only these are resident and on
        one in which many are.
        """
        counts = self._grid["resident"]
        folders = [self.link_folders(f"resident{count}", self.names[:count]) for count in counts]
        order = [self.names[i % counts[0]] for i in range(4 * counts[0])]
        return self._compared("resident", dict(zip(map(str, counts), folders, strict=True)), order)

    def _compared(
        self, part: str, roots: Mapping[str, Path], names: Sequence[str], **options: Any
    ) -> Iterator[Row]:
        """Measure the same requests on two engines, which take turns in running first.

        The row of the second engine has the medians of the rounds' ratios to the first engine.
        """
        drivers = [Driver(Engine(self.options(root, **options))) for root in roots.values()]
        rounds = [self.requests(names, number) for number in range(-1, self._grid["rounds"])]
        outcomes = [own[1:] for own in take_turns(drivers, rounds, watch=True)]
        pairs = list(zip(*outcomes, strict=True))
        over = {
            "throughput_over_first": median(b.throughput / a.throughput for a, b in pairs),
            "latency_over_first": median(b.token_latency / a.token_latency for a, b in pairs),
        }
        for setting, repeats, driver, own in zip(roots, outcomes, drivers, ({}, over), strict=True):
            yield row_of(part, setting, _middle(repeats), tier_figures(driver.engine) | own)

    def run_distinct(self, bandwidth: Callable[[int, float], float]) -> Iterator[Row]:
        """Measure steps with a growing number of adapters, and compare them with a prediction.

        The prediction is the time of the step with the fewest adapters (the grid must contain 1),
        plus the time to read the bytes of the other adapters. `over_predicted` is the measured time
        divided by this prediction.
        """
        batch = max(self._grid["distinct"])
        root = self.link_folders("distinct", self.names[:batch])
        driver = Driver(Engine(self.options(root, max_num_seqs=batch)))
        rate = bandwidth(batch * self.packed_bytes, 0.2)
        outcomes: dict[int, list[Outcome]] = {count: [] for count in self._grid["distinct"]}
        for repeat in range(self._grid["repeats"]):
            for count in outcomes:
                names = [self.names[i % count] for i in range(batch)]
                outcomes[count].append(driver.run(self.requests(names, repeat)))
        driver.close()
        base = median(_middle(outcomes[min(outcomes)]).steps)
        for count, repeats in outcomes.items():
            outcome = _middle(repeats)
            over = median(outcome.steps) / (base + (count - 1) * self.packed_bytes / rate)
            yield row_of("distinct", str(count), outcome, {"over_predicted": over})

    def run_burst(self) -> Iterator[Row]:
        """Measure a burst of requests over many adapters.

        In the first run all adapters fit into the pool. In the second run few fit into the pool
        and into host memory, so most are read from disk.
        """
        grid = self._grid["burst"]
        names = self.names[: grid["adapters"]]
        order = [names[i % len(names)] for i in range(grid["requests"])]
        random.Random(0).shuffle(order)
        root = self.link_folders("burst", names)

        def run(in_pool: int, in_host: int) -> tuple[Engine, Outcome]:
            sizes = {"adapter_pool_bytes": in_pool * self.pool_bytes}
            sizes |= {"adapter_host_bytes": in_host * self.host_bytes}
            driver = Driver(Engine(self.options(root, **sizes)))
            outcome = driver.run(self.requests(order, 1), watch=True)
            driver.close()
            return driver.engine, outcome

        engine, fits = run(len(names), len(names))
        yield row_of("burst", "resident", fits, tier_figures(engine))
        engine, outcome = run(grid["room"], grid["host"])
        figures = tier_figures(engine) | {"over_first": outcome.throughput / fits.throughput}
        yield row_of("burst", "room for few", outcome, figures)


def take_turns(
    drivers: Sequence[Driver], rounds: Iterable[Sequence[DriverRequest]], *, watch: bool = False
) -> list[list[Outcome]]:
    """Run each round on all drivers, which take turns in being first, and close them.

    Return the outcomes of each driver.
    """
    outcomes: list[list[Outcome]] = [[] for _ in drivers]
    for number, requests in enumerate(rounds):
        for index in range(len(drivers))[:: 1 if number % 2 else -1]:
            outcomes[index].append(drivers[index].run(requests, watch=watch))
    for driver in drivers:
        driver.close()
    return outcomes


def row_of(part: str, setting: str, outcome: Outcome, figures: Mapping[str, Any]) -> Row:
    return {"what": part, "setting": setting, **outcome.as_row(), **figures}


def tier_figures(engine: Engine) -> Row:
    """Return the share of requests whose adapter was in each tier, and counts of events."""
    counters = engine.adapters.tiers.counters
    requests = max(1, counters.hits + counters.host_hits + counters.misses)
    return {
        "pool_hits": counters.hits / requests,
        "host_hits": counters.host_hits / requests,
        "misses": counters.misses / requests,
        "loads": counters.loads,
        "evictions": counters.evictions,
        "moved": engine.pool.pages_moved,
    }


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the summary, with None for parts that were not run."""
    last = {row["what"]: row for row in rows if row["what"] in ("registered", "resident")}
    distinct = [row["over_predicted"] for row in matching(rows, what="distinct")]
    few = next(iter(matching(rows, setting="room for few")), {})
    return {
        "registered_2000_vs_5": last.get("registered", {}).get("throughput_over_first"),
        "resident_64_vs_8": last.get("resident", {}).get("latency_over_first"),
        "distinct_over_predicted": max(distinct, default=None),
        "overcommit_throughput_ratio": few.get("over_first"),
        "overcommit_failed": few.get("failed"),
        "steps_that_waited_for_disk": sum(row["disk_steps"] for row in rows),
    }


def _middle(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome with the median throughput."""
    return sorted(outcomes, key=lambda outcome: outcome.throughput)[len(outcomes) // 2]


def save_adapters(root: Path, config: DecoderConfig, rank: int, count: int) -> list[str]:
    """Save `count` folders of random weights in PEFT's format, and return their names."""
    generator = torch.Generator().manual_seed(rank)
    shapes = {}
    for layer in range(config.layers):
        for target, shape in config.target_shapes.items():
            block = "self_attn" if target in ATTENTION else "mlp"
            stem = f"base_model.model.{config.prefix}layers.{layer}.{block}.{target}"
            shapes[stem] = shape
    names = [f"a{index:04}" for index in range(count)]
    for name in names:
        targets = sorted(config.target_shapes)
        save_adapter(root / name, rank, shapes, targets, generator, torch.float32)
    return names
