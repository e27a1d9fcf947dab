"""The decoder: one small implementation of the Llama family over paged KV and LoRA segments.

Biased or plain projections, grouped-query attention, rotary positions, RMS norms. Knows nothing
of requests: it sees rows, positions and signed segments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from vlora.atmm import op
from vlora.atmm.types import Segment
from vlora.lora.adapter import LM_HEAD
from vlora.lora.layers import LoraLinear, product
from vlora.lora.slab import GROUPS
from vlora.lora.store import AdapterStore
from vlora.model.attention import AttentionPlan
from vlora.model.decoder_config import DecoderConfig
from vlora.model.loader import DecoderWeights


class Decoder:
    """Weights of all layers, and the forward pass over the rows of one step."""

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, adapters: AdapterStore
    ) -> None:
        self._config = config
        self._weights = weights
        self._lm_head_lora = adapters.group([(-1, LM_HEAD)])
        self._layers = [
            DecoderLayer(layer, config, weights, adapters) for layer in range(config.layers)
        ]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: [T] int64 → [T, hidden] fp32."""
        return F.embedding(tokens, self._weights.embedding).float()

    def forward(
        self, hidden: torch.Tensor, attention: AttentionPlan, segments: Sequence[Segment]
    ) -> torch.Tensor:
        """hidden: [T, hidden] embeddings → [T, hidden] before the final norm."""
        angles = attention.positions[:, None] * self._weights.inverse_frequencies
        rotary = _Rotary(angles, self._weights.rope_scale)
        for layer in self._layers:
            hidden = layer.forward(hidden, attention, rotary, segments)
        return hidden

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return _norm(hidden, self._weights.final_norm, self._config.norm_eps)

    def logits(self, hidden: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
        """hidden: [rows, hidden] after the final norm; segments over these rows → [rows, V]."""
        logits = product(hidden, self._weights.lm_head)
        if segments:
            op.apply(logits, hidden, segments, self._lm_head_lora)
        return logits


class DecoderLayer:
    """Attention and MLP of one layer, pre-norm, with residuals."""

    def __init__(
        self, layer: int, config: DecoderConfig, weights: DecoderWeights, adapters: AdapterStore
    ) -> None:
        self._layer = layer
        self._config = config
        self._input_norm = weights.norms[layer, "input_layernorm"]
        self._post_norm = weights.norms[layer, "post_attention_layernorm"]
        self._qkv, self._o, self._gate_up, self._down = (
            LoraLinear(
                weights.slab,
                layer,
                group,
                _fused_bias(group, layer, config, weights),
                adapters.group([(layer, target) for target in group]),
            )
            for group in GROUPS
        )

    def forward(
        self,
        hidden: torch.Tensor,
        attention: AttentionPlan,
        rotary: _Rotary,
        segments: Sequence[Segment],
    ) -> torch.Tensor:
        config, rows = self._config, hidden.shape[0]
        normed = _norm(hidden, self._input_norm, config.norm_eps)
        query, key, value = torch.split(self._qkv(normed, segments), self._qkv.widths, dim=1)
        attended = attention.attend(
            self._layer,
            rotary(query.view(rows, config.heads, config.head_dim)),
            rotary(key.view(rows, config.kv_heads, config.head_dim)),
            value.view(rows, config.kv_heads, config.head_dim),
        )
        hidden = hidden + self._o(attended.view(rows, -1), segments)
        normed = _norm(hidden, self._post_norm, config.norm_eps)
        gate, up = torch.split(self._gate_up(normed, segments), self._gate_up.widths, dim=1)
        return hidden + self._down(F.silu(gate) * up, segments)


class _Rotary:
    """Rotates halves of each head by its row's angles ([T, dim / 2])."""

    def __init__(self, angles: torch.Tensor, scale: float) -> None:
        both = torch.cat((angles, angles), dim=-1)[:, None]
        self._cos = both.cos() * scale
        self._sin = both.sin() * scale

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, heads, dim] → the same shape."""
        first, second = x.chunk(2, dim=-1)
        return x * self._cos + torch.cat((-second, first), dim=-1) * self._sin


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _fused_bias(
    group: tuple[str, ...], layer: int, config: DecoderConfig, weights: DecoderWeights
) -> torch.Tensor | None:
    """The group's biases one after another, zeros for those that have none; None if none has."""
    if not any((layer, target) in weights.biases for target in group):
        return None
    return torch.cat(
        [
            weights.biases.get((layer, target), torch.zeros(config.target_shapes[target][0]))
            for target in group
        ]
    )
