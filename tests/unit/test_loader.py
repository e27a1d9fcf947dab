"""Tests that each weight of a checkpoint is read once, and that errors name file and tensor."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.machine import status_bytes
from vlora.errors import InvalidArgument
from vlora.kernels.formats import Format
from vlora.kernels.quantize import quantize
from vlora.kernels.quantized import QuantizedWeight, allocate, dequantize
from vlora.model import weight_files
from vlora.model.checkpoint import ReusedMemory, declared_weights
from vlora.model.decoder_config import load_config
from vlora.model.loader import DecoderWeights, adapter_shape, load_weights, stored_lm_head

Tensors = dict[str, torch.Tensor]
HIDDEN, VOCABULARY = 16, 40


def save(folder: Path, tied: bool = False, **options: Any) -> Path:
    """Save a tiny random Llama in one file and return its folder."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 24, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=2,
        tie_word_embeddings=tied,
        **sizes,
        **options,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path)


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return save(tmp_path, tied=True)


def edit(folder: Path, change: Callable[[Tensors], object]) -> Tensors:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def load(folder: Path) -> DecoderWeights:
    return load_weights(folder, load_config(folder))


def shard(folder: Path) -> Path:
    """Split the weights file into two shards with an index; return the second shard."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[:8], names[8:]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder / "model-00002-of-00002.safetensors"


def refused(folder: Path) -> str:
    with pytest.raises(InvalidArgument, match=r"^model: ") as caught:
        load(folder)
    return str(caught.value)


def test_tied_embeddings_are_the_head(tied: Path) -> None:
    weights = load(tied)
    assert weights.lm_head is weights.embedding
    assert torch.equal(stored_lm_head(tied, load_config(tied))[:], weights.embedding)


@pytest.mark.parametrize("form", [Format(8, None), Format(4, 32, zeros=True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_quantizing_at_load_gives_an_lm_head_of_8_bits(
    tmp_path: Path, is_tied: bool, dtype: torch.dtype, form: Format
) -> None:
    """The integers are those of the stored floats, even if the embedding is rounded."""
    config = load_config(save(tmp_path, tied=is_tied))
    weights = load_weights(tmp_path, config, dtype, form)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    stored = embedding if is_tied else tensors["lm_head.weight"]
    expected = allocate(Format(8, None), VOCABULARY, HIDDEN, dtype)
    quantize(stored, expected)
    assert isinstance(weights.lm_head, QuantizedWeight)
    assert weights.lm_head.format == expected.format
    assert weights.lm_head.dtype == dtype
    assert torch.equal(dequantize(weights.lm_head), dequantize(expected))
    assert torch.equal(weights.embedding, embedding.to(dtype))
    unquantized = adapter_shape(tmp_path, config, weights).lm_head()
    assert torch.equal(unquantized[0:VOCABULARY], stored.to(dtype))


def test_the_rows_of_a_stored_lm_head_are_read_from_its_file(folder: Path) -> None:
    head = stored_lm_head(folder, load_config(folder), torch.bfloat16)
    stored = load_file(folder / "model.safetensors")["lm_head.weight"].bfloat16()
    assert head.shape == stored.shape
    for rows in (slice(0, 7), slice(35, 99), slice(None)):
        assert torch.equal(head[rows], stored[rows])


def test_a_stored_lm_head_that_cannot_be_read_is_named(folder: Path) -> None:
    head = stored_lm_head(folder, load_config(folder))
    file, name = folder / "model.safetensors", "lm_head.weight"
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(VOCABULARY, HIDDEN + 1)}))
    with pytest.raises(InvalidArgument, match=r"'lm_head.weight' of shape \(40, 17\)"):
        head[:]
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(VOCABULARY, HIDDEN).char()}))
    with pytest.raises(InvalidArgument, match=r"'lm_head.weight' as I8"):
        head[:]
    edit(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(InvalidArgument, match=r"'lm_head.weight' cannot be read"):
        head[:]
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(InvalidArgument, match=r"model.safetensors cannot be read"):
        head[:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_another_head_stored_with_tied_embeddings_is_used_as_in_transformers(
    tied: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    head = torch.randn(VOCABULARY, HIDDEN).to(dtype)
    edit(tied, lambda tensors: tensors.update({"lm_head.weight": head}))
    theirs = LlamaForCausalLM.from_pretrained(tied, dtype=torch.float32)
    weights = load(tied)
    assert torch.equal(weights.lm_head, theirs.lm_head.weight)
    assert torch.equal(weights.lm_head, head.float())
    assert torch.equal(weights.embedding, theirs.model.embed_tokens.weight)
    assert "holds 'lm_head.weight', which differs from the embeddings" in caplog.text
    assert torch.equal(stored_lm_head(tied, load_config(tied))[:], weights.lm_head)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (torch.zeros(VOCABULARY, HIDDEN).char(), "'lm_head.weight' as I8: only the decoder's"),
        (torch.zeros(VOCABULARY + 8, HIDDEN), r"'lm_head.weight' of shape \(48, 16\)"),
    ],
)
def test_a_head_stored_with_tied_embeddings_that_cannot_be_used_is_refused(
    tied: Path, head: torch.Tensor, message: str
) -> None:
    edit(tied, lambda tensors: tensors.update({"lm_head.weight": head}))
    assert re.search(message, refused(tied))


def test_a_head_equal_to_the_tied_embeddings_gives_no_warning(
    tied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(
        tied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone().half()})
    )
    edit(tied, lambda t: t.update({name: tensor.half() for name, tensor in t.items()}))
    load(tied)
    assert caplog.text == ""


def test_tied_embeddings_may_be_stored_as_the_head_as_in_transformers(tied: Path) -> None:
    edit(tied, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    theirs = LlamaForCausalLM.from_pretrained(tied).lm_head.weight
    weights = load(tied)
    assert torch.equal(weights.embedding, theirs)
    assert torch.equal(weights.lm_head, theirs)


@pytest.mark.parametrize("where", ["model", "text"])
def test_quantized_weights_are_refused_with_their_method(
    folder: Path, checkpoint: Path, tmp_path: Path, where: str
) -> None:
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if where == "model":
        edit_config(folder, quantization_config=quantization)
    else:
        config = json.loads((checkpoint / "config.json").read_text())
        config["text_config"]["quantization_config"] = quantization
        (folder / "config.json").write_text(json.dumps(config))
    message = refused(folder)
    assert "'quantization_config'" in message
    assert "'fp8'" in message


@pytest.mark.parametrize("form", [Format(8, None), Format(4, 32, zeros=True)], ids=str)
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_a_weight_that_cannot_be_quantized_is_named(folder: Path, form: Format, name: str) -> None:
    edit(folder, lambda tensors: tensors[name][3].fill_(float("nan")))
    with pytest.raises(InvalidArgument) as error:
        load_weights(folder, load_config(folder), quantization=form)
    assert str(error.value).startswith(f"model: {folder / 'model.safetensors'} holds '{name}'")
    assert "cannot be quantized: row 3 has a value that is not finite" in str(error.value)


UP, QUERY = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"
MISSING = (
    "norm.weight",
    "embed_tokens.weight",
    "layers.0.input_layernorm.weight",
    "layers.1.post_attention_layernorm.weight",
    "layers.1.self_attn.k_proj.weight",
    "layers.1.self_attn.o_proj.bias",
)
FAULTS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    **{
        name: (lambda t, name=name: t.pop(f"model.{name}"), rf"model\.safetensors lacks {name}$")
        for name in MISSING
    },
    "no head": (
        lambda t: t.pop("lm_head.weight"),
        r"model\.safetensors lacks lm_head\.weight.*config\.json does not tie it",
    ),
    "another shape": (
        lambda t: t.update({QUERY: torch.randn(HIDDEN, HIDDEN + 1)}),
        rf"'{QUERY}' of shape \(16, 17\).*\(16, 16\)",
    ),
    "one tensor under two names": (
        lambda t: t.update({"norm.weight": torch.ones(HIDDEN)}),
        r"'model\.norm\.weight'.*'norm\.weight'|'norm\.weight'.*'model\.norm\.weight'",
    ),
    **{
        str(dtype): (
            lambda t, dtype=dtype: t.update({UP: t[UP].to(dtype)}),
            rf"model\.safetensors.*'{UP}' as {stored}",
        )
        for dtype, stored in ((torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8"))
    },
}


@pytest.mark.parametrize(("change", "message"), FAULTS.values(), ids=FAULTS)
def test_tensors_that_cannot_be_served_are_named_with_their_file(
    tmp_path: Path, change: Callable[[Tensors], object], message: str
) -> None:
    edit(save(tmp_path, attention_bias=True), change)
    assert re.search(message, refused(tmp_path))


@pytest.mark.parametrize(
    "damaged",
    [
        lambda content: content[:0],
        lambda content: content[:4],
        lambda content: content[:200],
        lambda content: content[:-1],
        lambda content: b"\xff" * 4096,
        lambda content: None,
    ],
    ids=["empty", "4 bytes", "200 bytes", "truncated", "corrupt", "missing"],
)
def test_a_shard_that_cannot_be_read_is_named(
    folder: Path, damaged: Callable[[bytes], bytes | None]
) -> None:
    second = shard(folder)
    content = damaged(second.read_bytes())
    second.unlink()
    if content is not None:
        second.write_bytes(content)
    problem = (
        "is missing$" if content is None else r"cannot be read: .*; is its download complete\?$"
    )
    assert re.search(f"{second} {problem}", refused(folder))


def test_a_shard_that_is_a_pipe_is_refused_instead_of_waited_for(folder: Path) -> None:
    second = shard(folder)
    second.unlink()
    os.mkfifo(second)
    assert f"{second} is not a regular file" in refused(folder)


def test_a_missing_shard_is_named_without_an_index(folder: Path) -> None:
    second = shard(folder)
    (folder / "model.safetensors.index.json").unlink()
    second.unlink()
    assert f"lacks {second.name}" in refused(folder)


def test_a_git_lfs_pointer_is_refused_with_the_command_to_fetch_the_weights(
    folder: Path,
) -> None:
    file = folder / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 34\n")
    assert "git lfs pull" in refused(folder)


def test_a_tensor_that_its_shard_lacks_is_named_with_the_shard(folder: Path) -> None:
    second = shard(folder)
    tensors = load_file(second)
    del tensors["model.norm.weight"]
    save_file(tensors, second, {"format": "pt"})
    assert refused(folder).endswith(f"{second} lacks norm.weight")


def test_files_that_the_index_does_not_list_are_not_read(folder: Path) -> None:
    expected = load(folder).slab.digest()
    shard(folder)
    save_file({"norm.weight": torch.zeros(HIDDEN)}, folder / "consolidated.safetensors")
    assert load(folder).slab.digest() == expected


def test_pickled_weights_are_refused_with_a_command_that_converts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path / "a model")
    expected = load(folder).slab.digest()
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    message = refused(folder)
    assert "no .safetensors file, but pytorch_model.bin" in message
    python, option, program, *arguments = shlex.split(message.partition("Convert them: ")[2])
    assert (python, option) == ("python", "-c")
    monkeypatch.setattr("sys.argv", [option, *arguments])
    exec(program, {})
    assert load(folder).slab.digest() == expected


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 5}', "[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_broken_json_file_is_named(folder: Path, name: str, content: str) -> None:
    shard(folder)
    (folder / name).write_text(content)
    assert name in refused(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_stored_float_type_becomes_float32(folder: Path, dtype: torch.dtype) -> None:
    tensors = edit(folder, lambda t: t.update({name: x.to(dtype) for name, x in t.items()}))
    weights = load(folder)
    up = weights.slab.region(1, "up_proj").view(weights.slab.base)
    assert torch.equal(up, tensors["model.layers.1.mlp.up_proj.weight"].float())
    assert torch.equal(weights.lm_head, tensors["lm_head.weight"].float())
    assert weights.lm_head.dtype == weights.final_norm.dtype == torch.float32


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    """Yield a checkpoint of about 50 M parameters in float16 (100 MB), removed afterwards."""
    hidden, middle = 1024, 2816
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=middle,
        num_hidden_layers=4,
        num_attention_heads=8,
    )
    config.save_pretrained(tmp_path)
    noise = torch.randn(middle, hidden).half()
    shapes = load_config(tmp_path).weight_shapes
    tensors = {}
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        tensors[name] = noise.flatten()[:size].view(shape).clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    yield tmp_path
    (tmp_path / "model.safetensors").unlink()


def test_loading_needs_the_memory_of_one_copy_of_the_model(large: Path) -> None:
    config = load_config(large)
    sizes = [4 * torch.Size(shape).numel() for shape in config.weight_shapes.values()]
    load_weights(large, config)
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmHWM")
    weights = load_weights(large, config)
    growth = status_bytes("VmHWM") - before
    assert len(weights.norms) == 8
    assert sum(sizes) / 2 < growth <= sum(sizes) + 2 * max(sizes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "mistral", "sliding_window": 64}, "sliding-window attention"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"model_type": "phi3"}, "model type 'phi3', which is not supported"),
        ({"model_type": "no such"}, "config.json"),
    ],
)
def test_unsupported_decoders_are_refused_with_the_reason(
    folder: Path, changes: dict[str, Any], reason: str
) -> None:
    edit_config(folder, **changes)
    assert reason in refused(folder)


def test_matrices_are_read_one_after_another_into_the_same_memory(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    stored = {name: torch.randn(3, 5).to(torch.bfloat16) for name in "ab"}
    save_file(stored, file)
    memory, declared = ReusedMemory(), declared_weights(file)
    addresses = set()
    for name, expected in stored.items():
        tensor = memory.read(file, name, declared[name])
        assert torch.equal(tensor, expected)
        addresses.add(tensor.data_ptr())
    assert len(addresses) == 1


def test_weights_are_read_ahead_up_to_a_limit_without_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readv, read = os.readv, []
    monkeypatch.setattr(os, "readv", lambda *args: read.append(readv(*args)) or read[-1])
    at_once = weight_files.READ_AT_ONCE
    for name, size in (("a", 2 * at_once), ("b", at_once + 1)):
        (tmp_path / f"{name}.safetensors").write_bytes(bytes(size))
    for limit, expected in (
        (9 * at_once, [at_once, at_once, 0, at_once, 1, 0]),
        (2 * at_once, [at_once, at_once]),
        (1, [at_once]),
        (0, []),
    ):
        read.clear()
        weight_files.read_ahead(tmp_path, limit)
        assert read == expected
    weight_files.read_ahead(tmp_path / "missing", at_once)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "a.safetensors")
    weight_files.read_ahead(tmp_path / "pipe", at_once)
    assert read == [0]
