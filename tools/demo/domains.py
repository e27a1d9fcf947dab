"""Scenes of the adapters' domains: digits, glyphs, many objects, surfaces, damaged parts."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tools.demo import lexicon
from tools.demo.scenes import Floats, Scene, Thing, place_boxes, random_surface, random_thing
from vlora.generation.metrics import Box

_DARK = ("black", "gray", "brown")
_HELD_OUT_DIGITS = 450


@lru_cache(maxsize=1)
def _digits() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    from sklearn.datasets import load_digits

    loaded = load_digits()
    order = np.random.default_rng(0).permutation(len(loaded.target))
    return loaded.images[order].astype(np.float32) / 16, loaded.target[order]


def digit_scene(rng: np.random.Generator, held_out: bool, index: int | None = None) -> Scene:
    """Return an enlarged handwritten digit. Training never uses held-out digits."""
    images, labels = _digits()
    split = len(labels) - _HELD_OUT_DIGITS
    low, high = (split, len(labels)) if held_out else (0, split)
    chosen = low + index % (high - low) if index is not None else int(rng.integers(low, high))
    side = float(rng.uniform(48, 56))
    x, y = (float(32 - side / 2 + value) for value in rng.uniform(-2, 2, 2))
    thing = Thing(
        shape=str(labels[chosen]),
        colour=str(rng.choice([*lexicon.COLOURS, "white"])),
        texture="solid",
        box=(x, y, x + side, y + side),
        mark=_enlarge(images[chosen]),
    )
    scene = random_surface(rng, (thing,), "plain")
    return Scene(str(rng.choice(_DARK)), "plain", scene.things, scene.surface_seed)


def _enlarge(image: NDArray[np.float32]) -> Floats:
    """Return an 8x8 digit as a smooth 128x128 opacity map."""
    from PIL import Image

    grey = Image.fromarray((image * 255).astype(np.uint8))
    grey = grey.resize((128, 128), Image.Resampling.BICUBIC)
    return np.clip((np.asarray(grey).astype(np.float32) - 40) / 150, 0, 1)


def glyph_scene(rng: np.random.Generator, glyph: str | None = None) -> Scene:
    """Return a scene with one symbol for which the base has no name."""
    box = place_boxes(rng, 1, 22, 40)[0]
    thing = random_thing(rng, box, (glyph,) if glyph else lexicon.GLYPHS)
    return random_surface(rng, (replace(thing, texture="solid"),))


def crowd_scene(rng: np.random.Generator, count: int | None = None) -> Scene:
    """Return a scene of small objects of one shape, by default more than the base knows."""
    count = count or int(rng.integers(5, 10))
    shape = str(rng.choice(lexicon.SHAPES))
    boxes = [_small_box(rng, cell) for cell in _separate_cells(rng, count)]
    drawn = [random_thing(rng, box, (shape,)) for box in sorted(boxes)]
    return random_surface(rng, tuple(replace(one, texture="solid") for one in drawn), "plain")


def _separate_cells(rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
    while True:
        chosen: list[tuple[int, int]] = []
        for number in rng.permutation(64):
            row, column = divmod(int(number), 8)
            if all(max(abs(row - r), abs(column - c)) > 1 for r, c in chosen):
                chosen.append((row, column))
            if len(chosen) == count:
                return chosen


def _small_box(rng: np.random.Generator, cell: tuple[int, int]) -> Box:
    side = float(rng.uniform(6.4, 7.6))
    x = cell[1] * 8 + 4 - side / 2 + float(rng.uniform(-0.2, 0.2))
    y = cell[0] * 8 + 4 - side / 2 + float(rng.uniform(-0.2, 0.2))
    return (x, y, x + side, y + side)


def surface_scene(rng: np.random.Generator, pattern: str | None = None) -> Scene:
    """Return an empty surface with a pattern for which the base has no name."""
    return random_surface(rng, (), pattern or str(rng.choice(lexicon.NEW_TEXTURES)))


def part_scene(rng: np.random.Generator, defect: str | None, count: int = 1) -> Scene:
    """Return a brushed panel with `count` defects of one kind, or without defects."""
    things: tuple[Thing, ...] = ()
    if defect is not None:
        sides = {"scratch": (18, 32), "stain": (14, 24), "hole": (8, 15)}[defect]
        boxes = place_boxes(rng, count, *sides)
        things = tuple(_defect(rng, defect, box) for box in boxes)
    scene = random_surface(rng, things, "panel")
    surface = str(rng.choice(["gray", "white", "cyan", "pink"]))
    return Scene(surface, "panel", things, scene.surface_seed)


def _defect(rng: np.random.Generator, kind: str, box: Box) -> Thing:
    axis = np.linspace(-1, 1, 96, dtype=np.float32)
    u, v = np.meshgrid(axis, axis)
    if kind == "scratch":
        side = box[2] - box[0]
        height = side * float(rng.uniform(0.5, 1.0))
        box = (box[0], box[1], box[2], box[1] + height)
        lean = u if rng.random() < 0.5 else -u
        bend = float(rng.uniform(-0.2, 0.2))
        inside = np.abs(v - lean - bend * (1 - u * u)) < 4.2 / side + 0.04
        return Thing(kind, "black", "solid", box, inside.astype(np.float32))
    if kind == "stain":
        angle = np.arctan2(v, u)
        edge = np.full(u.shape, 0.85, np.float32)
        for wave in (2, 3, 5):
            edge += float(rng.uniform(-0.1, 0.1)) * np.sin(wave * angle + rng.uniform(0, 6.28))
        return Thing(kind, "brown", "solid", box, (np.hypot(u, v) < edge).astype(np.float32))
    return Thing(kind, "black", "solid", box, (np.hypot(u, v) < 1).astype(np.float32))
