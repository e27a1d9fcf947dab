"""One forward pass over the rows of a step, from token ids to logits and head scores.

Knows rows, pages and segments; nothing of requests, queues or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vlora.atmm import op
from vlora.lora.segments import BASE, signed_segments
from vlora.lora.store import AdapterStore
from vlora.model.attention import AttentionPlan, KVStore, Span
from vlora.model.decoder import Decoder
from vlora.model.decoder_config import DecoderConfig
from vlora.model.inputs import NO_IMAGE, Prompt
from vlora.model.loader import DecoderWeights


@dataclass(frozen=True)
class RowRange:
    """Consecutive positions of one sequence that this step computes.

    tokens: the ids at positions start …; prompt: where image rows come from.
    last: None, or what its last position is for: "logits" or "head".
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    slot: int
    prompt: Prompt
    last: str | None = None


@dataclass(frozen=True)
class StepResult:
    """logits: [rows, V] fp32 for the ranges with last = "logits", in order; scores: one
    [classes] tensor for each range with last = "head", in order."""

    logits: torch.Tensor
    scores: tuple[torch.Tensor, ...]


class Runner:
    """Owns the decoder and the KV pages' bytes."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        adapters: AdapterStore,
        pages: int,
        block_size: int,
    ) -> None:
        self._decoder = Decoder(config, weights, adapters)
        self._adapters = adapters
        self._store = KVStore(pages, config.layers, block_size, config.kv_heads, config.head_dim)

    @torch.inference_mode()
    def forward(self, ranges: Sequence[RowRange], live: int = BASE) -> StepResult:
        """Ranges of one adapter should be neighbours: each adapter is then one segment."""
        spans: list[Span] = []
        row = 0
        for item in ranges:
            spans.append(Span(row, len(item.tokens), item.start, item.pages))
            row += len(item.tokens)
        attention = AttentionPlan(spans, self._store)
        segments = signed_segments(((item.slot, len(item.tokens)) for item in ranges), live)
        hidden = self._decoder.forward(self._embed(ranges, spans), attention, segments)
        return self._finish(hidden, ranges, spans)

    def _embed(self, ranges: Sequence[RowRange], spans: Sequence[Span]) -> torch.Tensor:
        tokens = torch.tensor([token for item in ranges for token in item.tokens])
        hidden = self._decoder.embed(tokens)
        for item, span in zip(ranges, spans, strict=True):
            features = item.prompt.features
            if features is None:
                continue
            rows = item.prompt.feature_row[span.start : span.end]
            at = torch.nonzero(rows != NO_IMAGE).flatten()
            hidden[span.row + at] = features[rows[at]]
        return hidden

    def _finish(
        self, hidden: torch.Tensor, ranges: Sequence[RowRange], spans: Sequence[Span]
    ) -> StepResult:
        """Final norm and heads for the rows that end a range which asks for them.

        The LM head is never merged, so its segments do not depend on the live adapter.
        """
        by_kind = {
            kind: [i for i, item in enumerate(ranges) if item.last == kind]
            for kind in ("logits", "head")
        }
        ends = [spans[i].row + spans[i].length - 1 for i in by_kind["logits"] + by_kind["head"]]
        normed = self._decoder.final_norm(hidden[ends])
        for_logits = len(by_kind["logits"])
        segments = signed_segments((ranges[i].slot, 1) for i in by_kind["logits"])
        logits = self._decoder.logits(normed[:for_logits], segments)
        heads = [ranges[i].slot for i in by_kind["head"]]
        return StepResult(logits, self._scores(normed[for_logits:], heads))

    def _scores(self, hidden: torch.Tensor, slots: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """hidden: one row a slot → each one's softmax scores; all heads in one call."""
        if not slots:
            return ()
        heads = self._adapters.heads
        values = op.heads(hidden, signed_segments((slot, 1) for slot in slots), heads)
        return tuple(
            torch.softmax(row[: heads.classes(slot)], dim=0)
            for row, slot in zip(values, slots, strict=True)
        )
