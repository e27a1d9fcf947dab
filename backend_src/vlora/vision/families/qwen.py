"""Qwen-VL of the first generation: a vision transformer, and one layer of cross-attention whose
queries are the tokens of an image. transformers has no such modules. Names follow the published
checkpoint, so that its weights and adapters fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from vlora.model.families.qwen import QwenConfig
from vlora.vision.families.base import Pixels, VisionFamily
from vlora.vision.images import DecodedImage

HEAD_DIM = 128  # Width of a head of the cross-attention.
NORM_EPS = 1e-6
# Number of stored position embeddings. They are interpolated to the number of patches.
TRAINED_POSITIONS = 256


def _positions(stored: torch.Tensor, count: int) -> torch.Tensor:
    """Return the embeddings [count, width] of a square, interpolated from stored [n, width]."""
    if len(stored) == count:
        return stored
    old, new = math.isqrt(len(stored)), math.isqrt(count)
    grid = stored.T.view(1, -1, old, old)
    resized = functional.interpolate(grid, (new, new), mode="bicubic", align_corners=False)
    return resized[0].flatten(1).T


class _SelfAttention(nn.Module):
    """Self-attention. The input projection has, for each head, query, key and value."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.in_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the attention of x, [images, patches, width], to itself."""
        images, patches, width = x.shape
        projected = self.in_proj(x).view(images, patches, self._heads, -1).transpose(1, 2)
        query, key, value = projected.chunk(3, dim=-1)
        attended = functional.scaled_dot_product_attention(query, key, value)
        return self.out_proj(attended.transpose(1, 2).reshape(images, patches, width))  # type: ignore[no-any-return]


class _Block(nn.Module):
    """One layer of the tower."""

    def __init__(self, width: int, heads: int, mlp_width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, NORM_EPS)
        self.ln_2 = nn.LayerNorm(width, NORM_EPS)
        self.attn = _SelfAttention(width, heads)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(width, mlp_width), "c_proj": nn.Linear(mlp_width, width)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for x. Both are [images, patches, width]."""
        x = x + self.attn(self.ln_1(x))
        inner = functional.gelu(self.mlp["c_fc"](self.ln_2(x)))
        return x + self.mlp["c_proj"](inner)  # type: ignore[no-any-return]


class _CrossAttention(nn.Module):
    """Cross-attention with the weights of `torch.nn.MultiheadAttention`.

    Unlike that class, it calls its output layer, so that the forward hooks of adapters run.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the attention, [images, queries, width].

        inputs: queries, keys and values, each [images, n, width].
        """
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        query, key, value = (
            functional.linear(x, weight, bias).view(*x.shape[:2], -1, HEAD_DIM).transpose(1, 2)
            for x, weight, bias in zip(inputs, weights, biases, strict=True)
        )
        attended = functional.scaled_dot_product_attention(query, key, value)
        return self.out_proj(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class _Resampler(nn.Module):
    """Cross-attention of trained queries to the features of patches."""

    def __init__(self, width: int, out: int, queries: int) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.empty(queries, out))
        self.query = nn.Parameter(torch.empty(queries, out))
        self.kv_proj = nn.Identity() if width == out else nn.Linear(width, out, bias=False)
        self.attn = _CrossAttention(out)
        self.ln_q = nn.LayerNorm(out, NORM_EPS)
        self.ln_kv = nn.LayerNorm(out, NORM_EPS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one row per query, [images, queries, out], for x, [images, patches, width]."""
        values = self.ln_kv(self.kv_proj(x))
        keys = values + _positions(self.pos_embed, x.shape[1])
        queries = self.ln_q(self.query) + self.pos_embed
        return self.attn(queries.expand(len(x), -1, -1), keys, values)  # type: ignore[no-any-return]


class _Tower(nn.Module):
    """The vision transformer, the resampler and the last projection."""

    def __init__(self, visual: dict[str, Any]) -> None:
        super().__init__()
        width, out, patch = visual["width"], visual["output_dim"], visual["patch_size"]
        self.conv1 = nn.Conv2d(3, width, patch, patch, bias=False)
        self.positional_embedding = nn.Parameter(torch.empty(TRAINED_POSITIONS, width))
        self.ln_pre = nn.LayerNorm(width, NORM_EPS)
        layers = (
            _Block(width, visual["heads"], int(width * visual["mlp_ratio"]))
            for _ in range(visual["layers"])
        )
        self.transformer = nn.ModuleDict({"resblocks": nn.ModuleList(layers)})
        self.attn_pool = _Resampler(width, out, visual.get("n_queries", 256))
        self.ln_post = nn.LayerNorm(out, NORM_EPS)
        self.proj = nn.Parameter(torch.empty(out, out))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the image features, [images, queries, out], of pixels, [images, 3, side, side]."""
        x = self.conv1(pixels).flatten(2).transpose(1, 2)
        x = self.ln_pre(x + _positions(self.positional_embedding, x.shape[1]))
        for block in self.transformer["resblocks"].children():
            x = block(x)
        return self.ln_post(self.attn_pool(x)) @ self.proj  # type: ignore[no-any-return]


class _QwenVision(PreTrainedModel):  # type: ignore[misc]
    """Qwen-VL without its decoder."""

    config_class = QwenConfig
    _keys_to_ignore_on_load_unexpected = (r"^transformer\.(h|wte|ln_f)\.", r"^lm_head")

    def __init__(self, config: QwenConfig) -> None:
        super().__init__(config)
        self.transformer = nn.ModuleDict({"visual": _Tower(config.visual or {})})
        self.post_init()


def _processor(checkpoint: Path, config: Any) -> Any:
    side = config.visual["image_size"]
    return CLIPImageProcessorPil(size={"height": side, "width": side}, do_center_crop=False)


def _grid(config: Any, processor: Any, image: DecodedImage) -> tuple[int, int]:
    side = config.visual["image_size"] // config.visual["patch_size"]
    return side, side


def _features(model: Any, images: Sequence[Pixels]) -> Sequence[torch.Tensor]:
    pixels = torch.cat([image["pixel_values"].float() for image in images])
    features: Sequence[torch.Tensor] = model.transformer["visual"](pixels)
    return features


QWEN_VL = VisionFamily(
    "qwen",
    image_text="<img><imgpad></img>",
    part=_QwenVision,
    config_keys=("visual",),
    grid=_grid,
    tokens=lambda config, processor, image: int(config.visual.get("n_queries", 256)),
    features=_features,
    load_processor=_processor,
)
FAMILIES = {QWEN_VL.model_type: QWEN_VL}
