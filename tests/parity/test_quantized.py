"""Parity of quantized decoders with transformers on the dequantized weights in float32."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, LlavaForConditionalGeneration, PreTrainedModel
from typer.testing import CliRunner

from benchmarks import llava
from tests.support.logits import (
    SMALL,
    engine_logits,
    logits_gap,
    questions,
    save_decoder,
    stock_logits,
)
from tests.support.make_adapters import AdapterSpec, make_adapters
from tests.support.quantized_checkpoints import (
    LINEAR,
    VISION,
    Layout,
    dequantize_folder,
    quantize_checkpoint,
    quantized_parts_of,
    rounded_inputs,
)
from tests.support.small_adapter import edit_tensors
from vlora.cli import app
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.engine.parts import load_parts
from vlora.errors import InvalidArgument
from vlora.ids import BASE
from vlora.kernels.formats import Format
from vlora.kernels.quantize import quantize
from vlora.kernels.quantized import allocate, dequantize
from vlora.model.decoder_config import load_config, quantization_of
from vlora.model.folder_checks import check_folder
from vlora.model.loader import find_weights
from vlora.model.quantization_config import stored_quantization
from vlora.model.quantized_checkpoint import read_quantized
from vlora.request import Request
from vlora.sampling import SamplingParams
from vlora.vision.encoder import VisionEncoder
from vlora.weights.quantized_slab import QuantizedSlab
from vlora.weights.slab import TARGETS

TOLERANCE = 3e-4
FORMS = {"int8": Format(8, None), "int4": Format(4, 32, zeros=True)}
LAYOUTS = {
    "gptq": Layout("gptq"),
    "gptq-symmetric": Layout("gptq", symmetric=True, group=64),
    "gptq-v2-one-group": Layout("gptq", group=-1, version="gptq_v2"),
    "gptq-reordered": Layout("gptq", reordered=True),
    "gptq-8-bits": Layout("gptq", bits=8, symmetric=True),
    "awq": Layout("awq", group=64),
    "packed": Layout("compressed-tensors"),
    "packed-symmetric": Layout("compressed-tensors", symmetric=True),
    "packed-channels": Layout("compressed-tensors", group=-1, symmetric=True),
    "packed-reordered": Layout("compressed-tensors", reordered=True),
    "packed-8-bits": Layout("compressed-tensors", bits=8, group=64, symmetric=True, packed=True),
    "int8-channels": Layout("compressed-tensors", bits=8, group=-1, symmetric=True),
    "int8-tensor": Layout("compressed-tensors", bits=8, group=-1, symmetric=True, per_tensor=True),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_published_layouts_equal_the_dequantized_model(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    model = save_decoder(checkpoint, tmp_path, attention_bias=True)
    original = {key: value.clone() for key, value in model.state_dict().items()}
    exact = quantize_checkpoint(tmp_path, LAYOUTS[name])
    model.load_state_dict(exact, strict=False)
    assert any(not torch.equal(original[key], value) for key, value in exact.items())
    assert logits_gap(model, tmp_path) <= TOLERANCE


W8A8 = Layout("compressed-tensors", bits=8, group=-1, symmetric=True, dynamic=True)
W4A8 = Layout("compressed-tensors", group=128, symmetric=True, dynamic=True)
# Layouts that are served with quantized activations, each with the option that asks for it.
DYNAMIC: dict[str, tuple[Layout, str | None]] = {
    "w8a8": (W8A8, None),
    "w8a8-tensor": (replace(W8A8, per_tensor=True), None),
    "w4a8": (W4A8, None),
    "w4a8-zeros": (replace(W4A8, group=32, symmetric=False), None),
    "w4a8-in-bytes": (replace(W4A8, packed=False), None),
    "w4a8-channels": (replace(W4A8, group=-1), None),
    "gptq-8-bits": (Layout("gptq", bits=8, group=-1, symmetric=True), "int8-dynamic"),
    **{name: (LAYOUTS[name], "int8-dynamic") for name in ("int8-channels", "int8-tensor")},
    **{name: (LAYOUTS[name], "int4-dynamic") for name in ("gptq-reordered", "awq", "packed")},
}


def save_outliers(checkpoint: Path, folder: Path) -> PreTrainedModel:
    """Save a decoder in which some activations are much larger than others, as in real models."""
    model = save_decoder(checkpoint, folder, hidden_size=256, intermediate_size=512)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data[::50] *= 20
    model.save_pretrained(folder)
    return model


def check_rounded_inputs(
    exact: PreTrainedModel, folder: Path, *, reordered: bool = False, **options: Any
) -> None:
    """Check that the logits of a folder differ from those of the model with its weights in floats
    by the rounding of activations, and by less than with one scale for each token.

    reordered: whether the inputs in a group are not adjacent.
    """
    form = quantization_of(Options(model=folder, **options), load_config(folder))
    assert form is not None
    assert form.dynamic
    asked: list[torch.Tensor] = []
    record = exact.register_forward_pre_hook(lambda _, inputs: asked.append(inputs[0]))
    gap = logits_gap(exact, folder, **options)
    record.remove()
    with torch.inference_mode():
        expected = [exact(ids).logits for ids in asked]
        with rounded_inputs(exact):
            by_token = [exact(ids).logits for ids in asked]
    pairs = zip(expected, by_token, strict=True)
    assert 10 * TOLERANCE < gap < max(float((a - b).abs().max()) for a, b in pairs)
    if reordered:
        return
    with rounded_inputs(exact, form.activation_group):
        assert logits_gap(exact, folder, **options) < gap / 2


@pytest.mark.parametrize("name", DYNAMIC)
def test_quantized_activations_are_closer_to_floats_than_with_a_scale_for_each_token(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    layout, quantization = DYNAMIC[name]
    model = save_outliers(checkpoint, tmp_path)
    model.load_state_dict(quantize_checkpoint(tmp_path, layout), strict=False)
    check_folder(tmp_path, Options(quantization=quantization))
    check_rounded_inputs(model, tmp_path, reordered=layout.reordered, quantization=quantization)


@pytest.mark.parametrize("layout", [W8A8, W4A8], ids=["int8", "int4"])
def test_an_option_turns_quantized_activations_off(
    layout: Layout, checkpoint: Path, tmp_path: Path
) -> None:
    model = save_outliers(checkpoint, tmp_path)
    model.load_state_dict(quantize_checkpoint(tmp_path, layout), strict=False)
    assert logits_gap(model, tmp_path, quantization=f"int{layout.bits}") <= 10 * TOLERANCE


@pytest.mark.parametrize("quantization", ["int8-dynamic", "int4-dynamic"])
def test_a_folder_that_is_quantized_with_its_activations_is_served_so(
    quantization: str, checkpoint: Path, tmp_path: Path
) -> None:
    source, out, exact = (tmp_path / name for name in ("source", "out", "exact"))
    save_outliers(checkpoint, source)
    command = ["models", "quantize", str(source), str(out), "--quantization", quantization]
    for arguments in (command, ["models", "check", str(out)]):
        done = CliRunner().invoke(app, arguments)
        assert (done.exit_code, done.output[:2]) == (0, "ok"), done.output
    dequantize_folder(out, exact)
    floats = LlamaForCausalLM.from_pretrained(exact, dtype=torch.float32).eval()
    check_rounded_inputs(floats, out)
    if quantization == "int8-dynamic":
        stored, at_load = Options(model=out), Options(model=source, quantization=quantization)
        slabs = [load_parts(options, {}).slab for options in (stored, at_load)]
        assert slabs[0].digest() == slabs[1].digest()


@pytest.mark.parametrize("quantization", ["int8-dynamic", "int4-dynamic"])
def test_transformers_reads_a_folder_that_is_quantized_with_its_activations(
    quantization: str, checkpoint: Path, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors", reason="the package is not installed")
    source, out, exact = (tmp_path / name for name in ("source", "out", "exact"))
    save_outliers(checkpoint, source)
    arguments = ["models", "quantize", str(source), str(out), "--quantization", quantization]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    dequantize_folder(out, exact)
    kind, ids = LlamaForCausalLM, torch.arange(3, 40)[None]
    theirs, floats = (kind.from_pretrained(f, dtype=torch.float32).eval() for f in (out, exact))
    with torch.inference_mode():
        answer, expected = theirs(ids).logits, floats(ids).logits
        with rounded_inputs(floats):
            rounded = floats(ids).logits
    assert (answer - rounded).square().mean() < (answer - expected).square().mean() / 4


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        ("awq", {"quantization": "int8"}, "awq as int4 .*; set it to 'int4' or 'int4-dynamic', r"),
        ("gptq-8-bits", {"quantization": "int8-dynamic"}, "in groups of 32; set it to 'int8', r"),
        ("packed-8-bits", {"quantization": "int8-dynamic"}, "groups of 64; set it to 'int8', r"),
        (
            "awq",
            {"quantization": "int4-dynamic", "quantization_group_size": 128},
            "'quantization_group_size' = 128, .* in groups of 64; remove the key",
        ),
    ],
)
def test_options_that_do_not_fit_a_quantized_checkpoint_are_refused_before_a_server_starts(
    layout: str, options: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    save_decoder(checkpoint, tmp_path)
    quantize_checkpoint(tmp_path, LAYOUTS[layout])
    check_folder(tmp_path)
    started = time.process_time()
    with pytest.raises(InvalidArgument, match=message):
        check_folder(tmp_path, Options(**options))
    assert time.process_time() - started < 1
    with pytest.raises(InvalidArgument, match=message):
        Engine(Options(model=tmp_path, **options))
    if "quantization_group_size" not in options:
        chosen = ["--quantization", options["quantization"]]
        done = CliRunner().invoke(app, ["models", "check", str(tmp_path), *chosen])
        assert done.exit_code == 1
        assert "'quantization' = " in done.output


COMPRESSED = {name: layout for name, layout in LAYOUTS.items() if layout.method[0] == "c"}


@pytest.mark.parametrize("name", [name for name in COMPRESSED if "reordered" not in name])
def test_weights_that_are_copied_equal_those_that_are_unpacked(name: str) -> None:
    """With the inputs of each group named, though adjacent, a matrix is unpacked to integers."""
    stored = stored_quantization(LAYOUTS[name].config)
    assert stored is not None
    rng = np.random.default_rng(5)
    for rows, depth in ((8, 32), (24, 96), (40, 352), (264, 2080)):
        shapes = dict.fromkeys(TARGETS, (rows, depth))
        slabs = [QuantizedSlab(1, shapes, stored.form, torch.float32) for _ in range(2)]
        parts = {
            (0, target): quantized_parts_of(rng.standard_normal((rows, depth)), LAYOUTS[name])
            for target in TARGETS
        }
        group = torch.arange(depth, dtype=torch.int32) // (stored.group or depth)
        read_quantized(parts, stored, slabs[0])
        for each in parts.values():
            each["weight_g_idx"] = lambda group=group: group
        read_quantized(parts, stored, slabs[1])
        assert torch.equal(slabs[0].memory, slabs[1].memory)
        assert slabs[0].memory.any()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("options", "form"),
    [
        ({"quantization": "int8"}, Format(8, None)),
        ({"quantization": "int4"}, Format(4, 32, zeros=True)),
        ({"quantization": "int4", "quantization_group_size": 128}, Format(4, 128, zeros=True)),
    ],
)
def test_quantizing_at_load_equals_the_dequantized_model(
    options: dict[str, Any], form: Format, tied: bool, checkpoint: Path, tmp_path: Path
) -> None:
    model = save_decoder(checkpoint, tmp_path, attention_bias=True, tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    _dequantize(model, form)
    assert logits_gap(model, tmp_path, **options) <= TOLERANCE


def _dequantize(model: torch.nn.Module, form: Format) -> None:
    """Quantize the decoder matrices of a model, and replace them by the dequantized values.

    The LM head is quantized to int8. Embeddings are not changed, even if they are tied to it.
    """
    for key, parameter in model.named_parameters():
        if LINEAR.match(key) and VISION not in key:
            parameter.data.copy_(_rounded(parameter.data, form))
    model.lm_head.weight = torch.nn.Parameter(_rounded(model.lm_head.weight.data, Format(8, None)))


def _rounded(weight: torch.Tensor, form: Format) -> torch.Tensor:
    stored = allocate(form, *weight.shape, torch.float32)
    quantize(weight, stored)
    return dequantize(stored)


@pytest.mark.parametrize("method", ["int8", "awq"])
def test_adapters_and_images_on_quantized_weights_equal_peft(method: str, tmp_path: Path) -> None:
    small = llava.make(SMALL, tmp_path / "small")
    exact = tmp_path / "exact"
    shutil.copytree(small.folder, exact)
    options: dict[str, Any] = {}
    model = LlavaForConditionalGeneration.from_pretrained(exact, dtype=torch.float32)
    if method == "int8":
        options["quantization"] = "int8"
        _dequantize(model, Format(8, None))
        model.save_pretrained(exact)
    else:
        model.save_pretrained(exact)
        quantized = tmp_path / "quantized"
        shutil.copytree(exact, quantized)
        weights = quantize_checkpoint(quantized, Layout("awq", group=64))
        save_file(weights, exact / "model.safetensors", {"format": "pt"})
        small = replace(small, folder=quantized)
    asked = questions(4, 5)
    for name in (None, small.adapter_names[1]):
        adapter = None if name is None else small.adapters / name
        expected = stock_logits(exact, "float32", *asked, adapter)
        names = [name] * 4
        served = engine_logits(small.folder, "float32", *asked, small.adapters, names, **options)
        torch.testing.assert_close(served, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_an_adapter_of_the_lm_head_acts_on_its_quantized_weight(
    quantization: str, tmp_path: Path
) -> None:
    small = llava.make(SMALL, tmp_path / "small")
    spec = AdapterSpec("head", rank=16, targets=("q_proj", "lm_head"))
    with pytest.warns(UserWarning, match="save_embedding_layers"):
        adapters = make_adapters(small.folder, tmp_path / "adapters", (spec,))
    exact, plain = tmp_path / "exact", tmp_path / "plain"
    shutil.copytree(small.folder, exact)
    model = LlavaForConditionalGeneration.from_pretrained(exact, dtype=torch.float32)
    _dequantize(model, FORMS[quantization])
    model.save_pretrained(exact)
    # The server compares this copy of the LM head with the unquantized one. PEFT would use it.
    shutil.copytree(adapters / "head", plain)
    copy = "base_model.model.lm_head.base_layer.weight"
    edit_tensors(plain, lambda tensors: tensors.pop(copy))
    asked = questions(3, 6)
    expected = stock_logits(exact, "float32", *asked, plain)
    served = engine_logits(
        small.folder, "float32", *asked, adapters, ["head"] * 3, quantization=quantization
    )
    torch.testing.assert_close(served, expected, rtol=0, atol=TOLERANCE)
    edit_tensors(adapters / "head", lambda tensors: tensors[copy][-1].add_(1))
    engine = Engine(Options(model=small.folder, adapters=adapters, quantization=quantization))
    assert "differs from the base model's own lm_head" in str(engine.adapters.table.broken["head"])


@pytest.mark.parametrize("policy", ["unmerge_only", "predictive", "paper"])
def test_no_adapter_is_merged_into_quantized_weights(
    policy: str, checkpoint: Path, adapters_dir: Path
) -> None:
    options = Options(model=checkpoint, adapters=adapters_dir, quantization="int4", policy=policy)
    engine = Engine(options)
    slot = engine.adapters.slot("all-r8")
    reason = "quantized to int4 in groups of 32"
    assert reason in str(engine.switcher.refusal(slot))
    assert engine.switcher.refusal(BASE) is None
    with pytest.raises(ValueError, match=reason):
        engine.switcher.switch(slot)
    before = engine.slab.digest()
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for index in range(6):
        request = Request(f"r{index}", "<s> what is in the image", params, adapter="all-r8")
        engine.add(engine.prepare(request), arrival=0.0)
    tokens: dict[str, list[int]] = {}
    while not engine.idle:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        assert engine.switcher.live == BASE
    assert {len(answer) for answer in tokens.values()} == {8}
    assert engine.slab.digest() == before


def test_the_vision_tower_of_a_quantized_checkpoint_is_the_float_one(tmp_path: Path) -> None:
    small = llava.make(SMALL, tmp_path / "small").folder
    quantized = tmp_path / "quantized"
    shutil.copytree(small, quantized)
    quantize_checkpoint(quantized, Layout("gptq"))
    assert VisionEncoder(quantized, 1).tower_digest == VisionEncoder(small, 1).tower_digest


def describe(folder: Path, quantization: dict[str, Any]) -> None:
    """Write a `quantization_config` into the checkpoint's config."""
    path = folder / "config.json"
    described = json.loads(path.read_text()) | {"quantization_config": quantization}
    path.write_text(json.dumps(described))


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "NF4.*'quantization': 'int4'"),
        ({"quant_method": "fp8"}, "supported: gptq .*awq .*compressed-tensors"),
        ({"quant_method": "gptq", "bits": 3}, "gptq with 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 16}, "'group_size' 16"),
        ({"quant_method": "gptq", "bits": 4, "lm_head": True}, "LM head"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        (Layout("compressed-tensors").config | {"format": "float-quantized"}, "float-quantized"),
        (Layout("compressed-tensors").config | {"config_groups": {}}, "one entry"),
    ],
)
def test_other_quantizations_are_refused_by_name(
    quantization: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    save_decoder(checkpoint, tmp_path, attention_bias=True)
    describe(tmp_path, quantization)
    with pytest.raises(InvalidArgument, match=message):
        load_config(tmp_path)


def test_a_quantized_checkpoint_is_refused_where_its_floats_are_needed(
    checkpoint: Path, tmp_path: Path
) -> None:
    save_decoder(checkpoint, tmp_path, attention_bias=True)
    quantize_checkpoint(tmp_path, Layout("awq"))
    with pytest.raises(InvalidArgument, match="quantized by awq; this operation needs weights"):
        find_weights(tmp_path, load_config(tmp_path))


def test_missing_and_misshapen_parts_are_named(checkpoint: Path, tmp_path: Path) -> None:
    save_decoder(checkpoint, tmp_path, attention_bias=True)
    quantize_checkpoint(tmp_path, Layout("awq"))
    describe(tmp_path, Layout("awq", group=64).config)
    with pytest.raises(InvalidArgument, match="layer 0, q_proj: scales of shape"):
        Engine(Options(model=tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.self_attn.q_proj.qweight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidArgument, match="layer 0, q_proj: 'qweight' is missing"):
        Engine(Options(model=tmp_path))
