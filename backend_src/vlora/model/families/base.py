"""Description of one decoder family: what its checkpoints look like and what it does not support.

A family is a checkpoint architecture whose layers `model/decoder.py` computes exactly. Each family
has one file here and one line in `registry.py`; no other module names an architecture.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vlora.lora.slab import ATTENTION, TARGETS

_LAYOUT_PREFIX = r"^(?:model\.|language_model\.)*"


@dataclass(frozen=True)
class WeightNames:
    """Names of a checkpoint's decoder weights, without the prefix that its layout adds.

    norms: RMS norms of each layer, before attention and before the MLP.
    attention, mlp: modules that hold the target matrices.
    """

    embedding: str = "embed_tokens.weight"
    final_norm: str = "norm.weight"
    lm_head: str = "lm_head.weight"
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    attention: str = "self_attn"
    mlp: str = "mlp"

    def matrix(self, layer: int, target: str) -> str:
        """Return the name of a target matrix."""
        module = self.attention if target in ATTENTION else self.mlp
        return f"layers.{layer}.{module}.{target}.weight"

    def bias(self, layer: int, target: str) -> str:
        """Return the name of a target's bias."""
        return self.matrix(layer, target).removesuffix("weight") + "bias"

    def norm(self, layer: int, norm: str) -> str:
        """Return the name of one of a layer's norms."""
        return f"layers.{layer}.{norm}.weight"

    def without_prefix(self, key: str) -> str | None:
        """Return the name of a stored decoder weight without the layout's prefix, else None.

        Accepts the layouts of transformers 4 and 5, of multimodal checkpoints and of bare decoders.
        """
        match = self._pattern.match(key)
        return match[1] if match else None

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        modules = "|".join(map(re.escape, (self.attention, self.mlp)))
        norms = "|".join(map(re.escape, self.norms))
        others = "|".join(map(re.escape, (self.embedding, self.final_norm, self.lm_head)))
        return re.compile(
            rf"{_LAYOUT_PREFIX}("
            rf"layers\.\d+\.(?:(?:{modules})\.\w+_proj\.(?:weight|bias)|(?:{norms})\.weight)"
            rf"|{others})$"
        )


def biases_by_config(text: Any) -> tuple[str, ...]:
    """Return the targets with a bias, as `attention_bias` and `mlp_bias` say."""
    attention = bool(getattr(text, "attention_bias", False))
    mlp = bool(getattr(text, "mlp_bias", False))
    return tuple(t for t in TARGETS if (attention if t in ATTENTION else mlp))


def has_sliding_layers(text: Any) -> bool:
    """Return whether `layer_types` gives any layer sliding-window attention."""
    return "sliding_attention" in (getattr(text, "layer_types", None) or [])


@dataclass(frozen=True)
class DecoderFamily:
    """One decoder architecture, by the `model_type` of its text configuration.

    The callables take transformers' text configuration.

    biased_targets: returns the targets with a bias.
    sliding_window: returns whether any layer uses sliding-window attention, which is not supported.
    activations: supported values of `hidden_act`.
    """

    model_type: str
    biased_targets: Callable[[Any], tuple[str, ...]] = biases_by_config
    sliding_window: Callable[[Any], bool] = has_sliding_layers
    activations: tuple[str, ...] = ("silu",)
    names: WeightNames = WeightNames()

    def unsupported(self, text: Any) -> str | None:
        """Return why this configuration is not supported, None if it is."""
        if text.hidden_act not in self.activations:
            return (
                f"activation '{text.hidden_act}' is not supported; supported:"
                f" {', '.join(self.activations)}"
            )
        if self.sliding_window(text):
            return "sliding-window attention is not supported"
        return None
