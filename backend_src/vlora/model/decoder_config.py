"""Decoder sizes from a checkpoint's `config.json`; unsupported checkpoints are rejected by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig

from vlora.config import AUTO
from vlora.errors import InvalidArgument
from vlora.model.families.base import WeightNames
from vlora.model.families.registry import FAMILIES
from vlora.model.rotary import rope_frequencies, unsupported_rope


@dataclass(frozen=True)
class DecoderConfig:
    """Architecture of the decoder, as read from a checkpoint.

    context: maximum number of positions of a sequence.
    prefix: part before `layers` in the module names of the transformers model.
    biased: targets with a bias.
    tied: whether the LM head is the embedding matrix.
    image_token: id of the image placeholder, None for a checkpoint without images.
    eos_tokens: ids of the end-of-text tokens.
    names: names of the weights in the checkpoint.
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
    names: WeightNames

    @property
    def target_shapes(self) -> dict[str, tuple[int, int]]:
        """Shape (d_out, d_in) of each target matrix."""
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
        """Shape of each weight that a checkpoint must hold, by name without the layout's prefix."""
        names = self.names
        shapes: dict[str, tuple[int, ...]] = {names.embedding: (self.vocabulary, self.hidden)}
        if not self.tied:
            shapes[names.lm_head] = (self.vocabulary, self.hidden)
        shapes[names.final_norm] = (self.hidden,)
        for layer in range(self.layers):
            for norm in names.norms:
                shapes[names.norm(layer, norm)] = (self.hidden,)
            for target, shape in self.target_shapes.items():
                shapes[names.matrix(layer, target)] = shape
                if target in self.biased:
                    shapes[names.bias(layer, target)] = shape[:1]
        return shapes


def dtype_of(requested: str, folder: Path) -> torch.dtype:
    """Return the type in which the weights of a checkpoint are stored in memory.

    requested: option `dtype`. `auto` is bf16 for a checkpoint stored in bf16 and fp32, which holds
    every other stored type exactly, for all others.
    """
    if requested == AUTO:
        config = _read_config(folder)
        stored = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
        requested = "bfloat16" if stored in (torch.bfloat16, "bfloat16") else "float32"
    return torch.bfloat16 if requested == "bfloat16" else torch.float32


def load_config(folder: Path) -> DecoderConfig:
    """Read the decoder's sizes from a checkpoint folder.

    Raises InvalidArgument for a folder without a checkpoint and for an unsupported checkpoint.
    """
    if not (folder / "config.json").is_file():
        raise InvalidArgument(f"model: {folder} holds no checkpoint (config.json is missing)")
    config = _read_config(folder)
    text = config.get_text_config()
    problem = _unsupported(text) or _quantized(config) or _quantized(text)
    if problem:
        raise InvalidArgument(f"model: {folder}: {problem}")
    family = FAMILIES[text.model_type]
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
        biased=family.biased_targets(text),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        image_token=getattr(config, "image_token_id", getattr(config, "image_token_index", None)),
        eos_tokens=_eos_tokens(folder, text),
        names=family.names,
    )


def load_rope_frequencies(folder: Path) -> tuple[torch.Tensor, float]:
    """Read a checkpoint's rope configuration and return what `rope_frequencies` makes of it."""
    return rope_frequencies(_read_config(folder).get_text_config())


def _read_config(folder: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers' own checks raise many types
        raise InvalidArgument(f"model: {folder}: config.json cannot be read: {error}") from error


def _unsupported(text: Any) -> str | None:
    """Return why our decoder cannot compute this text configuration, None if it can."""
    family = FAMILIES.get(text.model_type)
    if family is None:
        return f"model type '{text.model_type}' is not supported; supported: {', '.join(FAMILIES)}"
    return family.unsupported(text) or unsupported_rope(text)


def _quantized(config: Any) -> str | None:
    """Return why a checkpoint with quantized weights is rejected, None if it has none."""
    quantization = getattr(config, "quantization_config", None)
    if not quantization:
        return None
    read = quantization.get if isinstance(quantization, dict) else vars(quantization).get
    method = read("quant_method") or "unknown"
    return (
        f"config.json has a 'quantization_config' (method '{method}'); quantized checkpoints are"
        " not supported, store the weights as float16, bfloat16 or float32"
    )


def _eos_tokens(folder: Path, text: Any) -> tuple[int, ...]:
    """Return the ids of the end-of-text tokens, from generation_config.json where it exists.

    Ids beyond the vocabulary are omitted: the model cannot generate them.
    """
    eos = text.eos_token_id
    if (folder / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id or eos
    if eos is None:
        return ()
    ids = eos if isinstance(eos, list | tuple) else (eos,)
    return tuple(token for token in ids if 0 <= token < text.vocab_size)
