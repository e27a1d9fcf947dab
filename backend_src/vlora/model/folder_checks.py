"""Checks of a checkpoint folder and its device that need neither torch nor transformers.

`vlora serve` makes them before it starts a server, in well under a second. The models make them
again, because a server can be started without that command.
"""

from __future__ import annotations

import ctypes
import json
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from vlora.config import Options
from vlora.errors import InvalidArgument, shown
from vlora.model.multimodal import MULTIMODAL, refusal
from vlora.model.quantization_config import StoredQuantization, stored_quantization
from vlora.model.weight_files import open_weights, weight_files

log = logging.getLogger(__name__)

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
PROCESSOR_CONFIG = "processor_config.json"
# Files with the settings of processors, unless PROCESSOR_CONFIG has them.
PREPROCESSOR_CONFIGS = {
    "image": "preprocessor_config.json",
    "video": "video_preprocessor_config.json",
}
# Files that tokenizers are made from, in the order in which they are tried.
TOKENIZERS = ("tokenizer.json", "qwen.tiktoken", "tokenizer.model", "vocab.json")
TOKENIZER_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")

# Model types of the vision towers of a family, for families that can have several.
TOWERS = dict.fromkeys(
    ("llava", "llava_next", "llava_onevision"),
    ("clip_vision_model", "siglip_vision_model", "chinese_clip_vision_model", "vit", "dinov2"),
)
# Sizes of the decoder. They must be at least 1.
SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "head_dim"),
    *("max_position_embeddings", "num_attention_heads", "num_key_value_heads"),
)
# Sizes of Qwen's image processors, and the equal ones of the vision tower.
SAME_SIZES = {
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
    "temporal_patch_size": "temporal_patch_size",
}
FRAMES_PER_PATCH = 2

FLOATS = ("F32", "F16", "BF16", "F64")  # Types of weights in safetensors files.
# Types of scales, each with its words and the bits that are all set in NaN and infinities.
EXPONENTS = {"F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80), "F32": ("<u4", 0x7F800000)}
# Parts of a quantized module that are read, by method. Biases are floats.
PARTS = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "compressed-tensors": (
        *("weight", "weight_packed", "weight_shape", "weight_scale"),
        *("weight_zero_point", "weight_g_idx"),
    ),
}
SCALES = ("scales", "weight_scale")
# Last parts of the names that any quantizer gives to its tensors, beside `weight`.
QUANTIZED_PARTS = {
    *(part for parts in PARTS.values() for part in parts if part != "weight"),
    *("weight_scale_inv", "weight_global_scale", "weight_scale_2", "SCB", "absmax", "quant_map"),
    *("nested_absmax", "nested_quant_map", "input_scale", "input_zero_point"),
    *("input_global_scale", "output_scale", "output_zero_point", "q_scale", "k_scale", "v_scale"),
    *("kv_scale", "prob_output_scale"),
}
TOWER = re.compile(r"(^|\.)(vision_tower|vision_model|visual|multi_modal_projector)\.")


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} without a file. Raise InvalidArgument, which names it,
    for anything else.
    """
    if not file.is_file():
        return {}
    try:
        # As transformers reads it. A double key or NaN, which are no valid JSON, do no harm.
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"model: {file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"model: {file} must be a JSON object, not {type(value).__name__}")
    return value


def end_tokens(folder: Path) -> tuple[int, ...] | None:
    """Return the end-of-text tokens that a folder's generation config lists; None for no list."""
    file = folder / GENERATION_CONFIG
    tokens = read_object(file).get("eos_token_id")
    if tokens is None:
        return None
    ids = tokens if isinstance(tokens, list) else [tokens]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise InvalidArgument(
            f"model: {file}: 'eos_token_id' must be a token id or a list of them, not"
            f" {shown(tokens)}"
        )
    return tuple(ids)


def check_folder(folder: Path, options: Options | None = None) -> None:
    """Raise InvalidArgument, in a sentence that names the file, if a checkpoint cannot be served,
    or cannot be with the options of quantization in `options`.

    Keys that the files leave to transformers' defaults are checked when the model is loaded.
    """
    config = read_object(folder / CONFIG)
    if problem := refusal(config.get("model_type")) or problem_of_config(config):
        raise InvalidArgument(f"model: {folder}: {problem}")
    try:
        quantization = stored_quantization(described_quantization(config))
        if quantization is not None and options is not None:
            quantization.in_memory(options)
    except InvalidArgument as error:
        raise InvalidArgument(f"model: {folder}: {error}") from None
    end_tokens(folder)
    check_tokenizer(folder)
    for kind, name in PREPROCESSOR_CONFIGS.items():
        settings = processor_settings(folder, kind)
        # The first Qwen-VL needs no file for its images, and no family needs one for clips, which
        # are otherwise prepared like images.
        needed = kind == "image" and config["model_type"] in MULTIMODAL and "visual" not in config
        if needed and not settings:
            raise InvalidArgument(f"model: {folder} has no {name}")
        if problem := problem_of_processor(config, settings, kind):
            raise InvalidArgument(f"model: {folder}: {problem}")
    check_weights(folder, quantization)


def gpu_count() -> int:
    """Return the number of GPUs that the CUDA driver offers to this process."""
    count = ctypes.c_int()
    with suppress(OSError):  # Without a driver, the library does not exist.
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuInit(0)
        driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value


def check_device(device: str) -> None:
    """Raise InvalidArgument if the driver knows no GPU with the name of the option `device`."""
    if device.startswith("cuda") and int(device.partition(":")[2] or 0) >= (count := gpu_count()):
        number = f"{count} GPUs, numbered from 0," if count else "no GPU"
        raise InvalidArgument(
            f"'device' = '{device}', but this machine has {number} that CUDA can use;"
            ' use "cpu" or "auto"'
        )


def described_quantization(config: Mapping[str, Any]) -> Any:
    """Return the description of a checkpoint's quantization; None if it has none. Raises
    InvalidArgument for an old form.
    """
    if config.get("compression_config") and not config.get("quantization_config"):
        raise InvalidArgument(
            "config.json describes the model's quantization by the old key 'compression_config';"
            " rename it to 'quantization_config', with 'quant_method': 'compressed-tensors'"
        )
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, Mapping) else None
    outer = config.get("quantization_config")
    return inner if outer is None else outer


def problem_of_config(config: Mapping[str, Any]) -> str | None:
    """Return which part of a configuration is not supported; None if none is. Absent keys pass."""
    for name in ("text_config", "vision_config"):
        if not isinstance(config.get(name, {}), Mapping):
            return f"config.json: '{name}' must be an object, not {shown(config[name])}"
        kind = config.get(name, {}).get("model_type", "")
        if not isinstance(kind, str):
            return f"config.json: 'model_type' of '{name}' must be a string, not {shown(kind)}"
    text, vision = config.get("text_config", config), config.get("vision_config", {})
    towers, tower = TOWERS.get(config.get("model_type", "")), vision.get("model_type")
    if towers is not None and tower is not None and tower not in towers:
        return (
            f"a vision tower of model type {shown(tower)} is not supported for model type"
            f" '{config['model_type']}'; supported: {', '.join(towers)}"
        )
    return problem_of_sizes(text)


def problem_of_sizes(text: Mapping[str, Any]) -> str | None:
    """Return which sizes of a decoder are impossible; None if none are. Absent keys pass."""
    sizes = {name: text[name] for name in SIZES if text.get(name) is not None}
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            return f"config.json: '{name}' must be a whole number of at least 1, not {shown(size)}"
    heads, kv_heads = sizes.get("num_attention_heads"), sizes.get("num_key_value_heads", 1)
    if heads is not None and heads % kv_heads:
        return (
            f"config.json: 'num_attention_heads' = {heads} must be a multiple of"
            f" 'num_key_value_heads' = {kv_heads}"
        )
    return None


@cache
def warn_of_unread_settings(folder: Path) -> None:
    """Log which keys of the processors' own files have no effect, as in transformers."""
    for kind, name in PREPROCESSOR_CONFIGS.items():
        used, unread = processor_settings(folder, kind), read_object(folder / name)
        keys = [key for key, value in unread.items() if used.get(key) != value]
        if keys := [key for key in keys if not key.endswith(("_type", "_class"))]:
            log.warning(
                "model: %s: %s in %s has no effect, because %s has '%s_processor'; set it there",
                *(folder, ", ".join(map(repr, keys)), name, PROCESSOR_CONFIG, kind),
            )


def processor_settings(folder: Path, kind: str) -> dict[str, Any]:
    """Return the settings of a folder's processor, as transformers finds them; {} for none.

    kind: "image" or "video".

    Raises InvalidArgument, which names the file, for anything but objects of JSON.
    """
    file = folder / PROCESSOR_CONFIG
    nested = read_object(file).get(f"{kind}_processor")
    settings = read_object(folder / PREPROCESSOR_CONFIGS[kind])
    if nested is not None:
        if not isinstance(nested, dict):
            raise InvalidArgument(
                f"model: {file}: '{kind}_processor' must be an object, not {shown(nested)}"
            )
        settings = nested
    size = settings.get("size")
    # One number is an old form of the size of images.
    if not (size is None or isinstance(size, dict) or (kind == "image" and isinstance(size, int))):
        raise InvalidArgument(
            f"model: {folder}: the {kind} processor has 'size' = {shown(size)}, which must be an"
            " object"
        )
    return settings


def problem_of_processor(
    config: Mapping[str, Any], processor: Mapping[str, Any], kind: str
) -> str | None:
    """Return why the processor of a `kind` of pictures does not fit the vision tower; None if it
    does. Absent keys pass.
    """
    vision = config.get("vision_config", {})
    if config.get("model_type") in TOWERS:
        side, made = vision.get("image_size"), _picture_size(processor)
        if isinstance(side, int) and made is not None and made != (side, side):
            return (
                f"the {kind} processor makes pictures of {made[0]} x {made[1]} pixels"
                f" ('crop_size' or 'size'), but the vision tower takes {side} x {side}"
                " ('image_size' in 'vision_config')"
            )
        return None
    if config.get("model_type") not in MULTIMODAL or not vision:
        return None
    for name, other in SAME_SIZES.items():
        ours, theirs = processor.get(name), vision.get(other)
        if ours is not None and theirs is not None and ours != theirs:
            return (
                f"the {kind} processor has '{name}' = {shown(ours)}, but the vision tower"
                f" '{other}' = {shown(theirs)}; they must be equal"
            )
    times = processor.get("temporal_patch_size", vision.get("temporal_patch_size"))
    if times not in (None, FRAMES_PER_PATCH):
        return f"'temporal_patch_size' = {shown(times)} is not supported; supported: 2"
    if processor.get("do_resize") is False:
        return (
            f"the {kind} processor has 'do_resize': false, which is not supported: pictures of any"
            " size are served, and must be scaled to whole patches"
        )
    return None


def _picture_size(processor: Mapping[str, Any]) -> tuple[Any, Any] | None:
    crop, size = processor.get("crop_size"), processor.get("size")
    if crop is not None and "do_center_crop" not in processor:
        return None  # The default differs between the processors.
    if crop is not None and processor["do_center_crop"]:
        size = crop
    elif not processor.get("do_resize", True):
        return None
    if isinstance(size, int):
        return (size, size) if size is crop else None
    if isinstance(size, Mapping) and "height" in size and "width" in size:
        return size["height"], size["width"]
    return None


def check_tokenizer(folder: Path) -> None:
    """Raise InvalidArgument if a folder has no tokenizer, or one of its files cannot be read."""
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise InvalidArgument(
            f"model: {folder} has no tokenizer; the first of these files is read:"
            f" {', '.join(TOKENIZERS)}"
        )
    for name in TOKENIZER_CONFIGS:
        read_object(folder / name)
    if not (folder / "chat_template.jinja").is_file():  # It comes before the other file.
        read_object(folder / "chat_template.json")
    file = folder / TOKENIZERS[0]
    if file.is_file():
        try:
            Tokenizer.from_file(str(file))
        except Exception as error:  # The package raises no other type.
            raise InvalidArgument(f"model: {file} cannot be read: {error}") from error


def check_weights(folder: Path, quantization: StoredQuantization | None) -> None:
    """Raise InvalidArgument, which names file and tensor, for a weight file that cannot be read,
    and for tensors that the description of the quantization does not explain.
    """
    for file in weight_files(folder):
        opened = open_weights(file, "np")
        for key in opened.keys():  # noqa: SIM118
            stored = str(opened.get_slice(key).get_dtype())
            if problem := _problem_of_tensor(key, stored, quantization):
                raise InvalidArgument(f"model: {file} holds '{key}' as {stored}{problem}")
            if key.rpartition(".")[2] in SCALES and not _is_finite(file, key, stored):
                raise InvalidArgument(
                    f"model: {file} holds '{key}' with values that are not finite"
                )


def _problem_of_tensor(
    key: str, stored: str, quantization: StoredQuantization | None
) -> str | None:
    module, _, part = key.rpartition(".")
    is_matrix = module.endswith("_proj") and not TOWER.search(module)
    if is_matrix and quantization is not None and part == "weight" and stored in FLOATS:
        return (
            ", but all of the decoder's linear layers must be quantized: quantize again, without"
            " naming any of them in 'ignore' or 'modules_to_not_convert'"
        )
    if part not in QUANTIZED_PARTS and (part not in ("weight", "bias") or stored in FLOATS):
        return None
    if not is_matrix:
        return (
            ": only the decoder's linear layers may be quantized, not the vision tower, its"
            " connector, the embeddings or the LM head"
        )
    if quantization is None or part not in PARTS[quantization.method]:
        described = "has no" if quantization is None else "does not explain it by"
        return (
            f", but config.json {described} 'quantization_config'; without one, weights are"
            f" {', '.join(FLOATS)}"
        )
    return None


def _is_finite(file: Path, key: str, stored: str) -> bool:
    exponents = EXPONENTS.get(stored)
    if exponents is None:
        return True
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        first, last = json.loads(opened.read(size))[key]["data_offsets"]
    word, mask = exponents
    count = (last - first) // np.dtype(word).itemsize
    words = np.fromfile(file, word, count, offset=8 + size + first)
    return not bool((words & mask == mask).any())
