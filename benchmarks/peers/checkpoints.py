"""Copies of a LLaVA's decoder for other systems: a Llama checkpoint, and GGUF files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.llava import Checkpoint

DECODER = "language_model."
WEIGHTS, ADAPTER_WEIGHTS = "model.safetensors", "adapter_model.safetensors"
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Names of a layer's parts in GGUF by their names in transformers."""
OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def once(path: Path, write: Callable[[Path], object]) -> Path:
    """Return `path`; let `write` create it under another name first unless it exists."""
    if not path.exists():
        part = path.with_name(f"part.{path.name}")
        shutil.rmtree(part, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        write(part)
        part.rename(path)
    return path


def llama_folder(checkpoint: Checkpoint) -> Path:
    """Return a folder with `model`, a Llama of the decoder's weights, and `adapters`."""
    return once(checkpoint.folder.parent / "llama", lambda part: _write_llama(checkpoint, part))


def _write_llama(checkpoint: Checkpoint, folder: Path) -> None:
    (folder / "model").mkdir(parents=True)
    config = json.loads((checkpoint.folder / "config.json").read_text())["text_config"]
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (folder / "model" / "config.json").write_text(json.dumps(config, indent=1))
    weights = load_file(checkpoint.folder / WEIGHTS)
    own = {n.removeprefix(DECODER): w for n, w in weights.items() if n.startswith(DECODER)}
    save_file(own, folder / "model" / WEIGHTS, metadata={"format": "pt"})
    for file in checkpoint.folder.glob("tokenizer*"):
        shutil.copy(file, folder / "model")
    for name in checkpoint.adapter_names:
        source, target = checkpoint.adapters / name, folder / "adapters" / name
        target.mkdir(parents=True)
        factors = load_file(source / ADAPTER_WEIGHTS)
        renamed = {n.replace(f".{DECODER}", "."): factor for n, factor in factors.items()}
        save_file(renamed, target / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        config = json.loads((source / "adapter_config.json").read_text())
        config |= {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
        (target / "adapter_config.json").write_text(json.dumps(config, indent=1))


def gguf_name(name: str) -> str:
    """Return the name in GGUF of a weight with this name in transformers."""
    module = name.removesuffix(".weight")
    if module in OUTER_NAMES:
        return f"{OUTER_NAMES[module]}.weight"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[part]}.weight"


def permuted(weight: torch.Tensor, heads: int, *, back: bool = False) -> torch.Tensor:
    """Return the rows of a query or key matrix in llama.cpp's order, or from it.

    llama.cpp rotates neighbouring values of a head, transformers the two halves.
    """
    shape = (heads, -1, 2) if back else (heads, 2, -1)
    return weight.view(*shape, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def heads_of(name: str, config: Mapping[str, Any]) -> int | None:
    """Return the number of heads of a query or key matrix, None for another matrix."""
    if ".q_proj." in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".k_proj." in name else None


def gguf_file(llama: Path) -> Path:
    """Return the bf16 GGUF file of a folder that `llama_folder` returned; it has no tokenizer."""
    return once(llama.parent / "llama-bf16.gguf", lambda part: _write_gguf(llama / "model", part))


def _write_gguf(folder: Path, path: Path) -> None:
    import gguf

    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for name, weight in load_file(folder / WEIGHTS).items():
        heads = heads_of(name, config)
        ordered = weight if heads is None else permuted(weight, heads)
        _add(writer, gguf_name(name), ordered if weight.dim() > 1 else ordered.float())
    _close(writer)


def gguf_adapter(llama: Path, name: str) -> Path:
    """Return the GGUF file of an adapter of a folder that `llama_folder` returned."""
    path = llama.parent / "llama-adapters" / f"{name}.gguf"
    return once(path, lambda part: _write_adapter(llama, name, part))


def _write_adapter(llama: Path, name: str, path: Path) -> None:
    import gguf

    config = json.loads((llama / "model" / "config.json").read_text())
    folder = llama / "adapters" / name
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    alpha = json.loads((folder / "adapter_config.json").read_text())["lora_alpha"]
    writer.add_float32("adapter.lora.alpha", float(alpha))
    for key, factor in load_file(folder / ADAPTER_WEIGHTS).items():
        module, lora, _ = key.removeprefix("base_model.model.").rsplit(".", 2)
        side = lora[-1].lower()
        heads = heads_of(key, config) if side == "b" else None
        ordered = factor if heads is None else permuted(factor, heads)
        _add(writer, f"{gguf_name(module)}.lora_{side}", ordered.float())
    _close(writer)


def _add(writer: Any, name: str, weight: torch.Tensor) -> None:
    import gguf

    if weight.dtype == torch.bfloat16:
        array = weight.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, weight.contiguous().numpy())


def _close(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
