"""Outlines and fills of shapes, as functions that return masks.

u, v are in [-1, 1] over the object's box, where v grows downwards; x, y are in pixels of the
64-pixel scene.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]
Outline = Callable[[Floats, Floats], Mask]


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


OUTLINES: dict[str, Outline] = {
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
    """Return how far a surface departs from its colour at each point: 0 not at all, 1 most.

    `x` and `y` are a square grid. Grainy surfaces draw one value for each pixel of the scene.
    """
    side = x.shape[0]
    shade: Floats = np.zeros(x.shape, np.float32)
    if pattern == "gradient":
        shade = y / 64
    elif pattern == "grainy":
        grains = rng.random((64, 64), np.float32)
        shade = _repeat(grains, side)
    elif pattern == "tiled":
        shade = ((x % 10 < 1.5) | (y % 10 < 1.5)).astype(np.float32)
    elif pattern == "zigzag":
        shade = ((y + np.abs(x % 16 - 8)) % 8 < 3.5).astype(np.float32)
    elif pattern == "bricks":
        shifted = x + 8 * (y // 8 % 2)
        shade = ((y % 8 < 1.5) | (shifted % 16 < 1.5)).astype(np.float32)
    elif pattern == "ripples":
        shade = (np.hypot(x - 32, y - 32) % 9 < 4).astype(np.float32)
    elif pattern == "speckled":
        spots = np.kron(rng.random((22, 22)) < 0.25, np.ones((3, 3)))[:64, :64]
        shade = _repeat(spots.astype(np.float32), side)
    elif pattern == "crosshatch":
        shade = (((x + y) % 9 < 2) | ((x - y) % 9 < 2)).astype(np.float32)
    elif pattern == "scales":
        column = (x + 6 * (y // 8 % 2)) % 12 - 6
        shade = (np.abs(np.hypot(column, y % 8) - 6) < 1.1).astype(np.float32)
    elif pattern == "panel":
        brushed = np.repeat(rng.random((64, 4), np.float32), 16, axis=1)
        shade = _repeat(brushed, side) * 0.35
    return shade


def _repeat(grid: Floats, side: int) -> Floats:
    """Return a 64x64 grid enlarged to side x side by an integer factor."""
    times = side // 64
    return grid.repeat(times, 0).repeat(times, 1)
