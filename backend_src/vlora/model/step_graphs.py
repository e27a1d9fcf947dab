"""Captured graphs of decoding steps, which launch all kernels of a step with one call.

A step is padded to the sizes of its graph's key. Values that differ between the steps of one graph
are read from device memory: tokens, positions, block tables and segments.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F

from vlora.atmm import op
from vlora.atmm.cuda.segments import SegmentBounds
from vlora.atmm.groups import LoraGroup
from vlora.atmm.segments import signed_segments
from vlora.atmm.types import Segments
from vlora.device.device import Device, Graph, UploadedPart, packed_bytes, upload_step
from vlora.ids import BASE
from vlora.memory.kv_cache import KVCache
from vlora.model.attention import AttentionPlan
from vlora.model.attention_gpu import DecodeShape
from vlora.model.chunk import Chunk
from vlora.model.decoder import Decoder
from vlora.model.decoder_config import DecoderConfig
from vlora.model.switcher import Switcher

log = logging.getLogger(__name__)

# Maximum number of rows of a step with a graph. In larger steps, launches take little of the time.
MAX_ROWS = 256
# A number of rows above ROW_STEP is rounded up to a multiple of ROW_STEP, a smaller one to a power
# of two.
ROW_STEP = 16
# Number of pages per row of the smallest padded block tables. Larger ones have 4, 16, … times as
# many.
FEWEST_PAGES = 64
MAX_GRAPHS = 64  # Maximum number of graphs. Beyond it, the least recently used graph is discarded.
# Maximum size in bytes of the inputs of other parts (see `StepGraphs.forward`): PART_BYTES +
# PART_BYTES_PER_ROW · rows.
PART_BYTES, PART_BYTES_PER_ROW = 256, 64


class GraphKey(NamedTuple):
    """Properties of the steps that a graph can compute.

    merged: indices of the weights that are read from the merged slab (see `Active.merged_groups`).
    lora, lm_head: limits of the segments of the layers and of the LM head; None without adapters.
    """

    shape: DecodeShape
    merged: frozenset[int]
    lora: SegmentBounds | None
    lm_head: SegmentBounds | None

    @property
    def applies_adapters(self) -> bool:
        return self.lora is not None or self.lm_head is not None


@dataclass
class GraphCounters:
    """Totals of captured graphs, and of the steps that they have computed (`replayed`): the time of
    all captures, and the device memory that the existing graphs took.
    """

    captured: int = 0
    discarded: int = 0
    replayed: int = 0
    seconds: float = 0.0
    nbytes: int = 0


@dataclass(frozen=True)
class _Captured:
    """A graph, and the device memory that receives its inputs."""

    graph: Graph
    inputs: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.graph.nbytes + self.inputs.nbytes


@dataclass(frozen=True)
class _Step:
    """A decoding step in the form that its graph reads.

    tokens: [padded rows] int64 in host memory.
    lora, lm_head: segments of the layers and of the LM head; None if no adapter is applied.
    """

    attention: AttentionPlan
    tokens: torch.Tensor
    lora: op.BoundedSegments | None
    lm_head: op.BoundedSegments | None
    shape: DecodeShape
    merged: frozenset[int]

    @cached_property
    def key(self) -> GraphKey:
        parts = (self.lora, self.lm_head)
        lora, lm_head = (None if part is None else part.bounds for part in parts)
        return GraphKey(self.shape, self.merged, lora, lm_head)

    @property
    def inputs(self) -> list[torch.Tensor]:
        """Inputs in host memory, in the order of their upload, without those of `attention`."""
        parts = (part for part in (self.lora, self.lm_head) if part is not None)
        return [self.tokens, *(part.tensor for part in parts)]


class StepGraphs:
    """Owner of the graphs. The engine's thread captures and replays them."""

    def __init__(
        self,
        config: DecoderConfig,
        decoder: Decoder,
        switcher: Switcher,
        kv_cache: KVCache,
        device: Device,
        max_rows: int,
    ) -> None:
        self._decoder, self._switcher, self._device = decoder, switcher, device
        self._kv_cache, self._heads = kv_cache, config.heads
        self._axes = 3 if config.rope_axes else 1
        self._vocabulary = config.vocabulary
        self._max_rows = min(max_rows, MAX_ROWS)
        self._captures_lora = op.captures(device.torch_device)
        self._graphs: dict[GraphKey, _Captured] = {}  # Graphs in the order of their last use.
        self._memory: tuple[int, ...] = ()  # Addresses of the memory that all graphs use.
        # Layout of the adapters' groups for which the graphs were captured.
        self._layout: op.GroupLayout | None = None
        self._logits: torch.Tensor | None = None
        self._failed = False
        self.counters = GraphCounters()

    def forward(
        self, chunks: Sequence[Chunk], parts: Sequence[UploadedPart]
    ) -> torch.Tensor | None:
        """Return the logits of a decoding step, [chunks, vocabulary] fp32, valid until the next
        call; None if the step must be computed without a graph.

        parts: uploaded with the others, PART_BYTES + PART_BYTES_PER_ROW · rows bytes at most.
        """
        if self._failed or not self._may_have_graph(chunks):
            return None
        if not self._captures_lora and self._may_apply_adapters(chunks):
            return None
        step = self._step(chunks)
        self._decoder.prepare(step.attention.positions)
        self._discard_outdated(step.key)
        captured = self._graphs.pop(step.key, None)
        if captured is None:
            return self._capture(step, parts)[: len(chunks)]
        self._graphs[step.key] = captured
        upload_step(self._device, step.inputs, step.attention, *parts, into=captured.inputs)
        self._wait_for_adapters(step)
        captured.graph.replay()
        self.counters.replayed += 1
        return self._output()[: len(chunks)]

    def _wait_for_adapters(self, step: _Step) -> None:
        groups = self._decoder.lora_groups
        for part, its_groups in ((step.lora, groups[:-1]), (step.lm_head, groups[-1:])):
            if part is not None:
                for group in its_groups:
                    group.pending.wait_for(part.segments)

    def _may_have_graph(self, chunks: Sequence[Chunk]) -> bool:
        return 0 < len(chunks) <= self._max_rows and all(
            chunk.length == 1
            and chunk.completes
            and not chunk.use_head
            and (chunk.decodes or chunk.prompt.features is None)
            for chunk in chunks
        )

    def _may_apply_adapters(self, chunks: Sequence[Chunk]) -> bool:
        live = self._switcher.live
        return any(chunk.slot != live for chunk in chunks) or (
            live != BASE and self._decoder.lora_groups[-1].ever_used
        )

    def _step(self, chunks: Sequence[Chunk]) -> _Step:
        live, groups = self._switcher.live, self._decoder.lora_groups
        rows = [(chunk.slot, 1) for chunk in chunks]
        segments = signed_segments(rows, live)
        count = padded_rows(len(chunks))
        longest = max(-(-chunk.end // self._kv_cache.block) for chunk in chunks)
        shape = DecodeShape(count, padded_pages(longest), self._axes)
        return _Step(
            AttentionPlan(chunks, self._kv_cache, self._heads, padded=shape),
            F.pad(torch.tensor([chunk.tokens[0] for chunk in chunks]), (0, count - len(chunks))),
            _bounded(segments, groups[:-1]),
            # The LM head is never merged, so its segments do not depend on the live adapter.
            _bounded(segments if live == BASE else signed_segments(rows), groups[-1:]),
            shape,
            self._switcher.active.merged_groups,
        )

    def _discard_outdated(self, key: GraphKey) -> None:
        if self._memory != (memory := self._decoder.addresses):
            self._memory = memory
            self._discard([*self._graphs])
        if key.applies_adapters:
            layout = op.group_layout(self._decoder.lora_groups, self._layout)
            if layout is not self._layout:
                self._layout = layout
                self._discard([other for other in self._graphs if other.applies_adapters])

    def _discard(self, keys: Sequence[GraphKey]) -> None:
        for key in keys:
            self.counters.nbytes -= self._graphs.pop(key).nbytes
        self.counters.discarded += len(keys)

    def _capture(self, step: _Step, parts: Sequence[UploadedPart]) -> torch.Tensor:
        fixed = packed_bytes([*step.inputs, *step.attention.inputs])
        size = fixed + PART_BYTES + PART_BYTES_PER_ROW * len(step.tokens)
        inputs = self._device.zeros(size, dtype=torch.uint8)
        host, plan = step.inputs, step.attention
        tokens, *placed = upload_step(self._device, host, plan, *parts, into=inputs)
        its_placed = iter(placed)
        segments = lm_head_segments = Segments()
        if self._layout is not None:
            segments, lm_head_segments = (
                Segments() if part is None else part.captured(next(its_placed), self._layout)
                for part in (step.lora, step.lm_head)
            )
        out = self._output()[: len(tokens)]

        def work() -> None:
            hidden = self._decoder.embed(tokens, ())
            hidden = self._decoder.forward(hidden, step.attention, segments, None, segments)
            self._decoder.logits(hidden, lm_head_segments, out)

        work()
        self._discard([*self._graphs][: len(self._graphs) + 1 - MAX_GRAPHS])
        started = time.perf_counter()
        try:
            captured = _Captured(self._device.capture(work), inputs)
        except RuntimeError:
            self._failed = True
            log.exception("a decoding step cannot be captured; no graphs are used from now on")
            return out
        self._graphs[step.key] = captured
        counters = self.counters
        counters.captured += 1
        counters.seconds += time.perf_counter() - started
        counters.nbytes += captured.nbytes
        return out

    def _output(self) -> torch.Tensor:
        if self._logits is None:
            rows = padded_rows(self._max_rows)
            self._logits = self._device.zeros(rows, self._vocabulary, dtype=torch.float32)
        return self._logits


def _bounded(segments: Segments, groups: Sequence[LoraGroup]) -> op.BoundedSegments | None:
    if not segments or not any(group.ever_used for group in groups):
        return None
    return op.bounded(segments)


def padded_rows(rows: int) -> int:
    return 1 << (rows - 1).bit_length() if rows <= ROW_STEP else -(-rows // ROW_STEP) * ROW_STEP


def padded_pages(pages: int) -> int:
    """Return the padded number of pages per row, for the pages of the longest context."""
    width = FEWEST_PAGES
    while width < pages:
        width *= 4
    return width
