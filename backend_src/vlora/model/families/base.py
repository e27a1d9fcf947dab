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


def biased_targets(text: Any) -> tuple[str, ...]:
    """Return the targets with a bias, whatever the configuration says."""
    return ("q_proj", "k_proj", "v_proj")


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
        """Return the name of a stored decoder weight without its layout's prefix; None for other
        weights.

        The layouts of transformers 4 and 5, of multimodal checkpoints and of bare decoders are
        recognized.
        """
        match = self._pattern.match(key)
        return match[1] if match else None

    @property
    def modules(self) -> Mapping[str, str]:
        """Path of a module in a layer → target, for modules whose path is not `attention` or `mlp`
        followed by the target's name.

        For a module that corresponds to several targets, the value is a key of `lora.fused.FUSED`.
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
            rf"{_LAYOUT_PREFIX}("
            rf"layers\.\d+\.(?:(?:{modules})\.\w+_proj\.(?:weight|bias)|(?:{norms})\.weight)"
            rf"|{others})$"
        )


def biases_by_config(text: Any) -> tuple[str, ...]:
    """Return the targets with a bias, according to `attention_bias` and `mlp_bias`."""
    attention = bool(getattr(text, "attention_bias", False))
    mlp = bool(getattr(text, "mlp_bias", False))
    return tuple(t for t in TARGETS if (attention if t in ATTENTION else mlp))


def has_sliding_layers(text: Any) -> bool:
    """Return whether `layer_types` contains sliding-window attention."""
    return "sliding_attention" in (getattr(text, "layer_types", None) or [])


def stated_intermediate_size(text: Any) -> int:
    """Return the width of the gated MLP, as the configuration states it."""
    return int(text.intermediate_size)


def no_tokens(text: Any) -> tuple[int, ...]:
    """Return (): no tokens in addition to those that the checkpoint's configuration lists."""
    return ()


def one_axis(text: Any) -> tuple[int, ...]:
    """Return (): all angles depend on one number, the row's index in its sequence."""
    return ()


@dataclass(frozen=True)
class DecoderFamily:
    """One decoder architecture, identified by the `model_type` of its text configuration.

    The callables take transformers' text configuration.

    biased_targets: returns the targets with a bias.
    sliding_window: returns whether any layer uses sliding-window attention, which is not supported.
    activations: supported values of `hidden_act`.
    names: names of the weights in a checkpoint.
    rope_axes: returns the axis (0 time, 1 height, 2 width) of each rotary frequency, or () if
        positions have one axis.
    intermediate_size: returns the width of the gated MLP.
    turn_ends: returns the ids of tokens that end an answer, in addition to those that the
        checkpoint's configuration lists.
    """

    model_type: str
    biased_targets: Callable[[Any], tuple[str, ...]] = biases_by_config
    sliding_window: Callable[[Any], bool] = has_sliding_layers
    activations: tuple[str, ...] = ("silu",)
    names: WeightNames = WeightNames()
    rope_axes: Callable[[Any], tuple[int, ...]] = one_axis
    intermediate_size: Callable[[Any], int] = stated_intermediate_size
    turn_ends: Callable[[Any], tuple[int, ...]] = no_tokens

    def unsupported(self, text: Any) -> str | None:
        """Return why this configuration is not supported; None if it is."""
        if text.hidden_act not in self.activations:
            return (
                f"activation '{text.hidden_act}' is not supported; supported:"
                f" {', '.join(self.activations)}"
            )
        if self.sliding_window(text):
            return "sliding-window attention is not supported"
        return None
