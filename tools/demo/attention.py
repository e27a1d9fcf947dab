"""Attention for training on a CPU: grouped queries without repeated keys, all in bfloat16.

It is registered with transformers as the attention function "packed". For this model it is several
times faster than the stock functions, which compute masks and softmax in float32.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

NAME = "packed"


class _Softmax(torch.autograd.Function):
    """Softmax over the last axis. The stock backward pass is slow in bfloat16."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        weights = torch.softmax(scores, -1)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        product = gradient * weights
        return product.addcmul_(weights, product.sum(-1, keepdim=True), value=-1)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return attention outputs [n, length, heads, dim] and no weights.

    query is [n, heads, length, dim]; key and value are [n, kv heads, length, dim]. The mask is
    additive, [n, 1, groups x length, length], as `grouped_mask` makes it.
    """
    rows, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(rows, kv_heads, heads // kv_heads * length, dim) * scaling
    scores = grouped @ key.transpose(-1, -2)
    if attention_mask is not None:
        scores = scores.add_(attention_mask)
    with torch.autocast("cpu", enabled=False):
        weights: Tensor = _Softmax.apply(scores)
    mixed = (weights @ value).reshape(rows, heads, length, dim)
    return mixed.transpose(1, 2).reshape(rows, length, heads, dim), None


def grouped_mask(mask: Tensor, groups: int) -> Tensor:
    """Repeat a mask [n, 1, length, length] for the `groups` query heads that share a KV head.

    Returns [n, 1, groups x length, length].
    """
    return mask.repeat(1, 1, groups, 1)


AttentionInterface.register(NAME, packed_attention)
