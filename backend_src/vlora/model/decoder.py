"""The decoder: one small implementation of the Llama family over paged KV and LoRA segments.

Biased or unbiased projections, grouped-query attention, rotary positions, RMS norms, SwiGLU. The
decoder does not see requests, only rows, positions and signed segments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlora.atmm import op
from vlora.atmm.types import Segments
from vlora.ids import MatrixId
from vlora.kernels import ops
from vlora.lora.layers import LoraLinear
from vlora.lora.model_shape import LM_HEAD
from vlora.lora.slab import GROUPS
from vlora.lora.store import AdapterStore
from vlora.lora.switcher import Switcher
from vlora.model.attention import AttentionPlan
from vlora.model.decoder_config import DecoderConfig
from vlora.model.loader import DecoderWeights
from vlora.model.rotary import Rotary, RotaryTable
from vlora.model.workspace import StepBuffers, Workspace


class Decoder:
    """All layers, the embedding and the LM head, and the forward pass over the rows of one step."""

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
        """Return the embeddings of a step's rows, [T, hidden] fp32, valid until the next call.

        tokens: [T] int64. images: as in `ops.embed`.
        """
        hidden = self._workspace.buffers(len(tokens)).hidden
        return ops.embed(tokens, self._weights.embedding, images, out=hidden)

    def forward(
        self,
        hidden: torch.Tensor,
        attention: AttentionPlan,
        segments: Segments,
        output_rows: Sequence[int],
        output_segments: Segments,
    ) -> torch.Tensor:
        """Return the final-norm hidden states of `output_rows`, [len(output_rows), hidden].

        hidden: [T, hidden] embeddings, overwritten.
        segments: over the T rows. output_segments: over the output rows, in their order.

        Only the output rows pass through what follows the last layer's attention (decision 63).
        """
        rotary = self._rotary.lookup(attention.positions)
        buffers = self._workspace.buffers(len(hidden))
        all_rows = list(output_rows) == list(range(len(hidden)))
        delta: torch.Tensor | None = None
        for layer in self._layers:
            attended = layer.attend(hidden, delta, attention, rotary, segments, buffers)
            if layer is self._layers[-1] and not all_rows:
                hidden, attended = hidden[output_rows], attended[output_rows]
                segments = output_segments
                buffers = self._workspace.buffers(len(hidden))
            delta = layer.finish(hidden, attended, segments, buffers)
        return ops.add_norm(hidden, delta, self._weights.final_norm, self._config.norm_eps)

    def logits(self, hidden: torch.Tensor, segments: Segments) -> torch.Tensor:
        """Return the logits, [rows, V] fp32, of final-norm hidden states, [rows, hidden].

        segments: over these rows.
        """
        logits = self._lm_head(hidden)
        if segments:
            op.apply(logits, hidden, segments, self._lm_head_lora)
        return logits


def lora_groups(layers: int) -> list[list[MatrixId]]:
    """Return the groups of projections that share their input, in the order of execution."""
    groups = [[(layer, target) for target in group] for layer in range(layers) for group in GROUPS]
    return [*groups, [(-1, LM_HEAD)]]


class DecoderLayer:
    """Attention and MLP of one layer, pre-norm, with residuals.

    Both outputs are returned as `delta`, which the next norm adds to the residual stream.
    """

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
        self._input_norm, self._post_norm = (
            weights.norms[layer, norm] for norm in config.names.norms
        )
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
        buffers: StepBuffers,
    ) -> torch.Tensor:
        """Add `delta` to `hidden` in place and return the attention of each row to its sequence.

        hidden: [T, hidden]. delta: [T, hidden], output of the layer before, None for the first.
        Returns `buffers.attended`, [T, heads · dim], before the output projection.
        """
        normed = ops.add_norm(
            hidden, delta, self._input_norm, self._config.norm_eps, out=buffers.normed
        )
        qkv = self._qkv(normed, segments, buffers.qkv)
        return attention.attend(self._layer, qkv, rotary, buffers.attended)

    def finish(
        self,
        hidden: torch.Tensor,
        attended: torch.Tensor,
        segments: Segments,
        buffers: StepBuffers,
    ) -> torch.Tensor:
        """Project the attention, add it to `hidden` in place, and return the output of the MLP.

        hidden: [T, hidden]. attended: [T, heads · dim]. Returns `buffers.delta`, [T, hidden], which
        the next layer adds.
        """
        projected = self._o(attended, segments, buffers.delta)
        normed = ops.add_norm(
            hidden, projected, self._post_norm, self._config.norm_eps, out=buffers.normed
        )
        gated = self._gate_up.gated(normed, segments, buffers.gate_up, buffers.gated)
        return self._down(gated, segments, buffers.delta)


def _fused_bias(
    group: tuple[str, ...], layer: int, config: DecoderConfig, weights: DecoderWeights
) -> torch.Tensor | None:
    """Return a group's concatenated biases, zeros where a target has none; None without any."""
    if not any((layer, target) in weights.biases for target in group):
        return None
    return torch.cat(
        [
            weights.biases.get((layer, target), torch.zeros(config.target_shapes[target][0]))
            for target in group
        ]
    )
