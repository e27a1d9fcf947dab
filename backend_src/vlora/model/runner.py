"""One forward pass over the rows of a step, from token ids to logits and head scores.

The runner sees chunks, pages and segments, but no requests, queues or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vlora.atmm import op
from vlora.atmm.types import Segments
from vlora.ids import BASE
from vlora.lora.segments import signed_segments
from vlora.lora.store import AdapterStore
from vlora.lora.switcher import Switcher
from vlora.memory.device import upload_step
from vlora.memory.kv_cache import KVCache
from vlora.model.attention import AttentionPlan
from vlora.model.chunk import Chunk
from vlora.model.decoder import Decoder, LevelFeatures
from vlora.model.decoder_config import DecoderConfig
from vlora.model.loader import DecoderWeights


@dataclass(frozen=True)
class StepResult:
    """Outputs of the chunks that complete all known tokens of their sequence, in the order of the
    chunks.

    logits: [rows, vocabulary] fp32, one row per chunk that does not use a head.
    heads: one [classes] fp32 tensor per chunk that uses a vision task head, before softmax.
    """

    logits: torch.Tensor
    heads: tuple[torch.Tensor, ...]


class Runner:
    """Computes forward passes with the decoder, the adapters and the KV pages."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        adapters: AdapterStore,
        switcher: Switcher,
        kv_cache: KVCache,
    ) -> None:
        """Create the decoder.

        kv_cache: the KV pages, which the engine owns.
        """
        self._decoder = Decoder(config, weights, adapters, switcher)
        self._switcher = switcher
        self._adapters = adapters
        self._query_heads = config.heads
        self._kv_cache = kv_cache
        self._device = weights.slab.device

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> StepResult:
        """Compute the step's chunks with the switcher's active weights.

        chunks: in the order of their rows. If they are sorted by `ids.order_of`, there are the
            fewest segments, which is fastest.
        """
        attention = AttentionPlan(chunks, self._kv_cache, self._query_heads)
        live = self._switcher.live
        rows = [(chunk.slot, chunk.length) for chunk in chunks]
        segments = signed_segments(rows, live)
        sampled = [chunk for chunk in chunks if chunk.completes and not chunk.use_head]
        scored = [chunk for chunk in chunks if chunk.completes and chunk.use_head]
        completed = sampled + scored
        # In a step of decode rows only, both are equal, and are converted for the core only once.
        answers = [(chunk.slot, 1) for chunk in completed]
        answer_segments = segments if answers == rows else signed_segments(answers, live)
        # The LM head is never merged, so its segments do not depend on the live adapter.
        lm_head_segments = answer_segments
        if live != BASE or scored:
            lm_head_segments = signed_segments((chunk.slot, 1) for chunk in sampled)
        head_segments = signed_segments((chunk.slot, 1) for chunk in scored)

        last_rows = [chunk.last_row for chunk in completed]
        every_row = last_rows == list(range(sum(chunk.length for chunk in chunks)))
        tokens, last, *levels = upload_step(
            self._device,
            [
                torch.tensor([token for chunk in chunks for token in chunk.tokens]),
                torch.tensor([] if every_row else last_rows, dtype=torch.int64),
                *_level_features(chunks),
            ],
            attention,
            op.StepSegments(
                (segments, answer_segments, lm_head_segments, head_segments),
                self._device.torch_device,
            ),
        )
        hidden = self._decoder.forward(
            self._embed(tokens, chunks),
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
        self._device.read_back([self.forward(chunks).logits[:1]]).get()

    def _embed(self, tokens: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
        images = [
            (chunk.row, chunk.prompt.feature_row[chunk.start : chunk.end], chunk.prompt.features)
            for chunk in chunks
            if chunk.prompt.features is not None and not chunk.decodes
        ]
        return self._decoder.embed(tokens, images)

    def _head_scores(self, hidden: torch.Tensor, segments: Segments) -> tuple[torch.Tensor, ...]:
        """Return the outputs of the adapters' heads, computed in one call.

        hidden: [rows, hidden].
        segments: segments of these rows by adapter, in their order.
        """
        if not segments:
            return ()
        heads = self._adapters.heads
        values = iter(op.heads(hidden.float(), segments, heads).cpu())
        return tuple(
            next(values)[: heads.classes(segment.slot)]
            for segment in segments
            for _ in range(segment.length)
        )


def _level_features(chunks: Sequence[Chunk]) -> list[torch.Tensor]:
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
