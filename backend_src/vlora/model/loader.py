"""A checkpoint folder → the decoder's configuration and weights.

Reads the language model of any checkpoint of the Llama family, alone or inside a multimodal one;
vision towers and connectors are left to `vision/encoder.py`. Names are recognised by their ends,
so the layouts of transformers 4 and 5 and bare decoders all load.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from vlora.errors import InvalidArgument
from vlora.lora.slab import TARGETS, WeightSlab

SERVED = ("llama", "qwen2", "mistral")
"""Text configurations whose layers are exactly what `model/decoder.py` computes."""

ACTIVATIONS = ("silu",)
ROPE_TYPES = ("default", "linear", "llama3", "yarn")

_LAYER = re.compile(
    r"^(?:model\.|language_model\.)*layers\.(\d+)\.(?:(?:self_attn|mlp)\.(\w+_proj)\.(weight|bias)"
    r"|(input_layernorm|post_attention_layernorm)\.weight)$"
)
_OTHER = re.compile(
    r"^(?:model\.|language_model\.)*(?:(embed_tokens|norm)\.weight|(lm_head)\.weight)$"
)


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of the decoder. `image_token` is None for a checkpoint without images."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    norm_eps: float
    context: int
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


@dataclass(frozen=True)
class DecoderWeights:
    """fp32 weights; target matrices lie in the slab, all else beside it.

    biases: (layer, target) → [d_out]. norms: (layer, name) → [hidden].
    inverse_frequencies: [head_dim / 2], with `rope_scale` on cos and sin.
    """

    slab: WeightSlab
    embedding: torch.Tensor
    lm_head: torch.Tensor
    final_norm: torch.Tensor
    norms: Mapping[tuple[int, str], torch.Tensor]
    biases: Mapping[tuple[int, str], torch.Tensor]
    inverse_frequencies: torch.Tensor
    rope_scale: float


def load_config(folder: Path) -> DecoderConfig:
    """Raises InvalidArgument for a folder without a checkpoint, or one that is not served."""
    if not (folder / "config.json").is_file():
        raise InvalidArgument(f"model: {folder} holds no checkpoint (config.json is missing)")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    text = config.get_text_config()
    problem = _unserved(text)
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
        image_token=getattr(config, "image_token_id", getattr(config, "image_token_index", None)),
        eos_tokens=_eos_tokens(folder, text),
    )


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
    from transformers import GenerationConfig

    eos = text.eos_token_id
    if (folder / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id or eos
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list | tuple) else (eos,)


def load_weights(folder: Path, config: DecoderConfig) -> DecoderWeights:
    """Reads every safetensors file of the folder, converting to fp32.

    Raises InvalidArgument naming what is missing.
    """
    targets: dict[tuple[int, str], torch.Tensor] = {}
    biases: dict[tuple[int, str], torch.Tensor] = {}
    norms: dict[tuple[int, str], torch.Tensor] = {}
    others: dict[str, torch.Tensor] = {}
    for key, tensor in _tensors(folder):
        if match := _LAYER.match(key):
            layer, target, kind, norm = int(match[1]), match[2], match[3], match[4]
            if norm:
                norms[layer, norm] = tensor
            else:
                (targets if kind == "weight" else biases)[layer, target] = tensor
        elif match := _OTHER.match(key):
            others[match[1] or match[2]] = tensor
    wanted = {(layer, target) for layer in range(config.layers) for target in TARGETS}
    missing = sorted(wanted - set(targets))
    missing_others = sorted({"embed_tokens", "norm"} - set(others))
    if missing or missing_others:
        raise InvalidArgument(f"model: {folder} lacks {(missing_others + missing)[0]}")
    slab = WeightSlab(config.layers, config.target_shapes)
    slab.fill(lambda layer, target: targets[layer, target])
    frequencies, scale = _rotary(folder)
    return DecoderWeights(
        slab=slab,
        embedding=others["embed_tokens"],
        lm_head=others.get("lm_head", others["embed_tokens"]),
        final_norm=others["norm"],
        norms=norms,
        biases=biases,
        inverse_frequencies=frequencies,
        rope_scale=scale,
    )


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InvalidArgument(f"model: {folder} holds no .safetensors file")
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 (the file itself cannot be iterated)
                if _LAYER.match(key) or _OTHER.match(key):
                    yield key, opened.get_tensor(key).to(torch.float32)


def _rotary(folder: Path) -> tuple[torch.Tensor, float]:
    """Inverse frequencies and attention scaling, computed by transformers' own rules."""
    text = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    rotary = LlamaRotaryEmbedding(text)
    return rotary.inv_freq.float(), float(rotary.attention_scaling)
