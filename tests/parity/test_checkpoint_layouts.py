"""Checkpoint folders as others write them: each equals transformers, or is refused in a sentence.

The folders are tiny, and the tables here list what differs from a plain one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests.support.checkpoints import make_checkpoint
from tests.support.quantized_checkpoints import Layout, quantize_checkpoint
from tests.support.small_decoder import logits_gap, save_decoder
from vlora.errors import InvalidArgument
from vlora.ids import BASE
from vlora.memory.kv_cache import KVCache
from vlora.model.attention import AttentionPlan
from vlora.model.chunk import Chunk
from vlora.model.decoder_config import load_config
from vlora.model.inputs import text_prompt
from vlora.model.quantization_config import stored_quantization
from vlora.model.rotary import Rotary

TOLERANCE = 3e-4

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
