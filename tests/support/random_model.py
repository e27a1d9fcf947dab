"""Decoding steps of a random model on a GPU, replayed as graphs and launched kernel by kernel.

The steps use the engine's own classes, but no checkpoint. For each kind of step, the logits of the
graph are compared with those of the single launches, and both are timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from vlora.adapters.files import Adapter, AdapterInfo
from vlora.adapters.model_shape import ModelShape
from vlora.adapters.residency import Slots
from vlora.atmm.types import LoraPair
from vlora.device.device import Device
from vlora.ids import BASE, order_of
from vlora.memory.kv_cache import KVCache
from vlora.model.chunk import Chunk
from vlora.model.decoder_config import DecoderConfig
from vlora.model.families.base import WeightNames
from vlora.model.inputs import text_prompt
from vlora.model.loader import DecoderWeights
from vlora.model.runner import Runner, StepSizes
from vlora.model.switcher import Switcher
from vlora.weights.slab import TARGETS, WeightSlab

BLOCK = 16
REPEATS = 15
KINDS = ("base", "adapters", "merged", "mixture")
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Maximum difference of logits between a graph and single launches, relative to the largest
logit."""


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder. The defaults are those of Qwen2-VL-7B."""

    layers: int = 28
    hidden: int = 3584
    inner: int = 18944
    heads: int = 28
    kv_heads: int = 4
    dim: int = 128
    vocabulary: int = 152064


@dataclass(frozen=True)
class Sizes:
    """Sizes of a random model, of its adapters, and of its steps: rows, and positions of a row."""

    name: str
    model: Model
    rank: int
    adapters: int
    rows: tuple[int, ...]
    context: int


DEMO = Sizes("small", Model(4, 512, 1024, 8, 2, 64, 4096), 16, 8, (1, 3, 16), 300)
SEVEN_B = Sizes("7B", Model(), 64, 16, (1, 16, 64), 1024)


class RandomModel:
    """A decoder with random weights and adapters, with pages for its rows, on one device."""

    def __init__(self, sizes: Sizes, device: Device, dtype: torch.dtype) -> None:
        self._sizes, self._device, self._dtype = sizes, device, dtype
        self._config = _config(sizes)
        self._weights = self._random_weights()
        self._slots = Slots(
            ModelShape(
                self._config.layers,
                self._config.hidden,
                self._config.vocabulary,
                self._config.target_shapes,
                "",
                lambda: cast(torch.Tensor, self._weights.lm_head),
                tuple,
            ),
            dtype,
            device,
        )
        pages = max(sizes.rows) * -(-sizes.context // BLOCK)
        config = self._config
        self._kv_cache = KVCache(
            pages, config.layers, BLOCK, config.kv_heads, config.head_dim, dtype, device
        )
        _fill(self._kv_cache.cache, 0.5)
        self.switcher = Switcher(self._weights.slab, _MergeSource(self._slots, config))
        self.eager, self.graphs = (self._runner(graphs=graphs) for graphs in (False, True))
        for _ in range(sizes.adapters):
            self._slots.pack(self._slots.take(self._random_adapter()))

    def _runner(self, *, graphs: bool) -> Runner:
        # It has no adapters yet. Packing an adapter puts it into the runner's groups.
        rows = max(self._sizes.rows)
        return Runner(
            self._config,
            self._weights,
            self._slots,
            self.switcher,
            self._kv_cache,
            StepSizes(rows, rows, self._sizes.context) if graphs else None,
        )

    def needed_bytes(self, rows: int, *, adapted: bool) -> int:
        """Return the bytes of weights, pages and adapters that a step reads at least once.

        adapted: whether each row has an adapter of its own.
        """
        config, weights = self._config, self._weights
        numbers = weights.slab.base.numel() + cast(torch.Tensor, weights.lm_head).numel()
        numbers += (
            rows * self._sizes.context * 2 * config.layers * config.kv_heads * config.head_dim
        )
        if adapted:
            sides = sum(map(sum, config.target_shapes.values()))
            numbers += rows * self._sizes.rank * config.layers * sides
        return numbers * weights.slab.base.element_size()

    def _random_weights(self) -> DecoderWeights:
        config, device = self._config, self._device
        slab = WeightSlab(config.layers, config.target_shapes, self._dtype, device)
        _fill(slab.base, config.hidden**-0.5)
        matrices = device.zeros(2, config.vocabulary, config.hidden, dtype=self._dtype)
        _fill(matrices, config.hidden**-0.5)
        ones = torch.ones(config.hidden, device=device.torch_device)
        half = config.head_dim // 2
        return DecoderWeights(
            slab,
            matrices[0],
            matrices[1],
            ones,
            {(layer, norm): ones for layer in range(config.layers) for norm in config.names.norms},
            {},
            10_000.0 ** -(torch.arange(half) / half),
            1.0,
        )

    def _random_adapter(self) -> Adapter:
        rank, pairs = self._sizes.rank, {}
        for layer in range(self._config.layers):
            for target in TARGETS:
                d_out, d_in = self._config.target_shapes[target]
                a, b = (
                    torch.randn(*shape, device=self._device.torch_device)
                    for shape in ((rank, d_in), (d_out, rank))
                )
                pairs[layer, target] = LoraPair(
                    (a * d_in**-0.5).to(self._dtype).float(), (b * 1e-2).to(self._dtype).float()
                )
        info = AdapterInfo("random", "random", (rank,), TARGETS, (), {}, (), ())
        return Adapter(info, pairs, None)

    def chunks(self, kind: str, rows: int, step: int = 0) -> list[Chunk]:
        """Return the chunks of a decoding step, and merge the adapter that it needs.

        step: number that the tokens, positions and adapters depend on.
        """
        live = 0 if kind in ("merged", "mixture") else BASE
        self.switcher.switch(live)
        count = self._sizes.adapters
        slots = {
            "base": [BASE] * rows,
            "merged": [0] * rows,
            "adapters": [(row + step) % count for row in range(rows)],
            "mixture": [(row + step) % count if row % 2 else 0 for row in range(rows)],
        }[kind]
        width = -(-self._sizes.context // BLOCK)
        prompt = text_prompt([0])
        return [
            Chunk(
                f"r{row}",
                slot,
                row,
                self._sizes.context - 1 - step,
                ((7 * row + step) % self._config.vocabulary,),
                prompt,
                tuple(range(row * width, (row + 1) * width)),
                completes=True,
            )
            for row, slot in enumerate(sorted(slots, key=lambda slot: order_of(slot, live)))
        ]

    def difference(self, kind: str, rows: int, step: int) -> float:
        """Return the difference of logits between a graph and single launches, relative to the
        largest logit."""
        chunks = self.chunks(kind, rows, step)
        expected = self.eager.forward(chunks).logits.clone()
        actual = self.graphs.forward(chunks).logits
        if not bool(torch.isfinite(expected).all()):
            raise AssertionError(f"{kind}: the logits are not finite")
        return float((actual - expected).abs().max() / expected.abs().max())


def measure(
    model: RandomModel,
    sizes: Sizes,
    dtype: torch.dtype,
    bandwidth: float,
    kinds: Sequence[str] = KINDS,
) -> Iterator[Any]:
    """Compare and time each kind of step; yield one row of figures for each.

    bandwidth: bytes per second of the device.
    """
    for rows in sizes.rows:
        for kind in kinds:
            worst = max(model.difference(kind, rows, step) for step in (0, 1, 2))
            if not worst <= TOLERANCE[dtype]:
                raise AssertionError(f"{sizes.name} {kind} {rows}: logits differ by {worst:.1e}")
            needed = model.needed_bytes(rows, adapted=kind in ("adapters", "mixture"))
            counters = model.graphs.graphs
            yield {
                "model": sizes.name,
                "kind": kind,
                "rows": rows,
                "ms": {
                    name: round(1e3 * _seconds(runner, model.chunks(kind, rows)), 3)
                    for name, runner in (("eager", model.eager), ("graph", model.graphs))
                },
                "needed_ms": round(1e3 * needed / bandwidth, 3),
                "difference": worst,
                "graphs": counters.captured,
                "replayed": counters.replayed,
                "capture_s": round(counters.seconds, 3),
                "graph_mib": round(counters.nbytes / (1 << 20), 1),
            }


def _seconds(runner: Runner, chunks: Sequence[Chunk]) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        runner.compute(chunks)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


class _MergeSource:
    """Adapters as the switcher needs them."""

    def __init__(self, slots: Slots, config: DecoderConfig) -> None:
        self.adapter = slots.adapter
        self.matrices = {(layer, target) for layer in range(config.layers) for target in TARGETS}


def _fill(tensor: torch.Tensor, scale: float) -> None:
    for part in tensor.view(-1).split(1 << 28):
        part.normal_().mul_(scale)


def _config(sizes: Sizes) -> DecoderConfig:
    model = sizes.model
    return DecoderConfig(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.dim,
        intermediate=model.inner,
        vocabulary=model.vocabulary,
        norm_eps=1e-6,
        context=sizes.context,
        prefix="",
        biased=(),
        tied=False,
        image_token=None,
        eos_tokens=(),
        names=WeightNames(),
    )
