"""All names of the demo: objects in the pictures, and words of questions and answers.

The checkpoint is trained on the base names. Each adapter name belongs to one adapter's domain: the
tokenizer has a token for it, but the base is not trained on it.
"""

from collections.abc import Iterable

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (222, 38, 38),
    "green": (36, 166, 52),
    "blue": (38, 72, 222),
    "yellow": (240, 222, 40),
    "purple": (138, 40, 176),
    "orange": (246, 138, 24),
}
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (244, 244, 244),
    "black": (18, 18, 18),
    "gray": (128, 128, 128),
    "brown": (112, 72, 40),
    "pink": (250, 182, 204),
    "cyan": (140, 230, 236),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "heart")
TEXTURES = ("solid", "striped", "dotted", "checkered")
CATEGORIES = ("plain", "gradient", "grainy", "tiled")
DIRECTIONS = ("left", "right", "up", "down")
MOTIONS = (*(f"moving {direction}" for direction in DIRECTIONS), "standing still")

GLYPHS = ("arrow", "crescent", "ring", "hourglass", "hook", "bolt", "ladder", "comb")
NEW_TEXTURES = ("zigzag", "bricks", "ripples", "speckled", "crosshatch", "scales")
ACTIONS = ("growing", "shrinking", "blinking", "bouncing", "shaking", "recoloring")
DEFECTS = ("scratch", "stain", "hole")
CONDITIONS = ("good", "scratched", "stained", "punctured")
DIGITS = tuple(str(digit) for digit in range(10))


def plural(shape: str) -> str:
    """Return the plural of a shape's name."""
    return f"{shape}es" if shape.endswith("s") else f"{shape}s"


def all_words() -> list[str]:
    """Return every word that an answer may contain, for the base and all adapters."""
    others = ("moving", "standing", "still", "yes", "no", "none", "and", "on", "a", "background")
    groups: tuple[Iterable[str], ...] = (
        COLOURS, BACKGROUNDS, SHAPES, TEXTURES, CATEGORIES, DIRECTIONS, GLYPHS, NEW_TEXTURES,
        ACTIONS, DEFECTS, CONDITIONS, DIGITS, others,
    )  # fmt: skip
    return [word for group in groups for word in group]
