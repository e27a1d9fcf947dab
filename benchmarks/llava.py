"""LLaVA checkpoints with random weights and adapters, for benchmarks of whole steps.

They are generated once into a cache folder, with the same bytes on every machine. The weights are
seeded, normally distributed and stored as bfloat16; zeros would run faster than real weights. Their
tokenizer turns a prompt of n words into n tokens, plus the begin-of-text token.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

VERSION = 1
"""Version of the generated files. Each version has its own folder."""

SPECIAL, SPECIAL_NAMES = ("<pad>", "<s>", "</s>", "<image>"), ("bos", "eos", "pad")
CONSONANTS, VOWELS = "bcdfghjklmnpqrstvwxyz", "aeiou"
WEIGHT_STD, FACTOR_STD = 0.02, 0.02


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Llama-family decoder and a CLIP tower.

    Several query heads share keys and values if kv_heads is smaller than heads.
    """

    layers: int = 14
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 16
    inner: int = 2816
    vocabulary: int = 16384
    context: int = 2048
    tower_layers: int = 6
    tower_hidden: int = 384
    tower_heads: int = 6
    tower_inner: int = 1536
    image: int = 224
    patch: int = 14
    adapters: int = 16
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    """Ranks that the adapters cycle through. Each adapter changes q, k, v and o of every layer."""

    @property
    def image_tokens(self) -> int:
        return (self.image // self.patch) ** 2

    @property
    def name(self) -> str:
        digest = hashlib.sha256(json.dumps([VERSION, asdict(self)]).encode()).hexdigest()
        return f"llava-{self.layers}x{self.hidden}-{self.heads}-{self.kv_heads}-{digest[:8]}"


def tiny(sizes: Sizes) -> Sizes:
    """Return sizes with the same numbers of layers and adapters, but with minimal matrices.

    A step of such a model costs only the overhead that does not depend on the matrices.
    """
    decoder = {"hidden": 64, "heads": 1, "kv_heads": 1, "inner": 64, "vocabulary": 512}
    tower = {"tower_layers": 2, "tower_hidden": 64, "tower_heads": 1, "tower_inner": 64}
    return replace(sizes, **decoder, **tower, image=28, ranks=(8,))


MODELS: Mapping[str, Sizes] = {"whole": Sizes(), "grouped": Sizes(kv_heads=4)}
"""whole: each query head has its own keys and values. grouped: four query heads share them."""


@dataclass(frozen=True)
class Checkpoint:
    """A generated checkpoint.

    folder: the model in transformers' format.
    adapters: folder that holds one folder per adapter.
    """

    folder: Path
    adapters: Path
    sizes: Sizes

    @property
    def adapter_names(self) -> list[str]:
        ranks = self.sizes.ranks
        return [f"a{i:02}-r{ranks[i % len(ranks)]}" for i in range(self.sizes.adapters)]


def make(sizes: Sizes, root: Path | None = None) -> Checkpoint:
    """Return the checkpoint of these sizes; generate it unless it exists.

    root: folder of the generated checkpoints; by default one in the user's cache.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = (root or cache / "vlora" / "bench") / sizes.name
    checkpoint = Checkpoint(folder / "checkpoint", folder / "adapters", sizes)
    if folder.exists():
        return checkpoint
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        complete = Path(scratch) / "complete"
        _save_checkpoint(complete / "checkpoint", sizes)
        for index, name in enumerate(checkpoint.adapter_names):
            _save_adapter(complete / "adapters" / name, sizes, index)
        complete.rename(folder)
    return checkpoint


def prompt(words: int, seed: int, sizes: Sizes) -> str:
    """Return a text of `words` tokens, without the begin-of-text token."""
    drawn = np.random.default_rng(seed).choice(_words(sizes), words)
    return "".join(drawn.tolist())


def picture(seed: int, sizes: Sizes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return smooth noise as RGB, [side, side, 3] uint8, different for each seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    side = (sizes.image, sizes.image)
    return np.asarray(Image.fromarray(coarse).resize(side, Image.Resampling.BICUBIC))


def _words(sizes: Sizes) -> Sequence[str]:
    """Return the words of two syllables that are one token together with the space before them."""
    syllables = [c + v for c in CONSONANTS for v in VOWELS]
    count = sizes.vocabulary - len(SPECIAL) - 256 - 2 * len(syllables)
    return [f" {first}{second}" for first in syllables for second in syllables][: max(count, 0)]


def _tokenizer(sizes: Sizes) -> Any:
    """Return a byte-level BPE tokenizer that merges letters into syllables and words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    syllables = [c + v for c in CONSONANTS for v in VOWELS]
    merges = [(s[0], s[1]) for s in syllables] + [("Ġ", s) for s in syllables]
    merges += [(f"Ġ{word[1:3]}", word[3:]) for word in _words(sizes)]
    pairs = itertools.product(syllables, syllables, syllables[:2])
    merges += [(f"Ġ{first}{second}", third) for first, second, third in pairs]
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = merges[: sizes.vocabulary - len(pieces)]
    pieces += [first + second for first, second in merges]
    assert len(pieces) == sizes.vocabulary, "the vocabulary is too large for the syllables"
    core = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", pieces.index("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>"},
        clean_up_tokenization_spaces=False,
        model_max_length=sizes.context,
        padding_side="left",
    )


def _save_checkpoint(folder: Path, sizes: Sizes) -> None:
    from transformers import GenerationConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = _tokenizer(sizes)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in SPECIAL_NAMES}
    generator = torch.Generator().manual_seed(0)
    config = _config(sizes, ids, tokenizer.convert_tokens_to_ids("<image>"))
    model = LlavaForConditionalGeneration(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            mean = 1.0 if weight.dim() == 1 and name.endswith("norm.weight") else 0.0
            drawn = torch.empty(weight.shape).normal_(mean, WEIGHT_STD, generator=generator)
            weight.copy_(drawn)
    model.generation_config = GenerationConfig(do_sample=False, **ids)
    model.save_pretrained(folder)
    side = sizes.image
    images = CLIPImageProcessorPil(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}
    )
    processor = LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=sizes.patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    for part in (processor, tokenizer, images):
        part.save_pretrained(folder)


def _config(sizes: Sizes, ids: Mapping[str, int], image_token: int) -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    vision = CLIPVisionConfig(
        hidden_size=sizes.tower_hidden,
        intermediate_size=sizes.tower_inner,
        num_hidden_layers=sizes.tower_layers,
        num_attention_heads=sizes.tower_heads,
        image_size=sizes.image,
        patch_size=sizes.patch,
        projection_dim=sizes.tower_hidden,
    )
    text = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=sizes.context,
        tie_word_embeddings=False,
        **ids,
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=image_token,
        vision_feature_select_strategy="default",
        vision_feature_layer=-2,
        image_seq_length=sizes.image_tokens,
        tie_word_embeddings=False,
    )


def _save_adapter(folder: Path, sizes: Sizes, index: int) -> None:
    """Save an adapter in PEFT's format, on q, k, v and o of every layer of the language model."""
    rank = sizes.ranks[index % len(sizes.ranks)]
    head = sizes.hidden // sizes.heads
    kv = sizes.kv_heads * head
    outs = {"q_proj": sizes.hidden, "k_proj": kv, "v_proj": kv, "o_proj": sizes.hidden}
    shapes = {
        f"{layer}.self_attn.{target}": (d_out, sizes.hidden)
        for layer in range(sizes.layers)
        for target, d_out in outs.items()
    }
    prefix = "base_model.model.model.language_model.layers."
    drawn = torch.Generator().manual_seed(1 + index)
    targets = rf".*language_model.*\.({'|'.join(outs)})"
    save_adapter(folder, rank, {prefix + name: s for name, s in shapes.items()}, targets, drawn)


def save_adapter(
    folder: Path,
    rank: int,
    shapes: Mapping[str, tuple[int, int]],
    targets: str | Sequence[str],
    generator: torch.Generator,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Save an adapter with drawn factors in PEFT's format.

    shapes: shape (d_out, d_in) of each target by the name of its module.
    targets: PEFT's `target_modules`.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, (d_out, d_in) in shapes.items():
        for factor, shape in (("A", (rank, d_in)), ("B", (d_out, rank))):
            values = torch.empty(shape).normal_(0.0, FACTOR_STD, generator=generator)
            tensors[f"{name}.lora_{factor}.weight"] = values.to(dtype)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))
