"""Checkpoint folders as others write them: each equals transformers, or is refused in a sentence.

The folders are tiny, and the tables here list what differs from a plain one.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    LlamaForCausalLM,
)
from typer.testing import CliRunner

from tests.support import checkpoints
from tests.support.checkpoints import make_checkpoint
from tests.support.logits import logits_gap, save_decoder
from tests.support.quantized_checkpoints import (
    ACTIVATIONS,
    Layout,
    dequantize_folder,
    quantize_checkpoint,
)
from vlora.cli import app
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.engine.loop import EngineLoop
from vlora.errors import InvalidArgument
from vlora.ids import BASE
from vlora.memory.kv_cache import KVCache
from vlora.model.attention import AttentionPlan
from vlora.model.chunk import Chunk
from vlora.model.decoder_config import load_config
from vlora.model.families.registry import FAMILIES
from vlora.model.folder_checks import check_folder
from vlora.model.inputs import text_prompt
from vlora.model.multimodal import DECODERS
from vlora.model.quantization_config import stored_quantization
from vlora.model.rotary import Rotary
from vlora.vision.chat_template import ChatTemplate
from vlora.vision.encoder import VisionEncoder, open_encoder
from vlora.vision.features import EncoderService, FeatureCache
from vlora.vision.images import DecodedImage
from vlora.vision.startup import check_encoder

TOLERANCE = 3e-4
Tensors = dict[str, torch.Tensor]
Edit = Callable[[Path], object]

# Sizes of groups that do not divide both depths (64 and 320) or that the kernels split.
GROUP_SIZES = {
    "gptq-96": Layout("gptq", group=96),
    "gptq-160": Layout("gptq", group=160),
    "gptq-256": Layout("gptq", group=256),
    "gptq-256-reordered": Layout("gptq", group=256, reordered=True),
    "gptq-192-symmetric-8-bits": Layout("gptq", bits=8, group=192, symmetric=True),
    "awq-96": Layout("awq", group=96),
    "awq-128": Layout("awq", group=128),
    "packed-256": Layout("compressed-tensors", group=256),
    "packed-160-symmetric": Layout("compressed-tensors", group=160, symmetric=True),
    "int8-96": Layout("compressed-tensors", bits=8, group=96, symmetric=True),
}


@pytest.mark.parametrize("name", GROUP_SIZES)
def test_groups_of_any_size_equal_the_dequantized_model(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    model = save_decoder(checkpoint, tmp_path, intermediate_size=320)
    model.load_state_dict(quantize_checkpoint(tmp_path, GROUP_SIZES[name]), strict=False)
    assert logits_gap(model, tmp_path) <= TOLERANCE


def change(folder: Path, *path: str, **changes: Any) -> None:
    """Change keys of an object in `config.json`, at a path of keys; None deletes a key."""
    file = folder / "config.json"
    config = one = json.loads(file.read_text())
    for key in path:
        one = one[key]
    one |= changes
    for key in [key for key, value in changes.items() if value is None]:
        del one[key]
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("stored", ["none", "same", "other", "head-alone"])
def test_a_head_stored_with_tied_embeddings_equals_transformers(
    stored: str, checkpoint: Path, tmp_path: Path
) -> None:
    save_decoder(checkpoint, tmp_path, tie_word_embeddings=True)
    file, embedding = tmp_path / "model.safetensors", "model.embed_tokens.weight"
    tensors = load_file(file)
    if stored != "none":
        tensors["lm_head.weight"] = tensors[embedding].clone()
    if stored == "other":
        tensors["lm_head.weight"] += torch.randn_like(tensors[embedding])
    if stored == "head-alone":
        del tensors[embedding]
    save_file(tensors, file, {"format": "pt"})
    assert load_config(tmp_path).tied == (stored != "other")
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert logits_gap(theirs, tmp_path) <= TOLERANCE


# `eos_token_id` of config.json and of generation_config.json, and the result.
END_TOKENS = {
    "zero": (5, 0, (0,)),
    "zero-in-a-list": (5, [0, 7], (0, 7)),
    "zero-in-config": (0, "no file", (0,)),
    "zero-in-config-and-null": (0, None, (0,)),
    "none-listed": (5, [], ()),
    "beyond-the-vocabulary": (5, [7, 10**6], (7,)),
}


@pytest.mark.parametrize("name", END_TOKENS)
def test_end_of_text_tokens_are_those_of_the_files(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    configured, listed, expected = END_TOKENS[name]
    save_decoder(checkpoint, tmp_path, eos_token_id=configured)
    generation = tmp_path / "generation_config.json"
    generation.unlink(missing_ok=True)
    if listed != "no file":
        generation.write_text(json.dumps({"eos_token_id": listed}))
    assert load_config(tmp_path).eos_tokens == expected


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
# Keys of `rope_parameters`, and the refusal.
ROTARY = {
    "partial": (YARN | {"partial_rotary_factor": 0.5}, "rotates 8 of the 16 columns of a head"),
    "no-factor": ({"rope_type": "linear", "rope_theta": 1e4}, "cannot be read: .*factor"),
    "unknown": (YARN | {"rope_type": "dynamic"}, "rope type 'dynamic' is not supported"),
}


@pytest.mark.parametrize("name", ROTARY)
def test_a_rotary_embedding_of_another_width_is_refused(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    parameters, message = ROTARY[name]
    save_decoder(checkpoint, tmp_path)
    change(tmp_path, rope_parameters=parameters)
    with pytest.raises(InvalidArgument, match=message):
        load_config(tmp_path)


@pytest.mark.parametrize("sections", [[1, 2, 2], [2, 3, 4]])
def test_sections_of_another_width_are_refused(
    sections: list[int], checkpoint: Path, tmp_path: Path
) -> None:
    folder = make_checkpoint("qwen2_vl", checkpoint, tmp_path)
    change(folder, "text_config", "rope_parameters", mrope_section=sections)
    with pytest.raises(InvalidArgument, match=f"'mrope_section' has {sum(sections)} frequencies"):
        load_config(folder)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    "shape", [(2, 7), (2, 9), (1, 8), (3, 8)], ids=["narrow", "wide", "short", "long"]
)
def test_attention_refuses_a_rotary_table_of_another_shape(
    backend: Any, shape: tuple[int, int]
) -> None:
    chunk = Chunk("a", BASE, 0, 0, (1, 2), text_prompt((1, 2)), (0,), completes=True)
    plan = AttentionPlan([chunk], KVCache(4, 1, 16, 2, 16), 4, backend=backend)
    good, bad = torch.ones(2, 8), torch.ones(shape)
    for rotary in (Rotary(bad, good), Rotary(good, bad), Rotary(good.double(), good)):
        with pytest.raises(ValueError, match="must be contiguous"):
            plan.attend(0, torch.zeros(2, 128), rotary)


PACKED = Layout("compressed-tensors").config
SCHEME = PACKED["config_groups"]["group_0"]
# Changes of the description of a quantized checkpoint, and the refusal; None if it is served.
DESCRIPTIONS: dict[str, tuple[dict[str, Any], str | None]] = {
    "as-written": (
        PACKED
        | {"version": "0.20.0", "kv_cache_scheme": None, "sparsity_config": {}}
        | {"transform_config": {}, "global_compression_ratio": 2.1, "moe_sparsity_config": None},
        None,
    ),
    "dense": (PACKED | {"sparsity_config": {"format": "dense", "global_sparsity": 0.1}}, None),
    "gptqmodel": (
        Layout("gptq").config
        | {"lm_head": False, "pack_dtype": "int32", "dynamic": None, "format": "gptq"}
        | {"meta": {"quantizer": ["gptqmodel:4.2.0"], "damp_percent": 0.05, "mse": 0.0}},
        None,
    ),
    "transform": (
        PACKED | {"transform_config": {"config_groups": {"v": {"type": "hadamard"}}}},
        "'transform_config'",
    ),
    "kv-cache": (PACKED | {"kv_cache_scheme": {"num_bits": 8}}, "'kv_cache_scheme'"),
    "sparse": (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparsity_config'"),
    "unknown": (PACKED | {"offsets": "shifted"}, "'offsets' = 'shifted'"),
    "group-null": (PACKED | {"config_groups": {"g": None}}, "'config_groups' with 'g': None"),
    "group-list": (PACKED | {"config_groups": {"W4A16": ["Linear"]}}, r"'W4A16': \['Linear'\]"),
    "groups-list": (PACKED | {"config_groups": [SCHEME]}, "other than one entry"),
    "weights-null": (PACKED | {"config_groups": {"g": SCHEME | {"weights": None}}}, "'weights'"),
    "outputs": (
        PACKED | {"config_groups": {"g": SCHEME | {"output_activations": {"num_bits": 8}}}},
        "'output_activations'",
    ),
    "dynamic": (
        PACKED | {"config_groups": {"g": SCHEME | {"weights": SCHEME["weights"] | {"dynamic": 1}}}},
        "'dynamic' = 1",
    ),
    "two-formats": (
        PACKED | {"config_groups": {"g": SCHEME | {"format": "int-quantized"}}},
        "'format' 'int-quantized' beside 'pack-quantized'",
    ),
    **{
        f"activations-{name}": (
            PACKED | {"config_groups": {"g": SCHEME | {"input_activations": changed}}},
            message,
        )
        for name, changed, message in (
            ("token", ACTIVATIONS, None),
            ("tensor", {"dynamic": True}, None),
            ("groups", ACTIVATIONS | {"strategy": "group", "group_size": 128}, None),
            ("small", ACTIVATIONS | {"strategy": "group", "group_size": 16}, "multiple of 32"),
            ("static", ACTIVATIONS | {"dynamic": False}, "'dynamic' = False.*W8A8 and W4A8"),
            ("static-by-default", {"num_bits": 8}, "'dynamic' = False"),
            ("local", ACTIVATIONS | {"dynamic": "local"}, "'dynamic' = 'local'"),
            ("fp8", ACTIVATIONS | {"type": "float"}, "'type' = 'float'"),
            ("asymmetric", ACTIVATIONS | {"symmetric": False}, "'symmetric' = False"),
            ("4-bits", ACTIVATIONS | {"num_bits": 4}, "'num_bits' = 4"),
            ("unknown", ACTIVATIONS | {"clip": 0.9}, "'clip' = 0.9"),
            ("text", "dynamic", "'input_activations': 'dynamic'"),
        )
    },
    "activations-grouped-weights": (
        Layout("compressed-tensors", 8, 64, symmetric=True, dynamic=True).config,
        "weights of int8 in groups of 64",
    ),
    "zeros-in-bytes": (Layout("compressed-tensors", packed=False).config, "4 bits in int-quantiz"),
    "gptq-dynamic": (Layout("gptq").config | {"dynamic": {"-:.*down": {}}}, "'dynamic'"),
    "gptq-marlin": (Layout("gptq").config | {"is_marlin_format": True}, "'is_marlin_format'"),
    "gptq-words": (Layout("gptq").config | {"pack_dtype": "int64"}, "'pack_dtype' = 'int64'"),
    "gptq-group": (Layout("gptq").config | {"group_size": True}, "'group_size' True"),
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_descriptions_of_quantized_weights_are_read_or_refused_by_key(name: str) -> None:
    description, message = DESCRIPTIONS[name]
    if message is None:
        assert stored_quantization(description) is not None
        return
    with pytest.raises(InvalidArgument, match=f"'quantization_config' with .*{message}"):
        stored_quantization(description)


KINDS = ("text", "llava", "qwen2_vl")


@pytest.fixture(scope="session")
def plain(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a folder of each of KINDS, and text folders in the layouts that edits start from."""
    root = tmp_path_factory.mktemp("plain")
    folders = {name: make_checkpoint(name, checkpoint, root / name) for name in KINDS[1:]}
    layouts = {"gptq": Layout("gptq"), "packed": Layout("compressed-tensors")}
    for name in ("text", *layouts):
        save_decoder(checkpoint, root / name)
        folders[name] = root / name
        if name in layouts:
            quantize_checkpoint(root / name, layouts[name])
    return folders


def configured(*path: str, **changes: Any) -> Edit:
    """Return an edit of an object in `config.json`; see `change`."""
    return lambda folder: change(folder, *path, **changes)


def written(name: str, content: str) -> Edit:
    return lambda folder: (folder / name).write_text(content)


def without(name: str) -> Edit:
    return lambda folder: (folder / name).unlink()


def processed(**changes: Any) -> Edit:
    """Return an edit of the image processor's file."""

    def edit(folder: Path) -> None:
        file = folder / "preprocessor_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def stored(change_tensors: Callable[[Tensors], object]) -> Edit:
    """Return an edit of the weight file."""

    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change_tensors(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return edit


def int_quantized(tensors: Tensors, part: str) -> None:
    """Quantize the linear layers whose key contains `part`, as compressed-tensors writes them."""
    for key, weight in list(tensors.items()):
        if part in key and key.endswith(".weight") and weight.ndim == 2:
            scale = weight.abs().amax(dim=1, keepdim=True) / 127
            tensors[key] = (weight / scale).round().to(torch.int8)
            tensors[f"{key}_scale"] = scale


def first_key(tensors: Tensors, ending: str) -> str:
    return min(key for key in tensors if key.endswith(ending))


def spoil(tensors: Tensors, ending: str, value: float) -> None:
    tensors[first_key(tensors, ending)].view(-1)[3] = value


def add(tensors: Tensors, ending: str, name: str, dtype: torch.dtype = torch.float32) -> None:
    """Add a tensor beside the first whose key ends so."""
    module = first_key(tensors, ending).rpartition(".")[0]
    tensors[f"{module}.{name}"] = torch.ones(4).to(dtype)


def leave_out(tensors: Tensors, ending: str) -> None:
    """Store the first matrix with this key as a quantizer does that leaves it out."""
    module = first_key(tensors, ending).rpartition(".")[0]
    for key in [key for key in tensors if key.startswith(f"{module}.")]:
        del tensors[key]
    tensors[f"{module}.weight"] = torch.ones(8, 8)


# Kind of folder, edit, and the end of the refusal.
REFUSED: dict[str, tuple[str, Edit, str]] = {
    "config-list": ("text", written("config.json", "[]"), "config.json .*object"),
    "config-corrupt": ("text", written("config.json", "{"), "config.json cannot be read"),
    "model-type": ("text", configured(model_type="gemma3"), "model type 'gemma3'"),
    "text-config-list": ("llava", configured(text_config=[]), "'text_config' must be an object"),
    "text-type-list": (
        "llava",
        configured("text_config", model_type=[]),
        "'model_type' of 'text_config' must be a string",
    ),
    "kv-heads": ("text", configured(num_key_value_heads=3), "= 4 must be a multiple of .* = 3"),
    "kv-heads-0": ("text", configured(num_key_value_heads=0), "at least 1, not 0"),
    "kv-heads-inner": (
        "llava",
        configured("text_config", num_key_value_heads=3),
        "= 4 must be a multiple of 'num_key_value_heads' = 3",
    ),
    "layers-text": ("text", configured(num_hidden_layers="2"), "'num_hidden_layers' must be"),
    "tower-pixtral": ("llava", configured("vision_config", model_type="pixtral"), "'pixtral'"),
    "tower-siglip2": (
        "llava",
        configured("vision_config", model_type="siglip2_vision_model"),
        "'siglip2_vision_model' is not supported .*supported: clip_vision_model",
    ),
    "crop": ("llava", processed(crop_size=12), "12 x 12 .* takes 16 x 16"),
    "crop-sides": ("llava", processed(crop_size={"height": 16, "width": 12}), "16 x 12 pixels"),
    "size-without-crop": (
        "llava",
        processed(do_center_crop=False, size={"height": 20, "width": 20}),
        "20 x 20 pixels",
    ),
    "merge": ("qwen2_vl", processed(merge_size=3), "'merge_size' = 3"),
    "patch": ("qwen2_vl", processed(patch_size=8), "'patch_size' = 8"),
    "frames-of-the-processor": (
        "qwen2_vl",
        processed(temporal_patch_size=1),
        "'temporal_patch_size' = 1",
    ),
    "frames": (
        "qwen2_vl",
        lambda folder: (
            processed(temporal_patch_size=4)(folder),
            change(folder, "vision_config", temporal_patch_size=4),
        ),
        "'temporal_patch_size' = 4 is not supported",
    ),
    "no-resize": ("qwen2_vl", processed(do_resize=False), "'do_resize': false"),
    "processor-list": ("llava", written("preprocessor_config.json", "[1]"), "preprocessor_config"),
    "processor-corrupt": (
        "qwen2_vl",
        written("preprocessor_config.json", '{"a": '),
        "preprocessor_config.json cannot be read",
    ),
    "processor-missing": ("llava", without("preprocessor_config.json"), "no preprocessor_config"),
    "processor-nested": (
        "qwen2_vl",
        written("processor_config.json", '{"image_processor": [1]}'),
        "processor_config.json: 'image_processor'",
    ),
    "clips-list": (
        "qwen2_vl",
        written("video_preprocessor_config.json", "[]"),
        "video_preprocessor_config.json must be a JSON object",
    ),
    "clips-nested": (
        "qwen2_vl",
        written("processor_config.json", '{"video_processor": 3}'),
        "processor_config.json: 'video_processor' must be an object, not 3",
    ),
    "clips-merge": (
        "qwen2_vl",
        written("video_preprocessor_config.json", '{"merge_size": 4}'),
        "the video processor has 'merge_size' = 4",
    ),
    "clips-no-resize": (
        "qwen2_vl",
        written("video_preprocessor_config.json", '{"do_resize": false}'),
        "the video processor has 'do_resize': false",
    ),
    "clips-size": (
        "qwen2_vl",
        written("video_preprocessor_config.json", '{"size": [1]}'),
        r"the video processor has 'size' = \[1\]",
    ),
    "tokenizer-missing": ("text", without("tokenizer.json"), "no tokenizer; .*tokenizer.json"),
    "tokenizer-corrupt": ("text", written("tokenizer.json", '{"model"'), "tokenizer.json cannot"),
    "tokenizer-list": ("text", written("tokenizer.json", "[]"), "tokenizer.json cannot be read"),
    "tokenizer-config": ("text", written("tokenizer_config.json", "[]"), "tokenizer_config.json"),
    "template-corrupt": (
        "llava",
        lambda folder: (
            written("chat_template.json", "{{")(folder),
            without("chat_template.jinja")(folder),
        ),
        "chat_template.json cannot be read",
    ),
    "generation-list": ("text", written("generation_config.json", "[]"), "generation_config.json"),
    "generation-corrupt": (
        "text",
        written("generation_config.json", "eos"),
        "generation_config.json cannot be read",
    ),
    "generation-eos": (
        "text",
        written("generation_config.json", '{"eos_token_id": "</s>"}'),
        "generation_config.json: 'eos_token_id' must be a token id",
    ),
    "group-null": (
        "packed",
        configured("quantization_config", config_groups={"g": None}),
        "'config_groups' with 'g': None",
    ),
    "old-key": (
        "packed",
        lambda folder: change(folder, quantization_config=None, compression_config=PACKED),
        "old key 'compression_config'; rename it to 'quantization_config'",
    ),
    "ignored-layer": (
        "packed",
        stored(lambda t: leave_out(t, "weight_packed")),
        "down_proj.weight' as F32, but all of the decoder's .* in 'ignore' or 'modules_to_not",
    ),
    "unconverted-layer": ("gptq", stored(lambda t: leave_out(t, "qweight")), "as F32, but all of"),
    "nan-scales": ("gptq", stored(lambda t: spoil(t, "scales", torch.nan)), "not finite"),
    "infinite-scales": (
        "packed",
        stored(lambda t: spoil(t, "weight_scale", -torch.inf)),
        "down_proj.weight_scale' with values that are not finite",
    ),
    "bf16-nan-scales": (
        "packed",
        stored(
            lambda t: (
                t.update({k: v.bfloat16() for k, v in t.items() if k.endswith("_scale")}),
                spoil(t, "weight_scale", torch.nan),
            )
        ),
        "not finite",
    ),
    "tower-int8": (
        "llava",
        stored(lambda t: int_quantized(t, "vision_tower")),
        "vision_tower.*weight' as I8: only the decoder's linear layers",
    ),
    "merger-int8": ("qwen2_vl", stored(lambda t: int_quantized(t, "merger")), "merger.* as I8"),
    "connector-int8": (
        "llava",
        stored(lambda t: int_quantized(t, "multi_modal_projector")),
        "multi_modal_projector.* as I8",
    ),
    "tower-scale": (
        "llava",
        stored(lambda t: add(t, "encoder.layers.0.mlp.fc1.weight", "weight_scale")),
        "fc1.weight_scale' as F32: only",
    ),
    "tower-fp8": (
        "qwen2_vl",
        stored(lambda t: t.update({k: t[k].to(torch.float8_e4m3fn) for k in t if "visual" in k})),
        "visual.* as F8_E4M3",
    ),
    "scale-undescribed": (
        "text",
        stored(lambda t: add(t, "q_proj.weight", "weight_scale")),
        "q_proj.weight_scale' as F32, but config.json has no 'quantization_config'",
    ),
    "int8-undescribed": ("text", stored(lambda t: int_quantized(t, "mlp")), "has no 'quant"),
    "scale-unknown": (
        "packed",
        stored(lambda t: add(t, "q_proj.weight_packed", "weight_global_scale")),
        "weight_global_scale' as F32, but config.json does not explain it",
    ),
    "head-int8": ("packed", stored(lambda t: int_quantized(t, "lm_head")), "or the LM head"),
    "embeddings-int8": ("text", stored(lambda t: int_quantized(t, "embed")), "embeddings or"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_is_refused_in_one_sentence_before_a_server_starts(
    name: str, plain: dict[str, Path], tmp_path: Path
) -> None:
    kind, edit, message = REFUSED[name]
    folder = tmp_path / "model"
    shutil.copytree(plain[kind], folder)
    check_folder(folder)
    edit(folder)
    started = time.process_time()
    with pytest.raises(InvalidArgument, match=f"^model: {tmp_path}.*{message}") as caught:
        check_folder(folder)
    assert time.process_time() - started < 1
    assert "\n" not in str(caught.value)
    # A server that was started in another way refuses it, too.
    with pytest.raises(InvalidArgument, match="model") as caught:
        opened(kind, folder)
    assert "\n" not in str(caught.value)


def opened(kind: str, folder: Path) -> None:
    """Load a folder as the processes of the models do."""
    if kind in KINDS[1:]:
        VisionEncoder(folder, 1)
    Engine(Options(model=folder))
    ChatTemplate.from_checkpoint(folder)


def shaped(ending: str, change_shape: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    """Return an edit of the shape of the first tensor whose key ends so."""

    def edit(tensors: Tensors) -> None:
        key = first_key(tensors, ending)
        tensors[key] = change_shape(tensors[key]).contiguous()

    return stored(edit)


MISSHAPEN = {
    "gptq-zeros-flat": ("gptq", shaped("qzeros", torch.flatten)),
    "gptq-values-flat": ("gptq", shaped("qweight", torch.flatten)),
    "gptq-values-short": ("gptq", shaped("qweight", lambda t: t[:-1])),
    "gptq-scales-flat": ("gptq", shaped("scales", torch.flatten)),
    "gptq-groups": ("gptq", shaped("g_idx", lambda t: t[:-8])),
    "packed-values-narrow": ("packed", shaped("weight_packed", lambda t: t[:, :-1])),
    "packed-scales-flat": ("packed", shaped("weight_scale", torch.flatten)),
    "packed-zeros-flat": ("packed", shaped("weight_zero_point", torch.flatten)),
}


@pytest.mark.parametrize("name", MISSHAPEN)
def test_quantized_tensors_of_other_shapes_are_refused_by_name(
    name: str, plain: dict[str, Path], tmp_path: Path
) -> None:
    kind, edit = MISSHAPEN[name]
    folder = tmp_path / "model"
    shutil.copytree(plain[kind], folder)
    edit(folder)
    with pytest.raises(InvalidArgument, match=r"^model: layer \d, \w+: ") as caught:
        Engine(Options(model=folder))
    assert "\n" not in str(caught.value)


# Tower and image processor that are loaded and equal transformers, beside those of the families.
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}
TOWERS = {
    "siglip": ("siglip_vision_model", "full"),
    "chinese-clip": ("chinese_clip_vision_model", "default"),
    "vit": ("vit", "default"),
    "dinov2": ("dinov2", "default"),
}


@pytest.mark.parametrize("family", ["llava", "llava_next", "llava_onevision"])
@pytest.mark.parametrize("tower", TOWERS)
def test_features_of_each_type_of_tower_equal_transformers(
    tower: str,
    family: str,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = checkpoints.FAMILIES[family]

    def configuration(text: dict[str, Any], ids: dict[str, int]) -> Any:
        config, (kind, strategy) = made(text, ids), TOWERS[tower]
        sizes = SIZES | {"intermediate_size": 48, "image_size": checkpoints.TILE}
        config.vision_config = AutoConfig.for_model(kind, **sizes)
        config.vision_feature_select_strategy = strategy
        return config

    monkeypatch.setitem(checkpoints.FAMILIES, family, configuration)
    folder = make_checkpoint(family, checkpoint, tmp_path)
    check_folder(folder)
    encoder = VisionEncoder(folder, 1)
    stock = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    for size in ((20, 60), (60, 20)):
        rgb = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
        pixels = processor(images=[Image.fromarray(rgb)], return_tensors="pt")
        with torch.inference_mode():
            (expected,) = stock.get_image_features(**pixels).pooler_output
        (encoded,) = EncoderService(encoder, FeatureCache(0)).run([[DecodedImage(rgb)]])
        torch.testing.assert_close(torch.from_numpy(encoded.features), expected, rtol=0, atol=1e-5)


def as_published(folder: Path) -> None:
    """Rewrite a folder as the families' authors have published theirs, with transformers 4."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    if config["model_type"].startswith("qwen"):
        text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        flat = {key: value for key, value in text.items() if key != "model_type"}
        del config["text_config"]
        config = flat | config
        processed(min_pixels=256, max_pixels=4096, size=None)(folder)
    else:
        config |= {"ignore_index": -100, "projector_hidden_act": "gelu"}
        processor = {"patch_size": 4, "processor_class": "LlavaProcessor", "image_token": "<image>"}
        (folder / "processor_config.json").write_text(json.dumps(processor))
    for key in ("dtype", "transformers_version"):
        del config[key]
    file.write_text(json.dumps(config | {"torch_dtype": "float32"}))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    published = {
        key.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for key, tensor in tensors.items()
    }
    shards = {key: f"model-0000{1 + index % 2}-of-00002" for index, key in enumerate(published)}
    for shard in set(shards.values()):
        part = {key: tensor for key, tensor in published.items() if shards[key] == shard}
        save_file(part, folder / f"{shard}.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": {k: f"{name}.safetensors" for k, name in shards.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("family", ["llava", "llava_next", "qwen2_vl", "qwen2_5_vl"])
def test_published_files_equal_transformers(family: str, checkpoint: Path, tmp_path: Path) -> None:
    folder = make_checkpoint(family, checkpoint, tmp_path)
    as_published(folder)
    check_folder(folder)
    started(folder)
    check_answers(folder, stock_model(folder))


def stock_model(folder: Path) -> Any:
    """Return transformers' model in float32, with images or without."""
    has_images = "vision_config" in json.loads((folder / "config.json").read_text())
    kind = AutoModelForImageTextToText if has_images else LlamaForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def check_answers(folder: Path, stock: Any) -> None:
    """Compare the features of a picture, and logits after texts, with those of transformers."""
    if hasattr(stock, "get_image_features"):
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        rgb = np.random.default_rng(0).integers(0, 256, (20, 60, 3), dtype=np.uint8)
        pixels = processor(images=[Image.fromarray(rgb)], return_tensors="pt")
        with torch.inference_mode():
            (expected,) = stock.get_image_features(**pixels).pooler_output
        service = EncoderService(VisionEncoder(folder, 1), FeatureCache(0))
        (encoded,) = service.run([[DecodedImage(rgb)]])
        torch.testing.assert_close(torch.from_numpy(encoded.features), expected, rtol=0, atol=1e-5)
    assert logits_gap(stock, folder) <= TOLERANCE


QUANTIZED = [(kind, form) for kind in KINDS for form in ("int4", "int8")]


@pytest.fixture(scope="session", params=QUANTIZED, ids="-".join)
def quantized(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Return a folder that `vlora models quantize` has written, and the same as floats."""
    kind, form = request.param
    root = tmp_path_factory.mktemp("quantized")
    source, out = root / "source", root / "out"
    if kind == "text":
        save_decoder(checkpoint, source, attention_bias=True)
    else:
        as_published(make_checkpoint(kind, checkpoint, source))
    command = ["models", "quantize", str(source), str(out), "--quantization", form]
    for arguments in (command, ["models", "check", str(out)]):
        done = CliRunner().invoke(app, arguments)
        assert (done.exit_code, done.output[:2]) == (0, "ok"), done.output
    dequantize_folder(out, root / "exact")
    return out, root / "exact"


def test_a_folder_that_is_quantized_answers_as_transformers_with_the_same_weights(
    quantized: tuple[Path, Path],
) -> None:
    out, exact = quantized
    started(out)
    check_answers(out, stock_model(exact))


def test_transformers_reads_the_same_weights_from_a_folder_that_is_quantized(
    quantized: tuple[Path, Path],
) -> None:
    pytest.importorskip("compressed_tensors", reason="the package is not installed")
    out, exact = quantized
    theirs, expected = stock_model(out).state_dict(), stock_model(exact).state_dict()
    assert theirs.keys() == expected.keys()
    assert all(torch.equal(theirs[key], expected[key]) for key in expected)


def started(folder: Path) -> None:
    """Do what the processes of the models do at the start, up to the first request."""
    check_encoder(open_encoder(folder, 1), load_config(folder), folder)
    loop = EngineLoop.from_options(Options(model=folder, policy="unmerge_only"))
    loop.shutdown(0)


# Faults that no file shows, by family.
AT_THE_START: dict[str, tuple[str, Edit, str]] = {
    "tower-nan": (
        "llava",
        stored(lambda t: spoil(t, "fc1.weight", torch.nan)),
        "encoding a wide picture .* NaN",
    ),
    "tiles": (
        "llava_next",
        processed(image_grid_pinpoints=[[16, 16]]),
        "encoding a wide picture at the start failed",
    ),
    "merger-nan": (
        "qwen2_vl",
        stored(lambda t: spoil(t, "merger.mlp.2.weight", torch.inf)),
        "encoding a wide picture",
    ),
    "weight-nan": (
        "text",
        stored(lambda t: spoil(t, "up_proj.weight", torch.nan)),
        "logits of the first step are not finite",
    ),
}


@pytest.mark.parametrize("name", AT_THE_START)
def test_faults_that_only_requests_would_show_are_refused_at_the_start(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    family, edit, message = AT_THE_START[name]
    folder = tmp_path / "model"
    if family == "text":
        save_decoder(checkpoint, folder)
    else:
        make_checkpoint(family, checkpoint, folder)
    edit(folder)
    with pytest.raises(InvalidArgument, match=f"^model: {folder}: .*{message}"):
        started(folder)


@pytest.mark.parametrize("family", sorted(checkpoints.FAMILIES))
def test_a_sound_checkpoint_passes_the_checks_and_the_start(
    family: str, checkpoint: Path, tmp_path: Path
) -> None:
    folder = make_checkpoint(family, checkpoint, tmp_path)
    check_folder(folder)
    started(folder)


def test_the_checks_know_the_decoder_families() -> None:
    assert sorted(DECODERS) == sorted(FAMILIES)


def test_serve_refuses_a_folder_before_it_imports_torch_or_starts_a_server(
    plain: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(plain["text"], tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    code = (
        "import sys; sys.modules['torch'] = None; from vlora.cli import main;"
        f" sys.argv[1:] = ['serve', '--model', {str(tmp_path / 'model')!r}]; main()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert run.returncode == 1
    assert "tokenizer.json cannot be read" in run.stderr


@pytest.mark.parametrize(("family", "encoded"), [("llava", 1), ("qwen2_vl", 2)])
def test_pictures_of_one_size_are_encoded_once_at_the_start(
    family: str, encoded: int, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(family, checkpoint, tmp_path / "model")
    encoder = VisionEncoder(folder, 1)
    encode, threads = encoder.encode, []
    monkeypatch.setattr(
        encoder, "encode", lambda *args: threads.append(torch.get_num_threads()) or encode(*args)
    )
    check_encoder(encoder, load_config(folder), folder, threads=2)
    assert threads == [2] * encoded
    assert torch.get_num_threads() == 1
