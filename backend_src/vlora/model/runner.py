"""One forward pass over the rows of a step, from token ids to logits and head scores.

Knows chunks, pages and segments; nothing of requests, queues or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vlora.atmm import op
from vlora.lora.segments import signed_segments
from vlora.lora.store import AdapterStore
from vlora.lora.switcher import Switcher
from vlora.memory.kv_cache import KVCache
from vlora.model.attention import AttentionPlan
from vlora.model.chunk import Chunk
from vlora.model.decoder import Decoder
from vlora.model.decoder_config import DecoderConfig
from vlora.model.loader import DecoderWeights


@dataclass(frozen=True)
class StepResult:
    """logits: [rows, V] fp32, a row for each chunk that completes, in order; heads: one
    [classes] tensor for each that completes and uses a head instead, in order, before softmax."""

    logits: torch.Tensor
    heads: tuple[torch.Tensor, ...]


class Runner:
    """Owns the decoder."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        adapters: AdapterStore,
        switcher: Switcher,
        store: KVCache,
    ) -> None:
        """store: the pages' bytes, which the engine owns."""
        self._decoder = Decoder(config, weights, adapters, switcher)
        self._switcher = switcher
        self._adapters = adapters
        self._query_heads = config.heads
        self._store = store

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> StepResult:
        """With the weights that are active. chunks: in the order of their rows, best that of
        `segments.order_of`: the segments are then the fewest."""
        attention = AttentionPlan(chunks, self._store, self._query_heads)
        live = self._switcher.live
        segments = signed_segments(((chunk.slot, chunk.length) for chunk in chunks), live)
        drawn = [chunk for chunk in chunks if chunk.completes and not chunk.use_head]
        scored = [chunk for chunk in chunks if chunk.completes and chunk.use_head]
        ending = drawn + scored
        hidden = self._decoder.forward(
            self._embed(chunks),
            attention,
            segments,
            [chunk.last_row for chunk in ending],
            signed_segments(((chunk.slot, 1) for chunk in ending), live),
        )
        # The LM head is never merged, so its segments do not depend on the live adapter.
        lm_head = signed_segments((chunk.slot, 1) for chunk in drawn)
        return StepResult(
            self._decoder.logits(hidden[: len(drawn)], lm_head),
            self._heads(hidden[len(drawn) :], [chunk.slot for chunk in scored]),
        )

    def _embed(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        tokens = torch.tensor([token for chunk in chunks for token in chunk.tokens])
        images = [
            (chunk.row, chunk.prompt.feature_row[chunk.start : chunk.end], chunk.prompt.features)
            for chunk in chunks
            if chunk.prompt.features is not None and not chunk.decodes
        ]
        return self._decoder.embed(tokens, images)

    def _heads(self, hidden: torch.Tensor, slots: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """hidden: one row a slot → what each one's head makes of it; all heads in one call."""
        if not slots:
            return ()
        heads = self._adapters.heads
        values = op.heads(hidden, signed_segments((slot, 1) for slot in slots), heads)
        return tuple(row[: heads.classes(slot)] for row, slot in zip(values, slots, strict=True))
