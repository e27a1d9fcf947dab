"""Questions about scenes of the base, and their right answers."""

import itertools
from collections import Counter
from dataclasses import dataclass

import numpy as np

from tools.demo import lexicon
from tools.demo.boxes import box_text
from tools.demo.scenes import SIDE, Scene, Thing

Rng = np.random.Generator


@dataclass(frozen=True)
class Question:
    """One question of a task. `kind` names the skill for the tables of accuracies."""

    kind: str
    task: str
    text: str
    answer: str


HOW_MANY = "How many objects are there in the picture?"
WHAT_BACKGROUND = "What is the background color?"
VQA_KINDS = ("colour", "shape", "texture", "background", "count", "count some", "exists")


def ask(kind: str, scene: Scene, rng: Rng) -> Question | None:
    """Return a question of this kind about the scene, or None if the scene allows none."""
    if kind == "background":
        return Question(kind, "vqa", WHAT_BACKGROUND, scene.surface)
    if kind == "count":
        return Question(kind, "vqa", HOW_MANY, str(len(scene.things)))
    if kind == "classify":
        return Question(kind, "classify", "", scene.pattern)
    if kind == "caption":
        return Question(kind, "caption", "", caption(scene))
    return _ASKERS[kind](scene, rng)


def caption(scene: Scene) -> str:
    """Return the canonical caption: objects from left to right, then the background."""
    names = [f"a {thing.colour} {thing.shape}" for thing in scene.things]
    names = [name.replace("a orange", "an orange") for name in names]
    if not names:
        return f"an empty {scene.surface} background"
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{listed} on a {scene.surface} background"


def _pick(rng: Rng, options: list[Thing]) -> Thing | None:
    return options[int(rng.integers(len(options)))] if options else None


def _unique(scene: Scene, attribute: str) -> list[Thing]:
    """Return the objects whose value of this attribute no other object has."""
    seen = Counter(getattr(thing, attribute) for thing in scene.things)
    return [thing for thing in scene.things if seen[getattr(thing, attribute)] == 1]


def _colour(scene: Scene, rng: Rng) -> Question | None:
    thing = _pick(rng, _unique(scene, "shape"))
    return thing and Question("colour", "vqa", f"What color is the {thing.shape}?", thing.colour)


def _shape(scene: Scene, rng: Rng) -> Question | None:
    thing = _pick(rng, _unique(scene, "colour"))
    text = "What shape is the {} object?"
    return thing and Question("shape", "vqa", text.format(thing.colour), thing.shape)


def _texture(scene: Scene, rng: Rng) -> Question | None:
    by_shape = rng.random() < 0.5
    thing = _pick(rng, _unique(scene, "shape" if by_shape else "colour"))
    if thing is None:
        return None
    name = thing.shape if by_shape else f"{thing.colour} object"
    return Question("texture", "vqa", f"What texture is the {name}?", thing.texture)


def _count_some(scene: Scene, rng: Rng) -> Question:
    shown = _pick(rng, list(scene.things)) if rng.random() < 0.75 else None
    if rng.random() < 0.5:
        shape = shown.shape if shown else str(rng.choice(lexicon.SHAPES))
        number = sum(thing.shape == shape for thing in scene.things)
        name = lexicon.plural(shape)
    else:
        colour = shown.colour if shown else str(rng.choice(list(lexicon.COLOURS)))
        number = sum(thing.colour == colour for thing in scene.things)
        name = f"{colour} objects"
    return Question("count some", "vqa", f"How many {name} are there in the picture?", str(number))


def _exists(scene: Scene, rng: Rng) -> Question:
    shown = _pick(rng, list(scene.things))
    present = {(thing.colour, thing.shape) for thing in scene.things}
    named = rng.random() < 0.5
    if shown and rng.random() < 0.5:
        wanted = (shown.colour, shown.shape)
    else:
        pairs = itertools.product(lexicon.COLOURS, lexicon.SHAPES)
        absent = [pair for pair in pairs if pair not in present]
        # An absent object often differs from a present one in only one attribute.
        if shown and named and rng.random() < 0.6:
            absent = [pair for pair in absent if shown.colour == pair[0] or shown.shape == pair[1]]
        elif not named:
            shapes = {shape for _, shape in present}
            absent = [pair for pair in absent if pair[1] not in shapes]
        wanted = absent[int(rng.integers(len(absent)))]
    name = f"{wanted[0]} {wanted[1]}" if named else wanted[1]
    found = wanted in present if named else any(shape == wanted[1] for _, shape in present)
    text = f"Is there {'an' if name.startswith('orange') else 'a'} {name} in the picture?"
    return Question("exists", "vqa", text, "yes" if found else "no")


def _refer(scene: Scene, rng: Rng) -> Question | None:
    seen = Counter((thing.colour, thing.shape) for thing in scene.things)
    thing = _pick(rng, [t for t in scene.things if seen[(t.colour, t.shape)] == 1])
    if thing is None:
        return None
    name = f"{thing.colour} {thing.shape}"
    return Question("refer", "refer", name, box_text(name, [thing.box], SIDE))


def _detect(scene: Scene, rng: Rng) -> Question:
    # For one question in eight, the scene has no such object.
    shown = _pick(rng, list(scene.things)) if rng.random() < 0.875 else None
    attribute, names = ("shape", lexicon.SHAPES)
    if rng.random() < 0.4:
        attribute, names = "colour", tuple(lexicon.COLOURS)
    name = str(getattr(shown, attribute)) if shown else str(rng.choice(names))
    found = [thing.box for thing in scene.things if getattr(thing, attribute) == name]
    return Question("detect", "detect", name, box_text(name, found, SIDE) if found else "none")


_ASKERS = {
    "colour": _colour, "shape": _shape, "texture": _texture, "count some": _count_some,
    "exists": _exists, "refer": _refer, "detect": _detect,
}  # fmt: skip
# Mean number of training questions per scene, by kind.
_QUESTIONS_PER_SCENE: dict[str, float] = {
    "colour": 1.0, "shape": 0.7, "texture": 2.5, "background": 0.2, "classify": 0.2, "count": 0.5,
    "count some": 1.2, "exists": 0.8, "refer": 1.2, "detect": 0.8, "caption": 0.6,
}  # fmt: skip


def training_questions(scene: Scene, rng: Rng) -> list[Question]:
    """Return about nine different questions about a scene, in the proportions of training."""
    asked: dict[tuple[str, str], Question] = {}
    for kind, mean in _QUESTIONS_PER_SCENE.items():
        for _ in range(int(mean + rng.random())):
            if (question := ask(kind, scene, rng)) is not None:
                asked[(question.task, question.text)] = question
    return list(asked.values())
