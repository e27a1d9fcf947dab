"""A checkpoint's `config.json` → the decoder's sizes; what is not served is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from vlora.config import AUTO
from vlora.errors import InvalidArgument
from vlora.lora.slab import ATTENTION, TARGETS

SERVED = ("llama", "qwen2", "mistral")
"""Text configurations whose layers are exactly what `model/decoder.py` computes."""

ACTIVATIONS = ("silu",)
ROPE_TYPES = ("default", "linear", "llama3", "yarn")

NORMS = ("input_layernorm", "post_attention_layernorm")
EMBEDDING, FINAL_NORM, LM_HEAD = "embed_tokens.weight", "norm.weight", "lm_head.weight"


def weight_of(layer: int, target: str) -> str:
    """The name under which checkpoints hold a target matrix, without the layout's prefix."""
    return f"layers.{layer}.{'self_attn' if target in ATTENTION else 'mlp'}.{target}.weight"


def bias_of(layer: int, target: str) -> str:
    return weight_of(layer, target).removesuffix("weight") + "bias"


def norm_of(layer: int, norm: str) -> str:
    return f"layers.{layer}.{norm}.weight"


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of the decoder. `image_token` is None for a checkpoint without images.

    prefix: before `layers` in the names of transformers' model. biased: targets with a bias.
    tied: whether the LM head is the embedding matrix.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    norm_eps: float
    context: int
    prefix: str
    biased: tuple[str, ...]
    tied: bool
    image_token: int | None
    eos_tokens: tuple[int, ...]

    @property
    def target_shapes(self) -> dict[str, tuple[int, int]]:
        """target → (d_out, d_in)."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (query, self.hidden),
            "k_proj": (kv, self.hidden),
            "v_proj": (kv, self.hidden),
            "o_proj": (self.hidden, query),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """All that a checkpoint must hold: name, without the layout's prefix → shape."""
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocabulary, self.hidden)}
        if not self.tied:
            shapes[LM_HEAD] = (self.vocabulary, self.hidden)
        shapes[FINAL_NORM] = (self.hidden,)
        for layer in range(self.layers):
            for norm in NORMS:
                shapes[norm_of(layer, norm)] = (self.hidden,)
            for target, shape in self.target_shapes.items():
                shapes[weight_of(layer, target)] = shape
                if target in self.biased:
                    shapes[bias_of(layer, target)] = shape[:1]
        return shapes


def dtype_of(asked: str, folder: Path) -> torch.dtype:
    """In which type the weights of a checkpoint are kept: `asked` as the options have it. `auto` is
    bf16 for a checkpoint stored so, and fp32, which holds every other exactly."""
    if asked == AUTO:
        config = _read_config(folder)
        stored = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
        asked = "bfloat16" if stored in (torch.bfloat16, "bfloat16") else "float32"
    return torch.bfloat16 if asked == "bfloat16" else torch.float32


def load_config(folder: Path) -> DecoderConfig:
    """Raises InvalidArgument for a folder without a checkpoint, or one that is not served."""
    if not (folder / "config.json").is_file():
        raise InvalidArgument(f"model: {folder} holds no checkpoint (config.json is missing)")
    config = _read_config(folder)
    text = config.get_text_config()
    problem = _unserved(text) or _quantized(config) or _quantized(text)
    if problem:
        raise InvalidArgument(f"model: {folder}: {problem}")
    heads = text.num_attention_heads
    return DecoderConfig(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        intermediate=text.intermediate_size,
        vocabulary=text.vocab_size,
        norm_eps=text.rms_norm_eps,
        context=text.max_position_embeddings,
        prefix="model." if text is config else "model.language_model.",
        biased=_biased(text),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        image_token=getattr(config, "image_token_id", getattr(config, "image_token_index", None)),
        eos_tokens=_eos_tokens(folder, text),
    )


def _read_config(folder: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers' own checks raise many kinds
        raise InvalidArgument(f"model: {folder}: config.json cannot be read: {error}") from error


def _quantized(config: Any) -> str | None:
    """Why a checkpoint is refused whose weights only mean something with scales of their own."""
    quantization = getattr(config, "quantization_config", None)
    if not quantization:
        return None
    read = quantization.get if isinstance(quantization, dict) else vars(quantization).get
    method = read("quant_method") or "unknown"
    return (
        f"config.json has a 'quantization_config' (method '{method}'); quantized checkpoints are"
        " not served, store the weights as float16, bfloat16 or float32"
    )


def _biased(text: Any) -> tuple[str, ...]:
    """Targets with a bias, as transformers builds each type's layers."""
    if text.model_type == "qwen2":
        return ("q_proj", "k_proj", "v_proj")
    attention = bool(getattr(text, "attention_bias", False))
    feed_forward = bool(getattr(text, "mlp_bias", False))
    return tuple(t for t in TARGETS if (attention if t in ATTENTION else feed_forward))


def _unserved(text: Any) -> str | None:
    """Why this text configuration is not computed by our decoder, or None."""
    if text.model_type not in SERVED:
        return f"model type '{text.model_type}' is not served; these are: {', '.join(SERVED)}"
    if text.hidden_act not in ACTIVATIONS:
        return f"activation '{text.hidden_act}' is not served"
    rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ROPE_TYPES:
        return f"rope type '{rope}' is not served; these are: {', '.join(ROPE_TYPES)}"
    windows = getattr(text, "layer_types", None) or []
    if "sliding_attention" in windows or (
        text.model_type == "mistral" and getattr(text, "sliding_window", None)
    ):
        return "sliding-window attention is not served"
    return None


def _eos_tokens(folder: Path, text: Any) -> tuple[int, ...]:
    """End-of-text tokens, from generation_config.json where there is one."""
    eos = text.eos_token_id
    if (folder / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id or eos
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list | tuple) else (eos,)


def rotary(folder: Path) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [head_dim / 2] and the scale of cos and sin, by transformers' rules."""
    embedding = LlamaRotaryEmbedding(_read_config(folder).get_text_config())
    return embedding.inv_freq.float(), float(embedding.attention_scaling)
