"""Scenes of textured shapes on surfaces, drawn together with the position of each object.

Coordinates are pixels of a 64x64 scene, whatever the size of the drawing. A scene is drawn at twice
its size and averaged, so edges are smooth. The same random state gives the same scene.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.demo import lexicon
from vlora.generation.metrics import Box

SIDE = 64
SUPERSAMPLING = 2
DARK = 0.55
"""Factor of an object's colour in the dark parts of its texture."""
SHADE = 50.0
"""Largest change of a surface's colour by its pattern, on the scale 0 to 255."""
Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Thing:
    """An object in a scene.

    box: its bounding box.
    mark: opacity map, for an object without a geometric shape, such as a digit; else None.
    """

    shape: str
    colour: str
    texture: str
    box: Box
    mark: Floats | None = field(default=None, compare=False)

    @property
    def centre(self) -> tuple[float, float]:
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2

    def moved(self, dx: float, dy: float) -> "Thing":
        x1, y1, x2, y2 = self.box
        return replace(self, box=(x1 + dx, y1 + dy, x2 + dx, y2 + dy))


@dataclass(frozen=True)
class Scene:
    """Contents of a picture: a surface (colour and pattern) and objects from left to right.

    surface_seed: seed of the random parts of the pattern.
    phase: shift of textures and patterns in pixels, (x, y).
    """

    surface: str
    pattern: str
    things: tuple[Thing, ...]
    surface_seed: int
    phase: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Drawing:
    """A drawn scene.

    pixels: uint8 [n, n, 3].
    owner: int8 [64, 64], index of the object that covers each pixel of the scene; -1 for none.
    """

    pixels: Pixels
    owner: NDArray[np.int8]


def draw(scene: Scene, size: int = SIDE) -> Drawing:
    """Return a square drawing whose side has `size` pixels, a multiple of 64."""
    side = size * SUPERSAMPLING
    step = SIDE / side
    line = (np.arange(side, dtype=np.float32) + 0.5) * step
    canvas = _draw_surface(scene, line)
    owner = np.full((side, side), -1, np.int8)
    for index in range(len(scene.things)):
        _draw_thing(canvas, owner, scene, index, line)
    averaged = canvas.reshape(size, SUPERSAMPLING, size, SUPERSAMPLING, 3).mean((1, 3))
    stride = side // SIDE
    return Drawing(np.clip(averaged + 0.5, 0, 255).astype(np.uint8), owner[::stride, ::stride])


def _draw_surface(scene: Scene, line: Floats) -> Floats:
    colour = np.array(lexicon.BACKGROUNDS[scene.surface], np.float32)
    canvas = np.tile(colour, (line.size, line.size, 1))
    if scene.pattern == "plain":
        return canvas
    rng = np.random.default_rng(scene.surface_seed)
    x, y = np.meshgrid(line + scene.phase[0] % 1, line)
    if scene.pattern not in ("gradient", "grainy", "panel", "ripples"):
        x, y = x + scene.phase[0], y + scene.phase[1]
    shade = surface_shade(scene.pattern, x, y, rng)[..., None]
    towards = SHADE if colour.mean() < 90 else -SHADE
    return np.clip(canvas + towards * shade, 0, 255)


def _draw_thing(
    canvas: Floats, owner: NDArray[np.int8], scene: Scene, index: int, line: Floats
) -> None:
    thing = scene.things[index]
    x1, y1, x2, y2 = thing.box
    columns = np.flatnonzero((line >= x1) & (line <= x2))
    rows = np.flatnonzero((line >= y1) & (line <= y2))
    if columns.size == 0 or rows.size == 0:
        return
    window = np.s_[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    x, y = np.meshgrid(line[columns], line[rows])
    u = (x - x1) / (x2 - x1) * 2 - 1
    v = (y - y1) / (y2 - y1) * 2 - 1
    opacity = opacity_of(thing, u, v)[..., None]
    rgb = lexicon.COLOURS.get(thing.colour) or lexicon.BACKGROUNDS[thing.colour]
    colour = np.array(rgb, np.float32)
    dark = dark_parts(thing.texture, x + scene.phase[0], y + scene.phase[1])
    shaded = np.where(dark[..., None], colour * DARK, colour)
    canvas[window] = canvas[window] * (1 - opacity) + shaded * opacity
    owner[window][opacity[..., 0] > 0.4] = index


def opacity_of(thing: Thing, u: Floats, v: Floats) -> Floats:
    """Return an object's opacity (0 to 1) at points u, v, which are -1 to 1 within its box."""
    if thing.mark is None:
        return OUTLINES[thing.shape](u, v).astype(np.float32)
    height, width = thing.mark.shape
    rows = np.clip(((v + 1) / 2 * height).astype(int), 0, height - 1)
    columns = np.clip(((u + 1) / 2 * width).astype(int), 0, width - 1)
    sampled: Floats = thing.mark[rows, columns]
    return sampled


def place_boxes(
    rng: np.random.Generator, count: int, smallest: float, largest: float, gap: float = 2.0
) -> list[Box]:
    """Return `count` square boxes from left to right, with sides and gaps in these limits."""
    while True:
        boxes: list[Box] = []
        for _ in range(count * 30):
            if len(boxes) == count:
                break
            side = float(rng.uniform(smallest, largest))
            x, y = (float(value) for value in rng.uniform(1, SIDE - 1 - side, 2))
            box = (x, y, x + side, y + side)
            if all(_are_separate(box, other, gap) for other in boxes):
                boxes.append(box)
        if len(boxes) == count:
            return sorted(boxes)
        largest = max(smallest, largest - 1)


def _are_separate(a: Box, b: Box, gap: float) -> bool:
    return a[2] + gap <= b[0] or b[2] + gap <= a[0] or a[3] + gap <= b[1] or b[3] + gap <= a[1]


def random_surface(
    rng: np.random.Generator, things: tuple[Thing, ...], pattern: str | None = None
) -> Scene:
    """Return a scene on a surface of random colour and, by default, of a pattern of the base."""
    return Scene(
        surface=str(rng.choice(list(lexicon.BACKGROUNDS))),
        pattern=pattern or str(rng.choice(lexicon.CATEGORIES)),
        things=things,
        surface_seed=int(rng.integers(1 << 31)),
        phase=(int(rng.integers(48)), int(rng.integers(48))),
    )


# Smallest and largest side of an object, by the number of objects.
_SIZES = {0: (16, 28), 1: (16, 28), 2: (16, 28), 3: (15, 24), 4: (14, 21)}


def base_scene(rng: np.random.Generator, count: int | None = None) -> Scene:
    """Return a training scene of the base with `count` objects; by default 0 to 4, rarely 0."""
    if count is None:
        count = int(rng.choice(5, p=[0.06, 0.22, 0.26, 0.24, 0.22]))
    boxes = place_boxes(rng, count, *_SIZES[count])
    return random_surface(rng, tuple(random_thing(rng, box, lexicon.SHAPES) for box in boxes))


def random_thing(rng: np.random.Generator, box: Box, shapes: tuple[str, ...]) -> Thing:
    """Return an object of random shape, colour and texture in a box."""
    return Thing(
        shape=str(rng.choice(shapes)),
        colour=str(rng.choice(list(lexicon.COLOURS))),
        texture=str(rng.choice(lexicon.TEXTURES)),
        box=box,
    )


# Outlines and fills. u, v are in [-1, 1] over an object's box, where v grows downwards; x, y are in
# pixels of the scene.


def _star(u: Floats, v: Floats) -> Mask:
    v = v + 0.08
    angle = np.arctan2(u, -v) / (2 * np.pi / 5)
    to_tip = np.abs(angle - np.round(angle)) * 2
    half, inner = np.pi / 5, 0.45
    height, rise = inner * np.sin(half), 1 - inner * np.cos(half)
    edge = height / (height * np.cos(to_tip * half) + rise * np.sin(to_tip * half))
    return np.hypot(u, v) <= edge * 1.05


def _heart(u: Floats, v: Floats) -> Mask:
    x, y = u * 1.15, -v * 1.12 + 0.12
    return (x * x + y * y - 1) ** 3 - x * x * y * y * y <= 0


def _arrow(u: Floats, v: Floats) -> Mask:
    shaft = (np.abs(v) <= 0.3) & (u <= 0.1)
    head = (u >= 0) & (np.abs(v) <= 0.95 * (1 - u))
    return shaft | head


def _bolt(u: Floats, v: Floats) -> Mask:
    upper = (v <= 0.15) & (np.abs(u + 0.1 + 0.6 * v) <= 0.42)
    lower = (v >= -0.15) & (np.abs(u - 0.1 + 0.6 * v) <= 0.42 * (1.1 - v))
    return upper | lower


OUTLINES: dict[str, Callable[[Floats, Floats], Mask]] = {
    "circle": lambda u, v: u * u + v * v <= 1,
    "square": lambda u, v: np.maximum(np.abs(u), np.abs(v)) <= 0.95,
    "triangle": lambda u, v: (np.abs(u) <= (v + 1) / 2) & (v <= 0.95),
    "star": _star,
    "cross": lambda u, v: np.minimum(np.abs(u), np.abs(v)) <= 0.32,
    "heart": _heart,
    "arrow": _arrow,
    "crescent": lambda u, v: (u * u + v * v <= 1) & ((u - 0.5) ** 2 + v * v > 0.6),
    "ring": lambda u, v: (u * u + v * v <= 1) & (u * u + v * v > 0.3),
    "hourglass": lambda u, v: np.abs(u) <= np.abs(v) * 0.95 + 0.05,
    "hook": lambda u, v: (u <= -0.4) | (v >= 0.4),
    "bolt": _bolt,
    "ladder": lambda u, v: (np.abs(u) >= 0.55) | (np.abs((v * 2.5 + 0.5) % 1 - 0.5) >= 0.3),
    "comb": lambda u, v: (v <= -0.4) | (np.abs((u * 2.0) % 1 - 0.5) >= 0.24),
}


def dark_parts(texture: str, x: Floats, y: Floats) -> Mask:
    """Return a mask of the darker parts of an object with this texture."""
    if texture == "striped":
        return (x + y) % 6 < 3
    if texture == "dotted":
        return (x % 6 - 3) ** 2 + (y % 6 - 3) ** 2 < 3.6
    if texture == "checkered":
        return (x // 4 + y // 4) % 2 < 1
    return np.zeros(x.shape, np.bool_)


def surface_shade(pattern: str, x: Floats, y: Floats, rng: np.random.Generator) -> Floats:
    """Return how far a surface departs from its colour at each point: 0 not at all, 1 most."""
    return np.asarray(_SHADES[pattern](x, y, rng), np.float32)


def _repeat(grid: Floats, x: Floats) -> Floats:
    """Return a 64x64 grid enlarged to the size of x by an integer factor."""
    times = len(x) // 64
    return grid.repeat(times, 0).repeat(times, 1)


def _spots(rng: np.random.Generator) -> Floats:
    return np.kron(rng.random((22, 22)) < 0.25, np.ones((3, 3)))[:64, :64]


def _scales(x: Floats, y: Floats) -> Mask:
    column = (x + 6 * (y // 8 % 2)) % 12 - 6
    return np.abs(np.hypot(column, y % 8) - 6) < 1.1


_SHADES: dict[str, Callable[[Floats, Floats, np.random.Generator], Any]] = {
    "gradient": lambda x, y, rng: y / 64,
    "grainy": lambda x, y, rng: _repeat(rng.random((64, 64), np.float32), x),
    "tiled": lambda x, y, rng: (x % 10 < 1.5) | (y % 10 < 1.5),
    "zigzag": lambda x, y, rng: (y + np.abs(x % 16 - 8)) % 8 < 3.5,
    "bricks": lambda x, y, rng: (y % 8 < 1.5) | ((x + 8 * (y // 8 % 2)) % 16 < 1.5),
    "ripples": lambda x, y, rng: np.hypot(x - 32, y - 32) % 9 < 4,
    "speckled": lambda x, y, rng: _repeat(_spots(rng), x),
    "crosshatch": lambda x, y, rng: ((x + y) % 9 < 2) | ((x - y) % 9 < 2),
    "scales": lambda x, y, rng: _scales(x, y),
    "panel": lambda x, y, rng: (
        _repeat(np.repeat(rng.random((64, 4), np.float32), 16, axis=1), x) * np.float32(0.35)
    ),
}
