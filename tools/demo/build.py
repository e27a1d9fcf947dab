"""The demo's architecture with random weights.

Architecture, tokenizer and image processor are those of the committed checkpoint. The tokenizer is
byte-level BPE, learned from the prompts of all tasks and the words of `lexicon`: each word of an
answer, with or without a space before it, and each value of a box's coordinate is one token.
"""

import shutil
from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

CHECKPOINT = Path(__file__).with_name("checkpoint")
PATCH_SIZE, IMAGE_TOKENS = 8, 64
HIDDEN = 192
SHARD_LIMIT = "7MB"
INITIAL_STD = 0.05


def make_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(CHECKPOINT)


def make_model(seed: int) -> LlavaForConditionalGeneration:
    """Return the untrained model in float32, with weights drawn from `seed`."""
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(LlavaConfig.from_pretrained(CHECKPOINT))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                torch.nn.init.normal_(weight, std=INITIAL_STD)
            elif name.endswith("bias"):
                torch.nn.init.zeros_(weight)
    return model


def save_checkpoint(folder: Path, model: LlavaForConditionalGeneration) -> None:
    """Write all files that serving reads, with weights in float16 and shards below 8 MiB."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("model*.safetensors*"):
        stale.unlink()
    if folder.resolve() != CHECKPOINT.resolve():
        for pattern in ("chat_template.jinja", "tokenizer*.json", "*processor_config.json"):
            for path in CHECKPOINT.glob(pattern):
                shutil.copyfile(path, folder / path.name)
    stored = LlavaForConditionalGeneration(model.config).to(torch.float16)
    stored.load_state_dict(model.state_dict())
    stored.generation_config = GenerationConfig.from_pretrained(CHECKPOINT)
    stored.save_pretrained(folder, max_shard_size=SHARD_LIMIT)
    for shard in folder.glob("*.safetensors"):
        shard.chmod(0o644)


def build(folder: str | Path, seed: int = 0) -> Path:
    """Write an untrained but complete checkpoint and return its folder."""
    save_checkpoint(Path(folder), make_model(seed))
    return Path(folder)
