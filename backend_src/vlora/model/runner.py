"""One forward pass over the rows of a step, from token ids to logits and head scores.

The runner handles chunks, pages and segments, but no requests, queues or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vlora.adapters.residency import Slots
from vlora.atmm import op
from vlora.atmm.segments import signed_segments
from vlora.atmm.types import Segments
from vlora.device.device import Device, UploadedPart, upload_step
from vlora.ids import BASE, NO_IMAGE
from vlora.memory.kv_cache import KVCache
from vlora.model.attention import AttentionPlan
from vlora.model.chunk import Chunk
from vlora.model.decoder import Decoder, LevelFeatures
from vlora.model.decoder_config import DecoderConfig
from vlora.model.loader import DecoderWeights
from vlora.model.step_graphs import GraphCounters, StepGraphs, padded_rows
from vlora.model.switcher import Switcher


class StepImages:
    """Ranges of a step's rows that have image features.

    A CPU reads the features of whole images in place. For a GPU, only the features of the step's
    rows are gathered, and are uploaded with the step's other inputs.

    ranges: the ranges in the form that `ops.embed` takes.
    inputs: tensors to upload: the index of each row's feature, and the features; [] on a CPU.
    """

    def __init__(self, chunks: Sequence[Chunk], device: Device) -> None:
        self.ranges = [
            (chunk.row, chunk.prompt.feature_row[chunk.start : chunk.end], chunk.prompt.features)
            for chunk in chunks
            if chunk.prompt.features is not None and not chunk.decodes
        ]
        self.inputs: list[torch.Tensor] = []
        if self.ranges and not device.in_host_memory:
            self.inputs = _gathered(self.ranges, sum(chunk.length for chunk in chunks))

    def place(self, uploaded: Sequence[torch.Tensor]) -> None:
        """Store the copies of `inputs` that were made on the device."""
        if uploaded:
            feature_rows, features = uploaded
            self.ranges = [(0, feature_rows, features)]


def _gathered(
    ranges: Sequence[tuple[int, torch.Tensor, torch.Tensor]], rows: int
) -> list[torch.Tensor]:
    """Return the index of each row's feature, or NO_IMAGE, and the features that the rows need.

    The shapes are [rows] int32 and [features, hidden] fp32.
    """
    numbers, parts, count = torch.full((rows,), NO_IMAGE, dtype=torch.int32), [], 0
    for first_row, feature_rows, features in ranges:
        shown = torch.nonzero(feature_rows >= 0).flatten()
        numbers[first_row + shown] = torch.arange(count, count + len(shown), dtype=torch.int32)
        parts.append(features[feature_rows[shown]])
        count += len(shown)
    return [numbers, torch.cat(parts)]


def level_features(chunks: Sequence[Chunk]) -> list[torch.Tensor]:
    """Return the `rows` and `features` of the step's `LevelFeatures`; [] if there are none."""
    rows, features = [], []
    for chunk in chunks:
        levels = chunk.prompt.level_features
        if levels is None or chunk.decodes:
            continue
        of_rows = chunk.prompt.feature_row[chunk.start : chunk.end]
        shown = torch.nonzero(of_rows >= 0).flatten()
        rows.append(chunk.row + shown)
        features.append(levels[:, of_rows[shown]])
    return [torch.cat(rows), torch.cat(features, dim=1)] if rows else []


@dataclass(frozen=True)
class StepResult:
    """Outputs of the chunks that complete their sequence, in the order of the chunks.

    logits: [rows, vocabulary] fp32, one row per chunk that does not use a head.
    heads: one [classes] fp32 tensor per chunk that uses a vision task head, before softmax.
    captured: whether a graph was captured, which takes longer than the step itself.
    """

    logits: torch.Tensor
    heads: tuple[torch.Tensor, ...]
    captured: bool = False


class StepSizes(NamedTuple):
    """Maximum sizes of steps, for which a GPU's memory is allocated once.

    requests: maximum number of requests, and of rows of a decoding step.
    positions: maximum number of positions of a request.
    """

    rows: int
    requests: int
    positions: int


class Runner:
    """Computes forward passes with the decoder, the adapters and the KV pages of the engine.

    graph_sizes: sizes of the steps for which graphs are captured; None for no graphs.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        adapters: Slots,
        switcher: Switcher,
        kv_cache: KVCache,
        graph_sizes: StepSizes | None = None,
    ) -> None:
        self._decoder = Decoder(config, weights, adapters, switcher)
        self._switcher = switcher
        self._adapters = adapters
        self._query_heads = config.heads
        self._kv_cache = kv_cache
        self._device = weights.slab.device
        self._graphs: StepGraphs | None = None
        if graph_sizes is not None and self._device.captures_graphs:
            rows = max(graph_sizes.rows, padded_rows(graph_sizes.requests))
            self._decoder.reserve(rows, graph_sizes.positions)
            self._graphs = StepGraphs(
                config, self._decoder, switcher, kv_cache, self._device, graph_sizes.requests
            )

    @property
    def graphs(self) -> GraphCounters:
        """Totals of the captured graphs."""
        return GraphCounters() if self._graphs is None else self._graphs.counters

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], *parts: UploadedPart) -> StepResult:
        """Compute the step's chunks with the switcher's active weights.

        chunks: in the order of their rows, fastest if sorted by `ids.order_of`.
        parts: other parts of the step, such as sampling, whose inputs are uploaded in the same
            transfer.
        """
        if self._graphs is not None:
            before = self._graphs.counters.captured
            if (logits := self._graphs.forward(chunks, parts)) is not None:
                return StepResult(logits, (), self._graphs.counters.captured > before)
        return self._forward(chunks, parts)

    def _forward(self, chunks: Sequence[Chunk], parts: Sequence[UploadedPart]) -> StepResult:
        attention = AttentionPlan(
            chunks, self._kv_cache, self._query_heads, fixed_order=self._decoder.fixed_order
        )
        sampled = [chunk for chunk in chunks if chunk.completes and not chunk.use_head]
        scored = [chunk for chunk in chunks if chunk.completes and chunk.use_head]
        all_segments = _all_segments(chunks, sampled, scored, self._switcher.live)
        segments, answer_segments, lm_head_segments, head_segments = all_segments
        last_rows = [chunk.last_row for chunk in sampled + scored]
        every_row = last_rows == list(range(sum(chunk.length for chunk in chunks)))
        images = StepImages(chunks, self._device)
        self._decoder.prepare(attention.positions)
        tokens, last, *levels = upload_step(
            self._device,
            [
                torch.tensor([token for chunk in chunks for token in chunk.tokens]),
                torch.tensor([] if every_row else last_rows, dtype=torch.int64),
                *level_features(chunks),
            ],
            attention,
            op.StepSegments(all_segments, self._device.torch_device),
            images,
            *parts,
        )
        hidden = self._decoder.forward(
            self._decoder.embed(tokens, images.ranges),
            attention,
            segments,
            None if every_row else last,
            answer_segments,
            LevelFeatures(*levels) if levels else None,
        )
        return StepResult(
            self._decoder.logits(hidden[: len(sampled)], lm_head_segments),
            self._head_scores(hidden[len(sampled) :], head_segments),
        )

    def compute(self, chunks: Sequence[Chunk]) -> None:
        """Compute a step, wait until the device has finished it, and discard the result."""
        self._device.read_back([self.forward(chunks).logits[:1, :1]]).get()

    def _head_scores(self, hidden: torch.Tensor, segments: Segments) -> tuple[torch.Tensor, ...]:
        """Return the scores by the adapters' heads for `hidden`, [rows, hidden]."""
        if not segments:
            return ()
        heads = self._adapters.heads
        values = iter(op.heads(hidden.float(), segments, heads).cpu())
        return tuple(
            next(values)[: heads.classes(segment.slot)]
            for segment in segments
            for _ in range(segment.length)
        )


def _all_segments(
    chunks: Sequence[Chunk], sampled: Sequence[Chunk], scored: Sequence[Chunk], live: int
) -> tuple[Segments, Segments, Segments, Segments]:
    """Return the segments of all rows, of the last rows, of the LM head and of the task heads.

    sampled, scored: chunks that complete, for the LM head and for a task head.
    live: slot of the adapter that is merged.
    """
    rows = [(chunk.slot, chunk.length) for chunk in chunks]
    segments = signed_segments(rows, live)
    # In a step of decode rows only, `answers` equals `rows`. Then one object serves for both,
    # and is converted for the compiled core only once.
    answers = [(chunk.slot, 1) for chunk in (*sampled, *scored)]
    answer_segments = segments if answers == rows else signed_segments(answers, live)
    # The LM head is never merged, so its segments do not depend on the live adapter.
    lm_head_segments = answer_segments
    if live != BASE or scored:
        lm_head_segments = signed_segments((chunk.slot, 1) for chunk in sampled)
    head_segments = signed_segments((chunk.slot, 1) for chunk in scored)
    return segments, answer_segments, lm_head_segments, head_segments
