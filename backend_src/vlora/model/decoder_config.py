"""Architecture of the decoder, read from a checkpoint's `config.json`, or rejected."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from vlora.config import AUTO, Options
from vlora.errors import InvalidArgument, in_one_line
from vlora.kernels.formats import Format
from vlora.model.checkpoint import stored_alike
from vlora.model.families.base import WeightNames
from vlora.model.families.registry import FAMILIES
from vlora.model.folder_checks import described_quantization, end_tokens, problem_of_config
from vlora.model.multimodal import refusal
from vlora.model.quantization_config import StoredQuantization, stored_quantization
from vlora.model.rotary import head_dim, unsupported_rope
from vlora.model.weight_files import open_weights, weight_files

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecoderConfig:
    """Architecture of the decoder, as read from a checkpoint.

    hidden, intermediate: widths of the residual stream and of the MLP.
    heads, kv_heads: number of query heads, and of heads of keys and of values.
    vocabulary, context: number of tokens with an embedding; maximum positions of a sequence.
    prefix: prefix of `layers` in the module names of the transformers model.
    biased: targets with a bias.
    tied: whether the LM head is the same matrix as the embedding. It is not if the files hold
        another one, whatever `config.json` says.
    image_token: id of the image placeholder; None for a checkpoint without images.
    rope_axes: axis of each rotary frequency; see `DecoderFamily.rope_axes`.
    image_merge: number of patches on each side of the square that becomes one token.
    clip_times: time positions per second, and frames encoded together, if time positions of a
        clip depend on its frame rate; else None.
    image_levels: number of first layers to whose outputs image features are added (DeepStack).
    quantization: layout of the target matrices in the checkpoint; None if they are floats.
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
    rope_axes: tuple[int, ...] = ()
    image_merge: int = 1
    image_levels: int = 0
    clip_times: tuple[float, int] | None = None
    quantization: StoredQuantization | None = None

    @property
    def feature_width(self) -> int:
        """Width of a row of image features: `hidden` for the embedding and for each level."""
        return self.hidden * (1 + self.image_levels)

    @property
    def target_shapes(self) -> dict[str, tuple[int, int]]:
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
        """Shape of each weight that a checkpoint must contain, by name without prefix."""
        names = self.names
        shapes: dict[str, tuple[int, ...]] = {names.embedding: (self.vocabulary, self.hidden)}
        if not self.tied:
            shapes[names.lm_head] = (self.vocabulary, self.hidden)
        shapes[names.final_norm] = (self.hidden,)
        for layer in range(self.layers):
            for norm in names.norms:
                shapes[names.norm(layer, norm)] = (self.hidden,)
            for norm in names.head_norms:
                shapes[names.norm(layer, norm)] = (self.head_dim,)
            for target, shape in self.target_shapes.items():
                shapes[names.matrix(layer, target)] = shape
                if target in self.biased:
                    shapes[names.bias(layer, target)] = shape[:1]
        return shapes


LM_HEAD_FORMAT = Format(8, None)  # Format of the LM head of a checkpoint that is quantized at load.
# Types of weights in memory, by their names in the option `dtype`.
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_of(requested: str, folder: Path) -> torch.dtype:
    """Return the type of a checkpoint's weights in memory. `auto` means bf16 if it is stored in
    bf16, else fp32.
    """
    if requested == AUTO:
        config = read_config(folder)
        stored = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
        requested = "bfloat16" if stored in (torch.bfloat16, "bfloat16") else "float32"
    return TYPES[requested]


def quantization_of(options: Options, config: DecoderConfig) -> Format | None:
    """Return the format in which the target matrices are kept in memory; None for floats. Raises
    InvalidArgument if a quantized checkpoint has another format than the options ask for.
    """
    if config.quantization is not None:
        return config.quantization.in_memory(options)
    if options.quantization is None:
        return None
    return format_of(options.quantization, options.quantization_group_size)


def format_of(quantization: str, group_size: int) -> Format:
    """Return the format in which a float checkpoint is quantized with these options."""
    weights, _, activations = quantization.partition("-")
    if weights == "int8":
        return Format(8, None, dynamic=bool(activations))
    return Format(4, group_size, zeros=True, dynamic=bool(activations))


def lm_head_format(matrices: Format | None, config: DecoderConfig) -> Format | None:
    """Return the format in which the LM head is kept in memory; None for floats. A checkpoint that
    is stored quantized keeps its LM head. `matrices`: format of the target matrices.
    """
    if matrices is None or config.quantization is not None:
        return None
    return replace(LM_HEAD_FORMAT, dynamic=matrices.dynamic)


def load_config(folder: Path) -> DecoderConfig:
    """Return the decoder's architecture in a checkpoint folder. Raises InvalidArgument."""
    if not (folder / "config.json").is_file():
        raise InvalidArgument(f"model: {folder} holds no checkpoint (config.json is missing)")
    config = read_config(folder)
    text = config.get_text_config()
    if problem := _unsupported(config, text):
        raise InvalidArgument(f"model: {folder}: {problem}")
    try:
        quantization = stored_quantization(described_quantization(config.to_dict()))
    except InvalidArgument as error:
        raise InvalidArgument(f"model: {folder}: {error}") from None
    family = FAMILIES[text.model_type]
    if quantization is not None and family.names.modules:
        remedy = "use the float checkpoint with the option 'quantization'"
        kind = f"quantized checkpoints of model type '{text.model_type}'"
        raise InvalidArgument(f"model: {folder}: {kind} are not supported; {remedy}")
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None)
    return DecoderConfig(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim(text),
        intermediate=family.intermediate_size(text),
        vocabulary=text.vocab_size,
        norm_eps=text.rms_norm_eps,
        context=text.max_position_embeddings,
        prefix="model." if text is config else "model.language_model.",
        biased=family.biased_targets(text),
        tied=bool(getattr(config, "tie_word_embeddings", False))
        and not _stores_another_head(folder, family.names),
        image_token=getattr(config, "image_token_id", getattr(config, "image_token_index", None)),
        eos_tokens=(*_eos_tokens(folder, text), *family.turn_ends(text)),
        names=family.names,
        rope_axes=family.rope_axes(text),
        image_merge=getattr(getattr(config, "vision_config", None), "spatial_merge_size", 1),
        image_levels=image_levels(config),
        clip_times=_clip_times(getattr(config, "vision_config", None)),
        quantization=quantization,
    )


def _stores_another_head(folder: Path, names: WeightNames) -> bool:
    """Return whether the files hold an LM head that differs from the embeddings.

    transformers 5 then uses the stored LM head, too, although `config.json` ties the two.
    """
    found: dict[str, tuple[Path, str]] = {}
    try:
        for file in weight_files(folder):
            for key in open_weights(file).keys():  # noqa: SIM118
                for name in names.stored(key):
                    if name in (names.embedding, names.lm_head):
                        found[name] = (file, key)
    except InvalidArgument:
        return False  # Files that cannot be read are refused where their weights are needed.
    if len(found) < 2 or stored_alike(found[names.embedding], found[names.lm_head]):
        return False
    file, key = found[names.lm_head]
    log.warning(
        "%s holds '%s', which differs from the embeddings; it is used as the LM head, although"
        " config.json ties the two ('tie_word_embeddings')",
        file,
        key,
    )
    return True


def _clip_times(vision: Any) -> tuple[float, int] | None:
    per_second = getattr(vision, "tokens_per_second", None)
    return None if per_second is None else (float(per_second), int(vision.temporal_patch_size))


def image_levels(config: Any) -> int:
    """Return the number of first layers to whose outputs image features are added."""
    vision = getattr(config, "vision_config", None)
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())


def read_config(folder: Path) -> Any:
    """Return transformers' configuration of a checkpoint folder. Code in it is never run. Raises
    InvalidArgument if it cannot be read or its architecture is not served.
    """
    try:
        model_type = json.loads((folder / "config.json").read_bytes()).get("model_type")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise InvalidArgument(f"model: {folder}: config.json cannot be read: {error}") from error
    if problem := refusal(model_type):
        raise InvalidArgument(f"model: {folder}: {problem}")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers' own checks raise many types of exceptions.
        reason = in_one_line(error)
        raise InvalidArgument(f"model: {folder}: config.json cannot be read: {reason}") from error


def _unsupported(config: Any, text: Any) -> str | None:
    family = FAMILIES.get(text.model_type)
    if family is None:
        known = ", ".join(FAMILIES)
        return f"a decoder of model type '{text.model_type}' is not supported; supported: {known}"
    if problem := problem_of_config(config.to_dict()):
        return problem
    levels = image_levels(config)
    if levels >= text.num_hidden_layers:
        return f"{levels} levels of image features need more than {levels} layers"
    return family.unsupported(text) or unsupported_rope(text, family.rope_axes)


def _eos_tokens(folder: Path, text: Any) -> tuple[int, ...]:
    listed = end_tokens(folder)
    if listed is None:
        eos = text.eos_token_id
        listed = tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,)
    return tuple(token for token in listed if 0 <= token < text.vocab_size)
