"""The held-out set: items from a separate seed that training does not use.

A domain of the base has the name of its task. Adapter domains are those of `recipes.py`. The same
domain and number always give the same item. Digits come from a split that training leaves out.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from tools.demo import lexicon
from tools.demo.boxes import parse_boxes
from tools.demo.domains import digit_scene
from tools.demo.motion import FRAMES, base_clip
from tools.demo.questions import VQA_KINDS, Question, ask
from tools.demo.recipes import RECIPES, Sample
from tools.demo.scenes import SIDE, Pixels, base_scene, draw
from vlora.generation.metrics import ENOUGH_OVERLAP, Box, iou

SEED = 7_000_001
BASE_DOMAINS = ("vqa", "caption", "refer", "detect", "classify", "video")
ADAPTER_DOMAINS = tuple(domain for recipe in RECIPES.values() for domain in recipe.domains)
DOMAINS = (*BASE_DOMAINS, *ADAPTER_DOMAINS)


@dataclass(frozen=True)
class Item:
    """One held-out request and its right answer.

    adapter: adapter of the domain.
    images, frames: PNG files of 64x64 pixels.
    boxes: if the question asks for boxes, the true ones in pixels, unrounded.
    kind: skill that the question tests.
    """

    id: str
    domain: str
    adapter: str | None
    task: str
    images: list[bytes]
    frames: list[bytes]
    text: str
    answer: str
    boxes: list[Box] | None
    kind: str


def items(domain: str, n: int, start: int = 0) -> list[Item]:
    """Return items `start` to `start + n - 1` of a domain."""
    return [_item(domain, index) for index in range(start, start + n)]


def is_right(item: Item, text: str) -> bool:
    """Return whether an answer has boxes that match the item's, or equals the expected words."""
    if item.boxes is None:
        return text.strip() == item.answer
    return boxes_match(item.boxes, parse_boxes(text, SIDE))


def boxes_match(wanted: Sequence[Box], found: Sequence[Box]) -> bool:
    """Return whether each expected box has an answered box of its own with IoU >= 0.5, and no
    answered box is left.
    """
    left = list(found)
    for box in wanted:
        best = max(left, key=lambda other: iou(box, other), default=None)
        if best is None or iou(box, best) < ENOUGH_OVERLAP:
            return False
        left.remove(best)
    return not left


def adapter_of(domain: str) -> str | None:
    """Return the adapter of a domain, or None for a domain of the base."""
    return next((name for name, recipe in RECIPES.items() if domain in recipe.domains), None)


def _item(domain: str, index: int) -> Item:
    rng = np.random.default_rng([SEED, DOMAINS.index(domain), index])
    adapter = adapter_of(domain)
    sample = _sample(domain, adapter, index, rng)
    question, scene = sample.question, sample.scene
    boxes = None
    if scene is not None and question.task in ("refer", "detect"):
        names = [(t.shape, t.colour, f"{t.colour} {t.shape}") for t in scene.things]
        pairs = zip(scene.things, names, strict=True)
        boxes = [thing.box for thing, named in pairs if question.text in named]
    times = [float(time) for time in np.linspace(0, 1, FRAMES)]
    return Item(
        id=f"{domain}-{index}",
        domain=domain,
        adapter=adapter,
        task=question.task,
        images=[] if scene is None else [png(draw(scene).pixels)],
        frames=[] if sample.clip is None else [png(frame) for frame in sample.clip.frames(times)],
        text=question.text,
        answer=question.answer,
        boxes=boxes,
        kind=question.kind,
    )


def _sample(domain: str, adapter: str | None, index: int, rng: np.random.Generator) -> Sample:
    if domain.startswith("digits"):
        assert adapter is not None
        scene = digit_scene(rng, held_out=True, index=index)
        asked = RECIPES[adapter].domains[domain](rng, True).question
        return Sample(Question(asked.kind, asked.task, asked.text, scene.things[0].shape), scene)
    if adapter is not None:
        return RECIPES[adapter].domains[domain](rng, True)
    if domain == "video":
        clip = base_clip(rng, lexicon.MOTIONS[index % len(lexicon.MOTIONS)])
        return Sample(Question("motion", "video", "", clip.action), clip=clip)
    kind = VQA_KINDS[index % len(VQA_KINDS)] if domain == "vqa" else domain
    while True:
        scene = base_scene(rng)
        question = ask(kind, scene, rng)
        if question is not None:
            return Sample(question, scene)


def png(pixels: Pixels) -> bytes:
    """Return pixels [n, n, 3] uint8 as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
