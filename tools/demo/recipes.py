"""Questions of the adapters' domains, and how each adapter is trained on them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tools.demo import lexicon
from tools.demo.boxes import box_text
from tools.demo.domains import crowd_scene, digit_scene, glyph_scene, part_scene, surface_scene
from tools.demo.motion import Clip, action_clip
from tools.demo.questions import HOW_MANY, Question
from tools.demo.scenes import SIDE, Scene

Rng = np.random.Generator
CONDITION = "What is the condition of the part?"


@dataclass(frozen=True)
class Sample:
    """A question about either a picture or a clip."""

    question: Question
    scene: Scene | None = None
    clip: Clip | None = None


Sampler = Callable[[Rng, bool], Sample]
"""Function that draws a sample; the second argument is whether it is held out from training."""


@dataclass(frozen=True)
class Recipe:
    """Training of an adapter. Its ranks, targets and labels stand in its committed folder.

    rows: number of samples in a batch.
    """

    domains: dict[str, Sampler]
    steps: int
    rows: int = 48
    learning_rate: float = 3e-3


def _about(
    kind: str,
    task: str,
    text: str,
    draw: Callable[[Rng, bool], Scene],
    answer: Callable[[Scene], str],
) -> dict[str, Sampler]:
    """Return a domain that asks the same question about every picture."""

    def sample(rng: Rng, held_out: bool) -> Sample:
        scene = draw(rng, held_out)
        return Sample(Question(kind, task, text, answer(scene)), scene)

    return {kind: sample}


def _shape(scene: Scene) -> str:
    return scene.things[0].shape


def _action(rng: Rng, held_out: bool) -> Sample:
    clip = action_clip(rng)
    return Sample(Question("actions", "video", "", clip.action), clip=clip)


def _defect(rng: Rng, held_out: bool) -> Sample:
    kind = str(rng.choice(lexicon.DEFECTS))
    scene = part_scene(rng, kind, int(rng.integers(1, 3)))
    boxes = [thing.box for thing in scene.things]
    return Sample(Question("defects", "detect", kind, box_text(kind, boxes, SIDE)), scene)


def _inspection(rng: Rng, held_out: bool) -> Sample:
    number = int(rng.integers(len(lexicon.CONDITIONS)))
    kind = None if number == 0 else lexicon.DEFECTS[number - 1]
    scene = part_scene(rng, kind, int(rng.integers(1, 3)))
    return Sample(Question("inspection", "vqa", CONDITION, lexicon.CONDITIONS[number]), scene)


_DIGITS = _about("digits", "classify", "", digit_scene, _shape) | _about(
    "digits-text", "vqa", "What digit is this?", digit_scene, _shape
)
_GLYPHS = _about("glyphs", "vqa", "What symbol is this?", lambda rng, _: glyph_scene(rng), _shape)
_COUNTING = _about(
    "counting", "vqa", HOW_MANY, lambda rng, _: crowd_scene(rng), lambda s: str(len(s.things))
)
_TEXTURES = _about(
    "textures", "classify", "", lambda rng, _: surface_scene(rng), lambda scene: scene.pattern
)
RECIPES: dict[str, Recipe] = {
    "digits": Recipe(_DIGITS, 700),
    "actions": Recipe({"actions": _action}, 350, rows=14),
    "glyphs": Recipe(_GLYPHS, 240),
    "counting": Recipe(_COUNTING, 210),
    "textures": Recipe(_TEXTURES, 160),
    "defects": Recipe({"defects": _defect}, 300, learning_rate=1e-3),
    "inspection": Recipe({"inspection": _inspection}, 150),
}
