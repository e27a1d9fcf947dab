"""The untrained but complete demo checkpoint: weights, tokenizer, chat template, processor."""

from pathlib import Path

import torch
from transformers import (
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from tools.demo.tokenizer import make_tokenizer

IMAGE_SIZE = 64
PATCH_SIZE = 8
IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2
HIDDEN = 192
CONTEXT = 1024
SHARD_LIMIT = "7MB"
INITIAL_STD = 0.05
BOX_FILTER = 4
"""Pillow's number of its box filter (`Image.Resampling.BOX`)."""


def _special_tokens(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(tokenizer, name) for name in names}


def make_config(tokenizer: PreTrainedTokenizerFast) -> LlavaConfig:
    """Return the architecture: CLIP tower, two-layer connector, Llama decoder."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 448}
    sizes |= {"num_hidden_layers": 5, "num_attention_heads": 6}
    vision = CLIPVisionConfig(
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        projection_dim=HIDDEN,
        hidden_act="gelu_pytorch_tanh",
        **sizes,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        **_special_tokens(tokenizer),
        **sizes,
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
        image_seq_length=IMAGE_TOKENS,
        projector_hidden_act="gelu",
        tie_word_embeddings=False,
    )


def make_image_processor() -> CLIPImageProcessorPil:
    """Return a processor that scales pictures with a box filter and maps values to [-1, 1]."""
    return CLIPImageProcessorPil(
        do_resize=True,
        size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        resample=BOX_FILTER,
        do_center_crop=False,
        do_rescale=True,
        do_normalize=True,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
        do_convert_rgb=True,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlavaForConditionalGeneration:
    """Return the untrained model in float32, with weights drawn from `seed`."""
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(make_config(tokenizer))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                torch.nn.init.normal_(weight, std=INITIAL_STD)
            elif name.endswith("bias"):
                torch.nn.init.zeros_(weight)
    return model


def save_checkpoint(
    folder: Path, model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Write all files that serving reads, with weights in float16 and shards below 8 MiB."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("model*.safetensors*"):
        stale.unlink()
    stored = LlavaForConditionalGeneration(model.config).to(torch.float16)
    stored.load_state_dict(model.state_dict())
    stored.generation_config = GenerationConfig(do_sample=False, **_special_tokens(tokenizer))
    stored.save_pretrained(folder, max_shard_size=SHARD_LIMIT)
    processor = LlavaProcessor(
        image_processor=make_image_processor(),
        tokenizer=tokenizer,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        chat_template=tokenizer.chat_template,
        num_additional_image_tokens=1,
    )
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    make_image_processor().save_pretrained(folder)
    for shard in folder.glob("*.safetensors"):
        shard.chmod(0o644)


def build(folder: str | Path, seed: int = 0) -> Path:
    """Write an untrained but complete checkpoint and return its folder."""
    tokenizer = make_tokenizer()
    save_checkpoint(Path(folder), make_model(tokenizer, seed), tokenizer)
    return Path(folder)
