"""Stage 1 of making the demo: pretrain the vision tower on dense labels, without language.

The heads of the labels are not part of the checkpoint. Training the tower through the language
model instead would take much longer.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import LlavaForConditionalGeneration

from tools.demo import attention
from tools.demo.ahead import ahead
from tools.demo.build import HIDDEN, PATCH_SIZE
from tools.demo.dense import HEADS, OUTLINE_SIDE, PATCHES, DenseBatch, dense_batch
from tools.demo.loop import Run, Stage

SEED = 11
BATCH = 96
LEARNING_RATE = 1.5e-3
OUTLINE_WEIGHT = 6.0
SHAPE_WEIGHT, EMPTY_WEIGHT = 1.0, 0.1
"""Weights of patches with and without an object in the loss of the label "shape"."""
PIXELS_OF_PATCH = 3 * PATCH_SIZE**2


class DenseHeads(nn.Module):
    """Linear readouts of a patch's features: each label, the pixels, and the object's outline."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.readout = nn.Linear(HIDDEN, sum(HEADS.values()))
        self.pixels = nn.Linear(HIDDEN, PIXELS_OF_PATCH)
        self.outline = nn.Linear(HIDDEN, OUTLINE_SIDE**2)

    def forward(self, features: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return logits by head [n, 64, classes], pixels [n, 64, 192] and outlines [n, 64, 64].

        features: [n, 64, hidden].
        """
        normal = self.norm(features)
        logits = self.readout(normal).split(list(HEADS.values()), dim=-1)
        return dict(zip(HEADS, logits, strict=True)), self.pixels(normal), self.outline(normal)


def to_pixels(images: NDArray[np.uint8]) -> Tensor:
    """Return pixels [n, 3, 64, 64] of uint8 [n, 64, 64, 3], like the image processor."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def patches_of(pixels: Tensor) -> Tensor:
    """Return the patches [n, 64, 192] of pixels [n, 3, 64, 64]."""
    columns = nn.functional.unfold(pixels, PATCH_SIZE, stride=PATCH_SIZE)
    return columns.transpose(1, 2)


def dense_loss(
    heads: DenseHeads, features: Tensor, batch: DenseBatch
) -> tuple[Tensor, dict[str, float]]:
    """Return (loss, figures by name). The figures are accuracies of labels, and the outlines' loss.

    The loss is the sum of the labels' cross entropies, the outlines' cross entropy (weighted by
    OUTLINE_WEIGHT) and the pixels' squared error.
    """
    logits, guessed, outlines = heads(features)
    labels = torch.from_numpy(batch.labels)
    pixels = to_pixels(batch.images)
    shows_thing = labels[..., 0] > 0
    drawn = torch.from_numpy(batch.outlines)[shows_thing].float()
    outline = nn.functional.binary_cross_entropy_with_logits(outlines[shows_thing].float(), drawn)
    loss = nn.functional.mse_loss(guessed.float(), patches_of(pixels)) + OUTLINE_WEIGHT * outline
    figures = {"outline": float(outline.detach())}
    for column, (name, head) in enumerate(logits.items()):
        asked = labels[..., column].reshape(-1)
        kept = asked >= 0
        rows = head.reshape(-1, head.shape[-1])[kept].float()
        if name == "shape":
            weights = torch.full((HEADS["shape"],), SHAPE_WEIGHT)
            weights[0] = EMPTY_WEIGHT
            loss = loss + nn.functional.cross_entropy(rows, asked[kept], weight=weights)
        else:
            loss = loss + nn.functional.cross_entropy(rows, asked[kept])
        if name in ("shape", "texture", "x1", "pattern"):
            things = asked[kept] > 0 if name == "shape" else slice(None)
            hits = (rows.argmax(-1) == asked[kept])[things]
            figures[name] = float(hits.float().mean())
    return loss, figures


def train_tower(model: LlavaForConditionalGeneration, work: Path, steps: int) -> DenseHeads:
    """Pretrain the tower in place. Return the heads, which stage 2 uses as an auxiliary task."""
    torch.manual_seed(SEED)
    heads = DenseHeads()
    tower = model.model.vision_tower
    tower.set_attn_implementation(attention.NAME)
    stage = Stage("tower", steps, LEARNING_RATE, work / "tower.pt")
    run = Run(stage, {"tower": tower, "heads": heads})

    def loss_of(batch: DenseBatch) -> tuple[Tensor, dict[str, float]]:
        with torch.autocast("cpu", torch.bfloat16):
            features = tower(to_pixels(batch.images)).last_hidden_state[:, 1 : PATCHES + 1]
            return dense_loss(heads, features, batch)

    make = partial(dense_batch, seed=SEED, size=BATCH)
    with ahead(make, run.step, steps) as batches:
        run.train(batches, loss_of)
    return heads
