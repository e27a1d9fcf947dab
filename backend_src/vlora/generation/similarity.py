"""Estimates of how well items can share one adapter, from gradients at the base model.

A small training step on item b with learning rate η changes the loss of item a by -η gₐ·g_b to
first order, where g is the gradient with respect to the adapter's weights. So the cosine of the two
gradients estimates whether training both items in one adapter helps or hurts them. It costs one
backward pass per item. Li et al. (ACL 2025, "Efficient Ensemble for Fine-tuning Language Models on
Multiple Datasets") use the same gradients to estimate which data sets to train together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from vlora.generation.examples import Splits
from vlora.generation.learner import Base, Learner
from vlora.generation.spec import Item, Training

EXAMPLES = 64
"""Number of training examples of each item from which its gradient is computed."""
BUCKETS = 1 << 16
"""Length of a sketch, the compressed gradient. The error of a cosine is about 1 / √BUCKETS."""


def similarities(
    base: Base, training: Training, items: Sequence[Item], splits: Mapping[str, Splits], seed: int
) -> dict[str, dict[str, float]]:
    """Return the cosine of the gradients of each two items, as result[item][other item]."""
    learner = Learner(base, training, (), seed)
    try:
        sketches = {item.name: _sketch(learner, item, splits[item.name], seed) for item in items}
    finally:
        learner.release()
    return {
        name: {
            other: round(float(torch.cosine_similarity(sketch, theirs, dim=0)), 6)
            for other, theirs in sketches.items()
            if other != name
        }
        for name, sketch in sketches.items()
    }


def _sketch(learner: Learner, item: Item, splits: Splits, seed: int) -> torch.Tensor:
    """Return the count sketch of an item's gradient, [BUCKETS].

    The gradient of every weight is added, with a random sign, to a random bucket. Sketches with the
    same seed preserve inner products in expectation.
    """
    step = max(1, len(splits.train) // EXAMPLES)
    rows = [learner.base.row(item, example, ()) for example in splits.train[::step][:EXAMPLES]]
    learner.zero_grad()
    learner(learner.base.batches(rows)).backward()
    generator = torch.Generator().manual_seed(seed)
    sketch = torch.zeros(BUCKETS)
    for weight in learner.parameters():
        if weight.requires_grad and weight.grad is not None:
            gradient = weight.grad.flatten().float().cpu()
            buckets = torch.randint(BUCKETS, gradient.shape, generator=generator)
            signs = torch.randint(2, gradient.shape, generator=generator) * 2 - 1
            sketch.index_add_(0, buckets, gradient * signs)
    return sketch
