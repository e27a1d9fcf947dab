"""The decoder: one implementation for all models with Llama's layers, over paged KV and LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from vlora import backends
from vlora.adapters.model_shape import LM_HEAD
from vlora.adapters.residency import Slots
from vlora.atmm import op
from vlora.atmm.types import Segments
from vlora.ids import MatrixId
from vlora.kernels import ops
from vlora.kernels.quantized import fine_product, matrix_of
from vlora.model import step_recordings
from vlora.model.attention import AttentionPlan
from vlora.model.decoder_config import DecoderConfig
from vlora.model.loader import DecoderWeights
from vlora.model.lora_linear import LoraLinear
from vlora.model.rotary import Rotary, RotaryTable
from vlora.model.step_recordings import MAX_ROWS, RecordingKey, StepRecordings
from vlora.model.switcher import Switcher
from vlora.model.workspace import StepBuffers, Workspace
from vlora.weights.slab import GROUPS


@dataclass(frozen=True)
class LevelFeatures:
    """Image features that are added to the outputs of the first layers (DeepStack).

    rows: [n] int64, rows of the step that are image tokens.
    features: [levels, n, hidden] fp32; level i is added to the output of layer i.
    """

    rows: torch.Tensor
    features: torch.Tensor


class Decoder:
    """The decoder: embedding, all layers and LM head.

    adapters: source of the A and B of each group of projections.
    switcher: owner of the active weights, which may have an adapter merged.
    """

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, adapters: Slots, switcher: Switcher
    ) -> None:
        self._config = config
        self._weights = weights
        device = weights.slab.device
        self._rotary = RotaryTable(
            weights.inverse_frequencies, weights.rope_scale, config.rope_axes, device.torch_device
        )
        self._workspace = Workspace(config, device, weights.slab.dtype)
        self._lm_head = fine_product(matrix_of(weights.lm_head, None))
        # Groups of projections, in the order of execution; the LM head is last.
        self.lora_groups = [adapters.group(group) for group in lora_groups(config.layers)]
        self._lm_head_lora = self.lora_groups[-1]
        # Rounding activations to integers would turn differences of a bit into other answers.
        self.fixed_order = weights.slab.format is not None and weights.slab.format.dynamic
        if self.fixed_order:
            for group in self.lora_groups:
                group.fix_order()
        self._switcher = switcher
        self.recordings = StepRecordings()
        self._layers = [
            DecoderLayer(n, config, weights, adapters, switcher) for n in range(config.layers)
        ]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of the memory that steps reuse. They change when it is reallocated."""
        return *self._workspace.addresses, *self._rotary.addresses

    def reserve(self, rows: int, positions: int) -> None:
        """Allocate the memory of steps with `rows` rows and with positions below `positions`."""
        self._workspace.buffers(rows)
        self._rotary.reserve(positions)

    def prepare(self, positions: torch.Tensor) -> None:
        """Extend the table of rotary angles to the positions of a step, in host memory."""
        self._rotary.extend(positions)

    def embed(
        self, tokens: torch.Tensor, images: Sequence[tuple[int, torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """Return the embeddings of a step, [T, hidden] fp32, valid until the next call
        (`ops.embed`).
        """
        hidden = self._workspace.buffers(len(tokens)).hidden
        return ops.embed(tokens, self._weights.embedding, images, out=hidden)

    def forward(
        self,
        hidden: torch.Tensor,
        attention: AttentionPlan,
        segments: Segments,
        output_rows: torch.Tensor | None,
        output_segments: Segments,
        levels: LevelFeatures | None = None,
    ) -> torch.Tensor:
        """Return the hidden states of `output_rows` after the final norm, [output rows, hidden].

        hidden: [T, hidden] embeddings; overwritten.
        segments, output_segments: segments of the T rows, and of the output rows in their order.
        output_rows: numbers of the rows to return, on the device; None for all rows. After the
            attention of the last layer, only they are computed.
        levels: image features for the first layers, or None.
        """
        rotary = self._rotary.lookup(attention.placed_positions)

        def compute() -> tuple[torch.Tensor, torch.Tensor]:
            return self._compute_layers(
                hidden, attention, rotary, segments, output_rows, output_segments, levels
            )

        key = None
        if output_rows is None and levels is None:
            key = self._recording_key(hidden, attention, segments)
        if key is None:
            residual, delta = compute()
        else:
            self.recordings.run(key, self._switcher.active, attention, rotary, segments, compute)
            residual, delta = hidden, self._workspace.buffers(len(hidden)).delta
        return ops.add_norm(residual, delta, self._weights.final_norm, self._config.norm_eps)

    def _compute_layers(
        self,
        hidden: torch.Tensor,
        attention: AttentionPlan,
        rotary: Rotary,
        segments: Segments,
        output_rows: torch.Tensor | None,
        output_segments: Segments,
        levels: LevelFeatures | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        buffers = self._workspace.buffers(len(hidden))
        delta: torch.Tensor | None = None
        for number, layer in enumerate(self._layers):
            attended = layer.attend(hidden, delta, attention, rotary, segments, buffers)
            if layer is self._layers[-1] and output_rows is not None:
                hidden, attended = hidden[output_rows], attended[output_rows]
                segments = output_segments
                buffers = self._workspace.buffers(len(hidden))
            delta = layer.finish(hidden, attended, segments, buffers)
            if levels is not None and number < len(levels.features):
                hidden.index_add_(0, levels.rows, levels.features[number])
        return hidden, buffers.delta

    def _recording_key(
        self, hidden: torch.Tensor, attention: AttentionPlan, segments: Segments
    ) -> RecordingKey | None:  # None if the step's kernel calls cannot be repeated.
        rows = len(hidden)
        compiled = (
            attention.is_compiled
            and backends.backend_of("kernels") == backends.backend_of("atmm") == "cpu"
        )
        if not compiled or rows > MAX_ROWS or not step_recordings.enabled():
            return None
        if attention.positions.shape[-1] != rows:
            return None  # The first layer reports the error.
        # Allocate the buffers before their addresses are read.
        self._workspace.buffers(rows)
        layers = self.lora_groups[:-1] if segments else ()
        return RecordingKey(
            rows,
            id(self._switcher.active),
            tuple(group.has(segments) for group in layers),
            (hidden.data_ptr(), *self._workspace.addresses, *attention.addresses),
        )

    def logits(
        self, hidden: torch.Tensor, segments: Segments, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits, [rows, vocabulary] fp32, for rows after the final norm, or in `out`."""
        logits = self._lm_head(hidden)
        if self._lm_head_lora.has(segments):
            op.apply(logits, hidden, segments, self._lm_head_lora)
        return logits.float() if out is None else out.copy_(logits)


def lora_groups(layers: int) -> list[list[MatrixId]]:
    """Return the matrices that share their input, in the order of execution; LM head last."""
    groups = [[(layer, target) for target in group] for layer in range(layers) for group in GROUPS]
    return [*groups, [(-1, LM_HEAD)]]


class DecoderLayer:
    """Attention and MLP of one layer, with norms before them and residual connections.

    Outputs are passed on as `delta` to the next norm, which adds them to the residual stream.
    Adding and normalizing in one kernel reads the stream only once.
    """

    def __init__(
        self,
        layer: int,
        config: DecoderConfig,
        weights: DecoderWeights,
        adapters: Slots,
        switcher: Switcher,
    ) -> None:
        self._layer = layer
        self._config = config
        self._input_norm, self._post_norm = (weights.norms[layer, n] for n in config.names.norms)
        self._head_norms = None
        if config.names.head_norms:
            query, key = (weights.norms[layer, norm] for norm in config.names.head_norms)
            self._head_norms = ops.HeadNorms(query, key, config.norm_eps)
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
        """Add `delta` to `hidden` in place, and return each row's attention over its sequence, [T,
        heads · dim], before the output projection.

        hidden, delta: [T, hidden], the stream and the previous layer's output (None for the first).
        """
        normed = ops.add_norm(
            hidden, delta, self._input_norm, self._config.norm_eps, out=buffers.normed
        )
        qkv = self._qkv(normed, segments, buffers.qkv)
        return attention.attend(self._layer, qkv, rotary, buffers.attended, self._head_norms)

    def finish(
        self, hidden: torch.Tensor, attended: torch.Tensor, segments: Segments, buffers: StepBuffers
    ) -> torch.Tensor:
        """Add the output projection of `attended`, [T, heads · dim], to `hidden`, [T, hidden], in
        place; return the MLP's output, [T, hidden].
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
    if not any((layer, target) in weights.biases for target in group):
        return None
    device = weights.slab.device
    zeros = partial(torch.zeros, device=device.torch_device)
    widths = {target: config.target_shapes[target][0] for target in group}
    biases = [weights.biases.get((layer, name), zeros(d_out)) for name, d_out in widths.items()]
    return torch.cat(biases).to(device.row_dtype(weights.slab.dtype))
