"""Description of a decoder family: how its checkpoints are laid out, and what is unsupported.

A family is a checkpoint architecture whose layers `model/decoder.py` computes exactly. Each family
has a file here and a line in `registry.py`. No other module names an architecture.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vlora.weights.slab import ATTENTION, TARGETS

_LAYOUT_PREFIX = r"^(?:model\.|language_model\.)*"
QKV = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class WeightNames:
    """Names of a checkpoint's decoder weights, without the prefix that its layout adds.

    norms: names of the RMS norms of each layer, before attention and before the MLP.
    attention, mlp: modules that contain the target matrices.
    head_norms: RMS norms of each layer's query heads and key heads; () if there are none.
    """

    embedding: str = "embed_tokens.weight"
    final_norm: str = "norm.weight"
    lm_head: str = "lm_head.weight"
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    attention: str = "self_attn"
    mlp: str = "mlp"
    head_norms: tuple[str, ...] = ()

    def matrix(self, layer: int, target: str) -> str:
        module = self.attention if target in ATTENTION else self.mlp
        return f"layers.{layer}.{module}.{target}.weight"

    def bias(self, layer: int, target: str) -> str:
        return self.matrix(layer, target).removesuffix("weight") + "bias"

    def norm(self, layer: int, norm: str) -> str:
        return f"layers.{layer}.{norm}.weight"

    def without_prefix(self, key: str) -> str | None:
        """Return the name of a stored decoder weight without prefix; None for other weights."""
        match = self._pattern.match(key)
        return match[1] if match else None

    @property
    def modules(self) -> Mapping[str, str]:
        """Path of a module in a layer → target, for modules with other paths than `attention` and
        `mlp`.

        For a module that corresponds to several targets, the value is a key of `FUSED`.
        """
        return {}

    def stored(self, key: str) -> tuple[str, ...]:
        """Return the names of the decoder weights in a stored tensor, in the order of its rows."""
        name = self.without_prefix(key)
        return () if name is None else (name,)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        modules = "|".join(map(re.escape, (self.attention, self.mlp)))
        norms = "|".join(map(re.escape, (*self.norms, *self.head_norms)))
        others = "|".join(map(re.escape, (self.embedding, self.final_norm, self.lm_head)))
        return re.compile(
            rf"{_LAYOUT_PREFIX}(layers\.\d+\.(?:(?:{modules})\.\w+_proj\.(?:weight|bias)"
            rf"|(?:{norms})\.weight)|{others})$"
        )


@dataclass(frozen=True)
class DecoderFamily:
    """One decoder architecture, identified by the `model_type` of its text configuration.

    The methods take transformers' text configuration. A family overrides those that differ.

    names: names of the weights in a checkpoint.
    activations: supported values of `hidden_act`.
    rope_axes: function that returns the axis (0 time, 1 height, 2 width) of each rotary frequency.
        By default, the result is (): positions have one axis, the row's index in its sequence.
    """

    model_type: str
    names: WeightNames = WeightNames()
    activations: tuple[str, ...] = ("silu",)
    rope_axes: Callable[[Any], tuple[int, ...]] = lambda text: ()

    def biased_targets(self, text: Any) -> tuple[str, ...]:
        """Return the targets with a bias: by default, as `attention_bias` and `mlp_bias` say."""
        attention = bool(getattr(text, "attention_bias", False))
        mlp = bool(getattr(text, "mlp_bias", False))
        return tuple(t for t in TARGETS if (attention if t in ATTENTION else mlp))

    def sliding_window(self, text: Any) -> bool:
        """Return whether any layer uses sliding-window attention, which is not supported."""
        return "sliding_attention" in (getattr(text, "layer_types", None) or [])

    def intermediate_size(self, text: Any) -> int:
        """Return the width of the gated MLP."""
        return int(text.intermediate_size)

    def turn_ends(self, text: Any) -> tuple[int, ...]:
        """Return the ids of tokens that end an answer, beside those that the checkpoint lists."""
        return ()

    def unsupported(self, text: Any) -> str | None:
        """Return why this configuration is not supported; None if it is."""
        if text.hidden_act not in self.activations:
            return (
                f"activation '{text.hidden_act}' is not supported; supported:"
                f" {', '.join(self.activations)}"
            )
        return "sliding-window attention is not supported" if self.sliding_window(text) else None


class BiasedFamily(DecoderFamily):
    """Family whose query, key and value projections always have a bias."""

    def biased_targets(self, text: Any) -> tuple[str, ...]:
        return QKV
