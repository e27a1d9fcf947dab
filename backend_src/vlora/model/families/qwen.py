"""Qwen and Qwen-VL of the first generation, in the layout in which they were published.

The layers are those of Qwen2 with other names. One stored tensor contains the query, key and value
projections, and `intermediate_size` counts both halves of the gated MLP. Beyond the trained length
(`seq_length`) the published code changes queries and frequencies, so the context ends there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from vlora.model.families.base import QKV, BiasedFamily, WeightNames

FUSED = "c_attn"
_MODULES = {
    "attn.c_attn": FUSED,
    "attn.c_proj": "o_proj",
    "mlp.w2": "gate_proj",
    "mlp.w1": "up_proj",
    "mlp.c_proj": "down_proj",
}
_OTHERS = {
    "transformer.wte.weight": "embed_tokens.weight",
    "transformer.ln_f.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_NORMS = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}
_LAYER_KEY = re.compile(r"transformer\.h\.(\d+)\.([\w.]+)\.(weight|bias)")


class QwenConfig(PreTrainedConfig):  # type: ignore[misc]
    """Configuration of Qwen and Qwen-VL, which transformers does not have.

    The fields are those of the published `config.json`.
    """

    model_type = "qwen"

    vocab_size: int = 151936
    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    kv_channels: int = 128
    intermediate_size: int = 22016
    layer_norm_epsilon: float = 1e-6
    rotary_pct: float = 1.0
    rotary_emb_base: float = 10000.0
    seq_length: int = 2048
    no_bias: bool = True
    tie_word_embeddings: bool = False
    eos_token_id: int | None = None
    visual: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Copy the fields to the names that transformers uses for them.

        Raises ValueError for options that no published checkpoint has.
        """
        if self.rotary_pct != 1.0 or not self.no_bias:
            raise ValueError("'rotary_pct' must be 1 and 'no_bias' true")
        if self.kv_channels * self.num_attention_heads != self.hidden_size:
            raise ValueError("'kv_channels' times 'num_attention_heads' must be 'hidden_size'")
        if self.visual is None:
            raise ValueError("'visual' is missing; Qwen without images is not supported")
        self.hidden_act = "silu"
        self.rms_norm_eps = self.layer_norm_epsilon
        self.rope_parameters = {"rope_type": "default", "rope_theta": self.rotary_emb_base}
        kwargs["max_position_embeddings"] = self.seq_length
        super().__post_init__(**kwargs)

    @property
    def image_token_id(self) -> int:
        """Id of the placeholder token that stands for one row of image features."""
        assert self.visual is not None
        return int(self.visual["image_start_id"]) + 2


@dataclass(frozen=True)
class QwenNames(WeightNames):
    """Names of Qwen's weights. One stored tensor has the query, key and value projections."""

    @property
    def modules(self) -> Mapping[str, str]:
        return _MODULES

    def stored(self, key: str) -> tuple[str, ...]:
        if key in _OTHERS:
            return (_OTHERS[key],)
        match = _LAYER_KEY.fullmatch(key)
        if match is None:
            return ()
        layer, module, kind = int(match[1]), match[2], match[3]
        if module in _NORMS:
            return (self.norm(layer, _NORMS[module]),)
        target = _MODULES.get(module)
        targets = QKV if target == FUSED else (target,) if target else ()
        name = self.matrix if kind == "weight" else self.bias
        return tuple(name(layer, one) for one in targets)


class _Qwen(BiasedFamily):
    def intermediate_size(self, text: Any) -> int:
        return int(text.intermediate_size) // 2

    def turn_ends(self, text: Any) -> tuple[int, ...]:
        # The id of `<|im_end|>` is 212 below the id of the token that begins an image.
        return (int(text.visual["image_start_id"]) - 212,)


QWEN = _Qwen("qwen", QwenNames())
AutoConfig.register("qwen", QwenConfig, exist_ok=True)
