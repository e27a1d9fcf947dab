"""The decoder: one small implementation of the Llama family over paged KV and LoRA segments.

Biased or plain projections, grouped-query attention, rotary positions, RMS norms. Knows nothing
of requests: it sees rows, positions and signed segments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlora.atmm import op
from vlora.atmm.types import Segments
from vlora.ids import MatrixId
from vlora.kernels import ops
from vlora.lora.adapter import LM_HEAD
from vlora.lora.layers import LoraLinear
from vlora.lora.slab import GROUPS
from vlora.lora.store import AdapterStore
from vlora.lora.switcher import Switcher
from vlora.model.attention import AttentionPlan
from vlora.model.decoder_config import DecoderConfig
from vlora.model.loader import DecoderWeights
from vlora.model.rotary import Rotary, RotaryTable
from vlora.model.workspace import Rows, Workspace


class Decoder:
    """Weights of all layers, and the forward pass over the rows of one step."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        adapters: AdapterStore,
        switcher: Switcher,
    ) -> None:
        self._config = config
        self._weights = weights
        self._rotary = RotaryTable(weights.inverse_frequencies, weights.rope_scale)
        self._workspace = Workspace(config)
        self._lm_head = ops.Matrix(weights.lm_head)
        self._lm_head_lora = adapters.group([(-1, LM_HEAD)])
        self._layers = [
            DecoderLayer(layer, config, weights, adapters, switcher)
            for layer in range(config.layers)
        ]

    def embed(
        self, tokens: torch.Tensor, images: Sequence[tuple[int, torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """tokens: [T] int64; images: as `ops.embed` has them → [T, hidden] fp32, until the next."""
        place = self._workspace.rows(len(tokens)).hidden
        return ops.embed(tokens, self._weights.embedding, images, out=place)

    def forward(
        self,
        hidden: torch.Tensor,
        attention: AttentionPlan,
        segments: Segments,
        wanted: Sequence[int],
        wanted_segments: Segments,
    ) -> torch.Tensor:
        """hidden: [T, hidden] embeddings, overwritten → what the LM head reads of rows `wanted`, in
        their order: [len(wanted), hidden]. wanted_segments: over these.

        The last layer's attention is the last to see all rows; behind it only these go on.
        """
        rotary, rows = self._rotary.at(attention.positions), self._workspace.rows(len(hidden))
        everything = list(wanted) == list(range(len(hidden)))
        delta: torch.Tensor | None = None
        for layer in self._layers:
            attended = layer.attend(hidden, delta, attention, rotary, segments, rows)
            if layer is self._layers[-1] and not everything:
                hidden, attended, segments = hidden[wanted], attended[wanted], wanted_segments
                rows = self._workspace.rows(len(hidden))
            delta = layer.finish(hidden, attended, segments, rows)
        return ops.add_norm(hidden, delta, self._weights.final_norm, self._config.norm_eps)

    def logits(self, hidden: torch.Tensor, segments: Segments) -> torch.Tensor:
        """hidden: [rows, hidden] after the final norm; segments over these rows → [rows, V]."""
        logits = self._lm_head(hidden)
        if segments:
            op.apply(logits, hidden, segments, self._lm_head_lora)
        return logits


def lora_groups(layers: int) -> list[list[MatrixId]]:
    """The groups of projections that a decoder goes through, in the order of use."""
    found = [[(layer, target) for target in group] for layer in range(layers) for group in GROUPS]
    return [*found, [(-1, LM_HEAD)]]


class DecoderLayer:
    """Attention and MLP of one layer, pre-norm, with residuals."""

    def __init__(
        self,
        layer: int,
        config: DecoderConfig,
        weights: DecoderWeights,
        adapters: AdapterStore,
        switcher: Switcher,
    ) -> None:
        self._layer = layer
        self._config = config
        self._input_norm = weights.norms[layer, "input_layernorm"]
        self._post_norm = weights.norms[layer, "post_attention_layernorm"]
        self._qkv, self._o, self._gate_up, self._down = (
            LoraLinear(
                switcher,
                layer * len(GROUPS) + number,
                _fused_bias(group, layer, config, weights),
                adapters.group([(layer, target) for target in group]),
            )
            for number, group in enumerate(GROUPS)
        )

    def attend(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        attention: AttentionPlan,
        rotary: Rotary,
        segments: Segments,
        rows: Rows,
    ) -> torch.Tensor:
        """hidden: [T, hidden], to which `delta` (of the layer before) is added in place → what each
        row has seen of its sequence, [T, heads · dim]: `rows.attended`."""
        normed = ops.add_norm(
            hidden, delta, self._input_norm, self._config.norm_eps, out=rows.normed
        )
        qkv = self._qkv(normed, segments, rows.qkv)
        return attention.attend(self._layer, qkv, rotary, rows.attended)

    def finish(
        self,
        hidden: torch.Tensor,
        attended: torch.Tensor,
        segments: Segments,
        rows: Rows,
    ) -> torch.Tensor:
        """hidden: [T, hidden], to which what attention says is added in place → what the MLP says,
        for the next layer to add: `rows.delta`."""
        said = self._o(attended, segments, rows.delta)
        normed = ops.add_norm(hidden, said, self._post_norm, self._config.norm_eps, out=rows.normed)
        gated = self._gate_up.gated(normed, segments, rows.gate_up, rows.gated)
        return self._down(gated, segments, rows.delta)


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
