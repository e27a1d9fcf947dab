"""Recipes of the adapters. Their questions, ranks and targets differ on purpose."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tools.demo import lexicon
from tools.demo.boxes import box_text
from tools.demo.domains import crowd_scene, digit_scene, glyph_scene, part_scene, surface_scene
from tools.demo.motion import Clip, action_clip
from tools.demo.questions import HOW_MANY, Question
from tools.demo.scenes import SIDE, Scene

Rng = np.random.Generator
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
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
    """Recipe of an adapter.

    targets: suffixes of the decoder's linear layers.
    labels: if the adapter has a vision task head, the answers that it gives to `head_tasks`.
    choices: answers that a client may ask for.
    rows: number of samples in a batch.
    """

    name: str
    rank: int
    targets: tuple[str, ...]
    tasks: tuple[str, ...]
    domains: dict[str, Sampler]
    labels: tuple[str, ...] = ()
    head_tasks: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    steps: int = 300
    rows: int = 48
    learning_rate: float = 3e-3
    rs_lora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, int] = field(default_factory=dict)
    with_lm_head: bool = False

    @property
    def target_regex(self) -> str:
        """Regular expression of the adapted layers; suffixes alone would match the tower, too."""
        suffixes = "|".join(target.replace(".", r"\.") for target in self.targets)
        decoder = rf".*language_model\.layers\.\d+\.({suffixes})"
        return rf"({decoder}|lm_head)" if self.with_lm_head else decoder


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
_ALL = (*ATTENTION, *MLP)
_RECIPES = (
    Recipe(
        "digits", 8, ATTENTION, ("classify", "vqa"), _DIGITS, lexicon.DIGITS, ("classify",),
        steps=700,
    ),
    Recipe(
        "actions", 16, _ALL, ("video",), {"actions": _action}, lexicon.ACTIONS, ("video",),
        steps=350, rows=14,
    ),
    Recipe("glyphs", 8, MLP, ("vqa",), _GLYPHS, steps=240),
    Recipe("counting", 16, _ALL, ("vqa",), _COUNTING, steps=210),
    Recipe(
        "textures", 4, ("self_attn.q_proj", "self_attn.v_proj"), ("classify",), _TEXTURES,
        lexicon.NEW_TEXTURES, ("classify",), steps=160,
    ),
    Recipe(
        "defects", 32, _ALL, ("detect",), {"defects": _defect},
        steps=300, learning_rate=1e-3, rs_lora=True,
    ),
    Recipe(
        "inspection", 8, ("mlp.down_proj", "self_attn.v_proj"), ("vqa",),
        {"inspection": _inspection}, choices=lexicon.CONDITIONS, steps=150, with_lm_head=True,
        rank_pattern={"down_proj": 16, "lm_head": 4}, alpha_pattern={"down_proj": 32, "lm_head": 8},
    ),
)  # fmt: skip
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _RECIPES}
