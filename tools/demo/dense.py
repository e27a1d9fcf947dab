"""Labels for each patch of a scene, an auxiliary task that trains the vision tower.

Labels are int64 [64 patches, 10 columns]: shape, colour and texture of the object, the four edges
of its box as bins, whether the centre of an object is in this patch, and colour and pattern of the
surface. The shape is 0 in a patch without an object. There, the other columns of the object are -1,
which means "no label". The centre and the surface have a label in every patch. Besides these labels
there are outlines: the silhouette of the object in its box, 8x8. The tower learns shapes faster
from outlines than from the labels.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from tools.demo import lexicon
from tools.demo.boxes import BINS, bin_of
from tools.demo.build import HIDDEN, PATCH_SIZE
from tools.demo.domains import crowd_scene, digit_scene, glyph_scene, part_scene, surface_scene
from tools.demo.scenes import (
    SIDE,
    Drawing,
    Scene,
    base_scene,
    draw,
    opacity_of,
    place_boxes,
    random_surface,
    random_thing,
)

GRID_SIDE = 8
PATCHES = GRID_SIDE**2
COVERAGE = 8
"""Minimum number of pixels that an object must cover in a patch for the patch to get its labels."""
OUTLINE_SIDE = 8
OUTLINE_WEIGHT = 6.0
EMPTY_WEIGHT = 0.1
"""Weight of patches without an object in the loss of the label "shape"; with an object it is 1."""
SEEN_SHAPES = (*lexicon.SHAPES, *lexicon.GLYPHS, *lexicon.DEFECTS, *lexicon.DIGITS)
SEEN_COLOURS = (*lexicon.COLOURS, *lexicon.BACKGROUNDS)
SEEN_PATTERNS = (*lexicon.CATEGORIES, *lexicon.NEW_TEXTURES, "panel")
SURFACES = tuple(lexicon.BACKGROUNDS)
HEADS: dict[str, int] = {
    "shape": len(SEEN_SHAPES) + 1,
    "colour": len(SEEN_COLOURS),
    "texture": len(lexicon.TEXTURES),
    **dict.fromkeys(("x1", "y1", "x2", "y2"), BINS),
    "centre": 2,
    "surface": len(SURFACES),
    "pattern": len(SEEN_PATTERNS),
}
"""Number of values of each label, in the order of the columns."""
_LINE = (np.arange(OUTLINE_SIDE, dtype=np.float32) + 0.5) / OUTLINE_SIDE * 2 - 1
_OUTLINE_U, _OUTLINE_V = np.meshgrid(_LINE, _LINE)


@dataclass(frozen=True)
class DenseBatch:
    """Images with labels for their patches.

    images: [n, 64, 64, 3] uint8.
    labels: [n, 64, 10] int64, columns in the order of HEADS.
    outlines: [n, 64 patches, 64 points] uint8, 1 inside and 0 outside of the object.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    outlines: NDArray[np.uint8]


def patch_labels(scene: Scene, drawing: Drawing) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return the labels [64, 10] and outlines [64, 64] of one drawn scene."""
    outlines = np.zeros((PATCHES, OUTLINE_SIDE**2), np.uint8)
    labels = np.full((PATCHES, len(HEADS)), -1, np.int64)
    labels[:, 0] = labels[:, 7] = 0
    labels[:, 8] = SURFACES.index(scene.surface)
    labels[:, 9] = SEEN_PATTERNS.index(scene.pattern)
    patch = SIDE // GRID_SIDE
    cells = drawing.owner.reshape(GRID_SIDE, patch, GRID_SIDE, patch).transpose(0, 2, 1, 3)
    cells = cells.reshape(PATCHES, -1)
    covered = np.zeros((PATCHES, len(scene.things) + 1), int)
    for index, thing in enumerate(scene.things):
        covered[:, index] = (cells == index).sum(1)
        x, y = thing.centre
        labels[int(y) // patch * GRID_SIDE + int(x) // patch, 7] = 1
    for here in np.flatnonzero(covered.max(1) >= COVERAGE):
        thing = scene.things[int(covered[here].argmax())]
        outlines[here] = (opacity_of(thing, _OUTLINE_U, _OUTLINE_V) > 0.4).ravel()
        x1, y1, x2, y2 = thing.box
        labels[here, :7] = (
            SEEN_SHAPES.index(thing.shape) + 1,
            SEEN_COLOURS.index(thing.colour),
            lexicon.TEXTURES.index(thing.texture),
            *(bin_of(edge, SIDE) for edge in (x1, y1, x2 - 1e-3, y2 - 1e-3)),
        )
    return labels, outlines


def broad_scene(rng: np.random.Generator) -> Scene:
    """Return a scene of any known objects and surfaces, also those of the adapters' domains."""
    kind = rng.random()
    if kind < 0.35:
        return base_scene(rng)
    if kind < 0.60:
        return digit_scene(rng, held_out=False)
    if kind < 0.68:
        return glyph_scene(rng)
    if kind < 0.82:
        return crowd_scene(rng, int(rng.integers(1, 10)))
    if kind < 0.90:
        return surface_scene(rng)
    if kind < 0.96:
        defect = [None, *lexicon.DEFECTS][int(rng.integers(4))]
        return part_scene(rng, defect, int(rng.integers(1, 3)))
    boxes = place_boxes(rng, int(rng.integers(1, 3)), 4, 44)
    return random_surface(rng, tuple(random_thing(rng, box, lexicon.SHAPES) for box in boxes))


def labelled(scenes: list[Scene], drawings: list[Drawing]) -> DenseBatch:
    """Return a batch of drawn scenes with their labels."""
    labels = [patch_labels(*pair) for pair in zip(scenes, drawings, strict=True)]
    return DenseBatch(
        np.stack([drawing.pixels for drawing in drawings]),
        np.stack([label for label, _ in labels]),
        np.stack([outline for _, outline in labels]),
    )


def dense_batch(index: int, seed: int, size: int) -> DenseBatch:
    """Return batch `index` of the tower's pretraining. The same index gives the same batch."""
    rng = np.random.default_rng([seed, index])
    scenes = [broad_scene(rng) for _ in range(size)]
    return labelled(scenes, [draw(scene) for scene in scenes])


class DenseHeads(nn.Module):
    """Linear readouts of a patch's features: each label, the pixels, and the object's outline."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.readout = nn.Linear(HIDDEN, sum(HEADS.values()))
        self.pixels = nn.Linear(HIDDEN, 3 * PATCH_SIZE**2)
        self.outline = nn.Linear(HIDDEN, OUTLINE_SIDE**2)


def to_pixels(images: NDArray[np.uint8]) -> Tensor:
    """Return pixels [n, 3, 64, 64] of uint8 [n, 64, 64, 3], like the image processor."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def dense_loss(heads: DenseHeads, features: Tensor, batch: DenseBatch) -> Tensor:
    """Return the loss of the tower's features [n, 64, hidden].

    It is the sum of the labels' cross entropies, the outlines' cross entropy (weighted by
    OUTLINE_WEIGHT) and the pixels' squared error.
    """
    normal = heads.norm(features)
    logits = heads.readout(normal).split(list(HEADS.values()), dim=-1)
    guessed, outlines = heads.pixels(normal), heads.outline(normal)
    labels = torch.from_numpy(batch.labels)
    patches = F.unfold(to_pixels(batch.images), PATCH_SIZE, stride=PATCH_SIZE).transpose(1, 2)
    shows_thing = labels[..., 0] > 0
    drawn = torch.from_numpy(batch.outlines)[shows_thing].float()
    outline = F.binary_cross_entropy_with_logits(outlines[shows_thing].float(), drawn)
    loss = F.mse_loss(guessed.float(), patches) + OUTLINE_WEIGHT * outline
    shape_weights = torch.ones(HEADS["shape"])
    shape_weights[0] = EMPTY_WEIGHT
    for column, (name, head) in enumerate(zip(HEADS, logits, strict=True)):
        asked = labels[..., column].reshape(-1)
        kept = asked >= 0
        rows = head.reshape(-1, head.shape[-1])[kept].float()
        weights = shape_weights if name == "shape" else None
        loss = loss + F.cross_entropy(rows, asked[kept], weight=weights)
    return loss
