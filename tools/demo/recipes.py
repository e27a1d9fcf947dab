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


@dataclass(frozen=True)
class Sample:
    """A picture or clip of a domain with a question about it.

    Exactly one of `scene` (a picture) and `clip` is set.
    """

    question: Question
    scene: Scene | None = None
    clip: Clip | None = None


@dataclass(frozen=True)
class Recipe:
    """Recipe of an adapter. `targets` are suffixes of the decoder's linear layers.

    `domains` maps a domain's name to a function that draws a Sample. Its arguments are a random
    generator, and whether the sample is held out from training. An adapter with a head answers
    `head_tasks` with one of `labels`.
    """

    name: str
    rank: int
    targets: tuple[str, ...]
    tasks: tuple[str, ...]
    domains: dict[str, Callable[[Rng, bool], Sample]]
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
        """Regular expression of the names of the adapted decoder layers.

        The suffixes alone would match layers of the tower, too.
        """
        suffixes = "|".join(target.replace(".", r"\.") for target in self.targets)
        decoder = rf".*language_model\.layers\.\d+\.({suffixes})"
        return rf"({decoder}|lm_head)" if self.with_lm_head else decoder


def _digit(rng: Rng, held_out: bool) -> Sample:
    scene = digit_scene(rng, held_out)
    return Sample(Question("digits", "classify", "", scene.things[0].shape), scene)


def _digit_in_words(rng: Rng, held_out: bool) -> Sample:
    scene = digit_scene(rng, held_out)
    return Sample(
        Question("digits-text", "vqa", "What digit is this?", scene.things[0].shape), scene
    )


def _action(rng: Rng, held_out: bool) -> Sample:
    clip = action_clip(rng)
    return Sample(Question("actions", "video", "", clip.action), clip=clip)


def _glyph(rng: Rng, held_out: bool) -> Sample:
    scene = glyph_scene(rng)
    return Sample(Question("glyphs", "vqa", "What symbol is this?", scene.things[0].shape), scene)


def _crowd(rng: Rng, held_out: bool) -> Sample:
    scene = crowd_scene(rng)
    return Sample(Question("counting", "vqa", HOW_MANY, str(len(scene.things))), scene)


def _surface(rng: Rng, held_out: bool) -> Sample:
    scene = surface_scene(rng)
    return Sample(Question("textures", "classify", "", scene.pattern), scene)


def _defect(rng: Rng, held_out: bool) -> Sample:
    kind = str(rng.choice(lexicon.DEFECTS))
    scene = part_scene(rng, kind, int(rng.integers(1, 3)))
    boxes = [thing.box for thing in scene.things]
    return Sample(Question("defects", "detect", kind, box_text(kind, boxes, SIDE)), scene)


def _inspection(rng: Rng, held_out: bool) -> Sample:
    number = int(rng.integers(len(lexicon.CONDITIONS)))
    kind = None if number == 0 else lexicon.DEFECTS[number - 1]
    scene = part_scene(rng, kind, int(rng.integers(1, 3)))
    question = "What is the condition of the part?"
    return Sample(Question("inspection", "vqa", question, lexicon.CONDITIONS[number]), scene)


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "digits",
            8,
            ATTENTION,
            ("classify", "vqa"),
            {"digits": _digit, "digits-text": _digit_in_words},
            labels=lexicon.DIGITS,
            head_tasks=("classify",),
            steps=700,
        ),
        Recipe(
            "actions",
            16,
            (*ATTENTION, *MLP),
            ("video",),
            {"actions": _action},
            labels=lexicon.ACTIONS,
            head_tasks=("video",),
            steps=350,
            rows=14,
            learning_rate=3e-3,
        ),
        Recipe("glyphs", 8, MLP, ("vqa",), {"glyphs": _glyph}, steps=240),
        Recipe(
            "counting",
            16,
            (*ATTENTION, *MLP),
            ("vqa",),
            {"counting": _crowd},
            steps=210,
            learning_rate=3e-3,
        ),
        Recipe(
            "textures",
            4,
            ("self_attn.q_proj", "self_attn.v_proj"),
            ("classify",),
            {"textures": _surface},
            labels=lexicon.NEW_TEXTURES,
            head_tasks=("classify",),
            steps=160,
        ),
        Recipe(
            "defects",
            32,
            (*ATTENTION, *MLP),
            ("detect",),
            {"defects": _defect},
            rs_lora=True,
            steps=300,
            learning_rate=1e-3,
        ),
        Recipe(
            "inspection",
            8,
            ("mlp.down_proj", "self_attn.v_proj"),
            ("vqa",),
            {"inspection": _inspection},
            choices=lexicon.CONDITIONS,
            rank_pattern={"down_proj": 16, "lm_head": 4},
            alpha_pattern={"down_proj": 32, "lm_head": 8},
            with_lm_head=True,
            steps=150,
        ),
    )
}
