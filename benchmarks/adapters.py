"""The adapters benchmark: many registered or resident adapters, and more than fit (figure 23).

The model is the demo checkpoint. Its steps are short, so the engine's overhead per step and the
time to load an adapter weigh more here than with any larger model. All adapters have random
weights and the same rank, and change all projections.

The last part compares one page pool with a static split of the same bytes, where a wall separates
the pages of adapters from those of keys and values (KV pages). It counts the KV pages whose adapter
is not resident: they occupy memory and no step can use them. The paper on ExpertWeave reports up to
46.5 % of such pages under a static partition.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from rich.console import RenderableType
from rich.table import Table
from safetensors.torch import save_file

from benchmarks import frame
from benchmarks.driver import WORDS, Driver, DriverRequest, Outcome
from benchmarks.frame import Bar, DemoBenchmark, Row, at_least, at_most
from vlora.adapters.files import read_adapter
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.engine.sequence import scopes_of
from vlora.memory.pool import Evictor, Owner, PagePool, Run, evict_oldest
from vlora.memory.prefix import PrefixCache
from vlora.model.decoder_config import DecoderConfig, load_config
from vlora.weights.slab import ATTENTION

BLOCK = 16
CONCURRENT_REQUESTS = 16
"""Number of requests of a trace that are submitted at the same time."""
ZIPF_EXPONENT = 1.0
CHURN_SET, CHURN_SHIFT, CHURN_INTERVAL = 8, 4, 40
"""Churning trace: size of its working set, number of adapters that are replaced at a time, and
number of requests between two replacements."""
COLUMNS = {
    "tokens/s": "tokens_per_s",
    "ms/token": "token_latency_ms",
    "p99, s": "p99_s",
    "step, ms": "step_ms",
    "step during a load": "step_beside_load_ms",
    "loads": "loads",
    "failed": "failed",
}
TIERS = ("pool_hits", "host_hits", "misses")
"""Keys of three shares of the requests: those whose adapter was in the page pool, those whose
adapter was in host memory, and those whose adapter was on disk."""


@dataclass(kw_only=True)
class Adapters(DemoBenchmark):
    """Throughput and latency with many adapters in the pool, in host memory and on disk."""

    name = "adapters"
    bars: ClassVar[Mapping[str, Bar]] = {
        "registered_2000_vs_5": at_least(0.95),
        "resident_64_vs_8": at_most(1.05),
        "distinct_over_predicted": at_most(1.1),
        "overcommit_throughput_ratio": at_least(0.7),
        "overcommit_failed": at_most(0),
        "kv_without_adapter": at_most(0),
        "steps_that_waited_for_disk": at_most(0),
    }

    def prepare(self) -> None:
        super().prepare()
        self._scratch = tempfile.TemporaryDirectory()

    def cells(self) -> Sequence[Callable[[], Iterator[Row]]]:
        self.status("making adapters")
        many = ManyAdapters(self.model, Path(self._scratch.name), self.values)
        rate = self.roofline(self.threads).measure_bandwidth
        return [
            *(many.run_registered, many.run_resident, lambda: many.run_distinct(rate)),
            *(many.run_burst, lambda: many.run_traces(self.status)),
            lambda: run_split(many, self.values, self.status),
        ]

    def measure(self, cell: Callable[[], Iterator[Row]]) -> Iterator[Row]:
        for row in cell():
            self.status(f"{row['what']}: {row['setting']}")
            yield row

    def summarize(self) -> dict[str, Any]:
        return summarize(self.rows) | summarize_split(self.rows)

    def tables(self) -> Iterable[RenderableType]:
        columns: dict[str, Any] = {"load": lambda row: f"{row['what']}: {row['setting']}"}
        columns |= COLUMNS
        columns["pool, host, disk"] = lambda row: " ".join(
            f"{row[tier]:.0%}" for tier in TIERS if tier in row
        )
        title = "pool, host, disk: shares of requests whose adapter was there"
        made: Table = frame.table(title, self.rows, columns)
        made.padding = (0, 0)
        # Minimum widths make a narrow terminal wrap the headers, and not cut the figures.
        for column in made.columns:
            column.min_width = 11 if column is made.columns[0] else 5
        yield made

    def close(self) -> None:
        self._scratch.cleanup()


class ManyAdapters:
    """Measurements on one checkpoint, with engines that serve some of many adapter folders.

    Each row has the figures of the repeat with the median throughput. In parts without repeats, it
    has those of all runs together.
    """

    def __init__(self, model: Path, scratch: Path, grid: Mapping[str, Any]) -> None:
        self._model, self._scratch, self._grid = model, scratch, grid
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
        host = {"adapter_host_bytes": few * self.host_bytes}
        return self._interleaved("registered", roots, order, host)

    def run_resident(self) -> Iterator[Row]:
        """Measure requests for a few adapters, on an engine in which only these are resident and on
        one in which many are.
        """
        few, many = self._grid["resident"]
        roots = {
            str(count): self.link_folders(f"resident{count}", self.names[:count])
            for count in (few, many)
        }
        order = [self.names[i % few] for i in range(4 * few)]
        return self._interleaved("resident", roots, order, {})

    def _interleaved(
        self,
        part: str,
        roots: Mapping[str, Path],
        names: Sequence[str],
        options: Mapping[str, Any],
    ) -> Iterator[Row]:
        """Measure the same requests on two engines, which take turns in running first.

        The row of the second engine has the medians of the rounds' ratios to the first engine.
        """
        drivers = [Driver(Engine(self.options(root, **options))) for root in roots.values()]
        outcomes: list[list[Outcome]] = [[], []]
        for number in range(-1, self._grid["rounds"]):
            sides = list(zip(drivers, outcomes, strict=True))
            for driver, own_outcomes in sides if number % 2 else sides[::-1]:
                outcome = driver.run(self.requests(names, number))
                if number >= 0:
                    own_outcomes.append(outcome)
        for driver in drivers:
            driver.close()
        pairs = list(zip(*outcomes, strict=True))
        over = {
            "throughput_over_first": median(b.throughput / a.throughput for a, b in pairs),
            "latency_over_first": median(b.token_latency / a.token_latency for a, b in pairs),
        }
        ratios: list[Row] = [{}, {key: round(ratio, 3) for key, ratio in over.items()}]
        for setting, repeats, driver, own in zip(roots, outcomes, drivers, ratios, strict=True):
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
                outcomes[count].append(driver.run(self.requests(names, repeat), watch=False))
        driver.close()
        base = median(_middle(outcomes[min(outcomes)]).steps)
        for count, repeats in outcomes.items():
            outcome = _middle(repeats)
            over = median(outcome.steps) / (base + (count - 1) * self.packed_bytes / rate)
            yield row_of("distinct", str(count), outcome, {"over_predicted": round(over, 3)})

    def _tier_options(self, root: Path, in_pool: int, in_host: int) -> Options:
        return self.options(
            root,
            adapter_pool_bytes=in_pool * self.pool_bytes,
            adapter_host_bytes=in_host * self.host_bytes,
        )

    def run_burst(self) -> Iterator[Row]:
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
        driver = Driver(Engine(self._tier_options(root, len(names), len(names))))
        fits = driver.run(self.requests(order, 1))
        driver.close()
        yield row_of("burst", "resident", fits, tier_figures(driver.engine))
        driver = Driver(Engine(self._tier_options(root, grid["room"], grid["host"])))
        outcome = driver.run(self.requests(order, 1))
        driver.close()
        # The second run takes at least as long as its loads, which run one by one.
        load = median(_load_seconds(driver.engine, name) for name in names)
        limit = min(1.0, fits.span / ((len(names) - grid["host"]) * load))
        figures = tier_figures(driver.engine) | {"load_ms": round(load * 1e3, 3)}
        figures |= {"limit": round(limit, 3)}
        figures |= {"over_first": round(outcome.throughput / fits.throughput, 3)}
        yield row_of("burst", "room for few", outcome, figures)

    def run_traces(self, status: Callable[[str], None]) -> Iterator[Row]:
        """Measure traces whose adapters fit, or do not fit, into the pool and into host memory."""
        grid = self._grid["traces"]
        names = self.names[: grid["registered"]]
        root = self.link_folders("traces", names)
        for kind in grid["kinds"]:
            order = draw_names(kind, names, grid["requests"])
            for in_pool in grid["room"]:
                status(f"{kind}, room for {in_pool}")
                driver = Driver(Engine(self._tier_options(root, in_pool, grid["host"])))
                outcomes = [
                    driver.run(self.requests(order[start : start + CONCURRENT_REQUESTS], start))
                    for start in range(0, len(order), CONCURRENT_REQUESTS)
                ]
                figures = tier_figures(driver.engine)
                driver.close()
                setting = f"{kind}, room for {in_pool} of {len(names)}"
                yield row_of("trace", setting, Outcome.joined(outcomes), figures)


def row_of(part: str, setting: str, outcome: Outcome, figures: Mapping[str, Any]) -> Row:
    return {"what": part, "setting": setting, **outcome.as_row(), **figures}


def tier_figures(engine: Engine) -> Row:
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


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the summary without the split, with None for parts that were not run."""
    last = {row["what"]: row for row in rows if row["what"] in ("registered", "resident")}
    distinct = [row["over_predicted"] for row in rows if row["what"] == "distinct"]
    few = next((row for row in rows if row["setting"] == "room for few"), {})
    return {
        "registered_2000_vs_5": last.get("registered", {}).get("throughput_over_first"),
        "resident_64_vs_8": last.get("resident", {}).get("latency_over_first"),
        "distinct_over_predicted": max(distinct, default=None),
        "overcommit_throughput_ratio": few.get("over_first"),
        "overcommit_limit": few.get("limit"),
        "overcommit_p99_s": few.get("p99_s"),
        "overcommit_failed": few.get("failed"),
        "step_beside_load_over_step": few.get("step_beside_load_over_step"),
        "steps_that_waited_for_disk": sum(row["disk_steps"] for row in rows),
    }


def _load_seconds(engine: Engine, name: str) -> float:
    """Return the seconds an idle engine takes to read an adapter's files into host memory."""
    handle = engine.adapters.handle(name)
    started = perf_counter()
    read_adapter(handle.folder, handle.description)
    return perf_counter() - started


def _middle(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome with the median throughput."""
    return sorted(outcomes, key=lambda outcome: outcome.throughput)[len(outcomes) // 2]


def save_adapters(root: Path, config: DecoderConfig, rank: int, count: int) -> list[str]:
    """Save `count` folders of random weights in PEFT's format, and return their names."""
    generator = torch.Generator().manual_seed(rank)
    adapter_config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    adapter_config |= {"target_modules": sorted(config.target_shapes)}
    names = [f"a{index:04}" for index in range(count)]
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "adapter_config.json").write_text(json.dumps(adapter_config))
        weights = {}
        for layer in range(config.layers):
            for target, (d_out, d_in) in config.target_shapes.items():
                block = "self_attn" if target in ATTENTION else "mlp"
                stem = f"base_model.model.{config.prefix}layers.{layer}.{block}.{target}"
                for factor, shape in (("A", (rank, d_in)), ("B", (d_out, rank))):
                    drawn = torch.empty(shape).normal_(0.0, 0.02, generator=generator)
                    weights[f"{stem}.lora_{factor}.weight"] = drawn
        save_file(weights, root / name / "adapter_model.safetensors")
    return names


def draw_names(kind: str, names: Sequence[str], count: int) -> list[str]:
    """Return the adapter of each of `count` requests.

    kind: "zipf" (most requests are for few adapters), "uniform" or "churning" (a working set of
        CHURN_SET adapters, of which some are replaced regularly).
    """
    rng = random.Random(kind)
    if kind == "zipf":
        weights = [1 / (rank + 1) ** ZIPF_EXPONENT for rank in range(len(names))]
        return rng.choices(names, weights, k=count)
    if kind == "uniform":
        return rng.choices(names, k=count)
    return [
        names[(i // CHURN_INTERVAL * CHURN_SHIFT + rng.randrange(CHURN_SET)) % len(names)]
        for i in range(count)
    ]


class SplitPool(PagePool):
    """Pool with a wall: adapters use the first `wall` pages, keys and values the other pages.

    Each side makes space by evicting its own pages only.
    """

    def __init__(self, wall: int, above: int) -> None:
        super().__init__(wall + above)
        self.wall = wall

    def can_allocate(self, count: int) -> bool:
        """Return whether `count` pages for keys and values are free or can be evicted."""
        free = self._owner.count(Owner.FREE, self.wall)
        return count <= free + sum(e.evictable_pages(count) for e in self._side(runs=False))

    def can_allocate_run(self, count: int, kv_pages: int = 0) -> bool:
        """Return whether `count` pages for an adapter are free or can be evicted.

        The pages may not be adjacent. Then `allocate_run` returns None.

        kv_pages: ignored, because keys and values use the other side of the wall.
        """
        free = self._owner.count(Owner.FREE, 0, self.wall)
        return count <= free + sum(e.evictable_pages(count) for e in self._side(runs=True))

    def allocate(self, count: int) -> list[int] | None:
        if not self.can_allocate(count):
            return None
        while self._owner.count(Owner.FREE, self.wall) < count:
            evict_oldest(self._side(runs=False))
        return super().allocate(count)

    def allocate_run(self, count: int) -> Run | None:
        if not self.can_allocate_run(count):
            return None
        while (first := self._owner.find(bytes(count), 0, self.wall)) < 0:
            if not evict_oldest(self._side(runs=True)):
                return None
        return self._take_run(first, count)

    def _side(self, *, runs: bool) -> list[Evictor]:
        """Return the evictors of adapters if `runs`, otherwise those of keys and values."""
        return [evictor for evictor in self.evictors if (evictor is self.run_evictor) == runs]

    def check_integrity(self) -> None:
        super().check_integrity()
        below, above = self._owner[: self.wall], self._owner[self.wall :]
        assert set(below) <= {Owner.FREE, Owner.ADAPTER}, "keys and values below the wall"
        assert Owner.ADAPTER not in above, "an adapter above the wall"


class SplitPrefixCache(PrefixCache):
    """Prefix cache that does not prefer to evict the blocks of evicted adapters."""

    def evict_first(self, scope: str) -> None:
        """Leave the order of eviction as it is."""


def split_engine(options: Options) -> Engine:
    """Return an engine whose memory has a wall between KV pages and adapter pages."""
    kv_pages = options.kv_cache_tokens // options.block_size

    def split_pool(total: int) -> SplitPool:
        return SplitPool(total - kv_pages, kv_pages)

    with (
        patch("vlora.engine.memory.PagePool", split_pool),
        patch("vlora.engine.memory.PrefixCache", SplitPrefixCache),
    ):
        return Engine(options)


ONE_POOL, SPLIT = "one pool", "static split"
SIDES: Mapping[str, Callable[[Options], Engine]] = {ONE_POOL: Engine, SPLIT: split_engine}


@dataclass
class UnpairedPages:
    """Number of unpaired pages after each step.

    An unpaired page is a KV page whose adapter is not resident. Every request of this benchmark has
    an adapter.

    held: for each step, number of unpaired pages that running requests hold.
    cached: for each step, number of unpaired pages that only the prefix cache holds, divided by the
        number of KV pages that requests or the prefix cache hold.
    """

    held: list[int] = field(default_factory=list)
    cached: list[float] = field(default_factory=list)

    def count(self, engine: Engine) -> None:
        """Count an engine's pages and append the results to `held` and `cached`."""
        assert engine.memory.prefix is not None
        resident = set(engine.adapters.resident.values())
        unpaired = (s for s in engine.scheduler.running if s.adapter not in resident)
        self.held.append(len({page for sequence in unpaired for page in sequence.table.pages}))
        scopes = {scope for handle in resident for scope in scopes_of(handle)}
        # The scope in a block's key names the adapter that the block was computed with.
        prefix = engine.memory.prefix
        cached = Counter(prefix._keys[page].scope for page in prefix._idle).items()
        pages = sum(count for scope, count in cached if scope not in scopes)
        self.cached.append(pages / max(1, engine.pool.kv + engine.pool.cached))

    def as_row(self) -> dict[str, Any]:
        return {
            "kv_without_adapter": max(self.held),
            "cached_without_adapter": round(mean(self.cached), 4),
            "cached_without_adapter_most": round(max(self.cached), 4),
        }


def run_split(
    adapters: ManyAdapters, grid: Mapping[str, Any], status: Callable[[str], None]
) -> Iterator[Row]:
    """Measure each trace on an engine with one pool and on one with a split pool.

    All adapters are in host memory. All requests for one adapter share the start of their prompt.
    """
    names = adapters.names[: grid["traces"]["registered"]]
    root = adapters.link_folders("split", names)
    for kind in grid["split"]["kinds"]:
        status(f"split: {kind}")
        order = draw_names(kind, names, grid["split"]["requests"])
        yield from _run_trace(adapters, root, grid, kind, order)


def _run_trace(
    adapters: ManyAdapters, root: Path, grid: Mapping[str, Any], kind: str, order: Sequence[str]
) -> Iterator[Row]:
    """Measure one trace on both engines, which take turns in running first."""
    split = grid["split"]
    length = split["shared"] + grid["prompt"] + grid["output"] + BLOCK
    options = adapters.options(
        root,
        adapter_pool_bytes=split["room"] * adapters.pool_bytes,
        kv_cache_tokens=split["kv_requests"] * length,
        max_model_len=length,
        enable_prefix_caching=True,
    )
    unpaired = {side: UnpairedPages() for side in SIDES}
    drivers = {side: Driver(make(options), unpaired[side].count) for side, make in SIDES.items()}
    outcomes: dict[str, list[Outcome]] = {side: [] for side in SIDES}
    for number, start in enumerate(range(0, len(order), CONCURRENT_REQUESTS)):
        names = order[start : start + CONCURRENT_REQUESTS]
        requests = adapters.requests(names, number, split["shared"])
        for side in list(SIDES)[:: 1 if number % 2 else -1]:
            outcomes[side].append(drivers[side].run(requests, watch=False))
    for side, driver in drivers.items():
        driver.engine.check_integrity()
        driver.close()
        pairs = zip(outcomes[side], outcomes[SPLIT], strict=True)
        over = median(own.throughput / other.throughput for own, other in pairs)
        figures = tier_figures(driver.engine) | unpaired[side].as_row()
        stats = driver.engine.stats()
        cached = stats.cached_tokens / (stats.cached_tokens + stats.prompt_tokens)
        figures |= {"cached_tokens": round(cached, 3), "throughput_over_split": round(over, 3)}
        assert side == SPLIT or figures["kv_without_adapter"] == 0, "KV without its adapter"
        yield row_of("split", f"{kind}, {side}", Outcome.joined(outcomes[side]), figures)


def summarize_split(rows: Sequence[Row]) -> dict[str, Any]:
    """Return means over the traces, and the maximum of `kv_without_adapter`.

    All figures are None if this part was not run.
    """

    def figures(side: str, key: str) -> list[Any]:
        of_side = (r for r in rows if r["what"] == "split" and r["setting"].endswith(side))
        return [row[key] for row in of_side]

    def average(side: str, key: str, digits: int) -> float | None:
        values = figures(side, key)
        return round(mean(values), digits) if values else None

    return {
        "kv_without_adapter": max(figures(ONE_POOL, "kv_without_adapter"), default=None),
        "cached_without_adapter": average(ONE_POOL, "cached_without_adapter", 4),
        "cached_without_adapter_split": average(SPLIT, "cached_without_adapter", 4),
        "cached_tokens": average(ONE_POOL, "cached_tokens", 3),
        "cached_tokens_split": average(SPLIT, "cached_tokens", 3),
        "throughput_over_split": average(ONE_POOL, "throughput_over_split", 3),
    }
