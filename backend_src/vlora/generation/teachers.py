"""Teachers: small models that label images for a knowledge item (§4.2.1, Fig. 9)."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlora.atomic_file import replace_text
from vlora.errors import InvalidArgument, shown
from vlora.generation.examples import Example, digest_of
from vlora.generation.metrics import METRICS
from vlora.generation.spec import Item, OnnxTeacher, Teacher
from vlora.vision.pictures import open_file

SAVE_EVERY = 50  # Number of new answers after which they are written to the file.

# Function that returns the answer for an image file, or None to leave the image out.
Label = Callable[[Path], str | None]


def load_teacher(item: Item) -> Label | None:
    """Return the item's teacher, if it has one. Raises InvalidArgument if it cannot be loaded."""
    if item.teacher is None:
        return None
    its_teacher = f"item '{item.name}': its teacher"
    try:
        label = _load(item.teacher)
    except ModuleNotFoundError as error:
        raise InvalidArgument(
            f"{its_teacher} cannot be loaded: it needs the module '{error.name}',"
            " which is not installed or not in PYTHONPATH"
        ) from error
    except Exception as error:  # A teacher is foreign code and can fail in any way.
        raise InvalidArgument(f"{its_teacher} cannot be loaded: {error}") from error

    def checked(path: Path) -> str | None:
        try:
            with open_file(path) as image:
                answer = label(image.convert("RGB"))
        except Exception as error:
            raise InvalidArgument(f"{its_teacher} fails on {path}: {error!r}") from error
        if answer is not None and not isinstance(answer, str):
            raise InvalidArgument(
                f"{its_teacher} returns {shown(answer)} for {path}; it must return a string or None"
            )
        return answer

    return checked


@contextmanager
def remembered(
    item: Item, label: Label, file: Path, status: Callable[[str], None] = lambda _: None
) -> Iterator[Label]:
    """Yield a label function that labels each image only once, and stores the answers in `file`.

    Stored answers of another teacher are dropped. The file is also written after an error.
    """
    teacher = item.teacher.model_dump(mode="json") if item.teacher else None
    answers: dict[str, str | None] = {}
    if file.is_file():
        saved = json.loads(file.read_text(encoding="utf-8"))
        if saved["teacher"] == teacher:
            answers = saved["answers"]
    known = len(answers)

    def save() -> None:
        replace_text(file, json.dumps({"teacher": teacher, "answers": answers}) + "\n")

    def answer(path: Path) -> str | None:
        digest = digest_of(path)
        if digest not in answers:
            status(f"the teacher of {item.name} labels image {len(answers) - known + 1}")
            answers[digest] = label(path)
            if (len(answers) - known) % SAVE_EVERY == 0:
                save()
        return answers[digest]

    try:
        yield answer
    finally:
        if len(answers) > known:
            save()


def read_truth(item: Item) -> dict[Path, str]:
    """Return the right answer by image, from the item's `truth`. Raises InvalidArgument."""
    if item.truth is None:
        return {}
    try:
        truth = json.loads(item.truth.read_text(encoding="utf-8"))
        return {item.images / name: str(answer) for name, answer in truth.items()}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise InvalidArgument(
            f"item '{item.name}': {item.truth} is not a JSON object of answers by image file:"
            f" {error}"
        ) from error


def teacher_score(
    item: Item, examples: Sequence[Example], truth: Mapping[Path, str]
) -> float | None:
    """Return the teacher's accuracy on the examples with a known truth; None if there are none."""
    known = [one for one in examples if one.images[0] in truth]
    if not known:
        return None
    answers = [one.answer for one in known]
    return METRICS[item.metric](answers, [truth[one.images[0]] for one in known])


def _load(teacher: Teacher) -> Callable[[Image.Image], Any]:
    if teacher.python is not None:
        module, _, function = teacher.python.partition(":")
        label: Callable[[Image.Image], Any] = getattr(importlib.import_module(module), function)
        if not callable(label):
            raise TypeError(f"{teacher.python} is not a function but {shown(label)}")
        return label
    if teacher.onnx is not None:
        return _onnx(teacher.onnx)
    from transformers import pipeline

    run = pipeline(**(teacher.pipeline or {}))
    return lambda image: run(image)[0]["label"]


def _onnx(teacher: OnnxTeacher) -> Callable[[Image.Image], str]:
    import onnxruntime

    session = onnxruntime.InferenceSession(
        str(teacher.file), providers=onnxruntime.get_available_providers()
    )
    (wanted,) = session.get_inputs()

    def label(image: Image.Image) -> str:
        resized = image.resize((teacher.size, teacher.size), Image.Resampling.BILINEAR)
        pixels = np.asarray(resized, np.float32) / 255
        pixels = (pixels - np.array(teacher.mean, np.float32)) / np.array(teacher.std, np.float32)
        scores = session.run(None, {wanted.name: pixels.transpose(2, 0, 1)[None]})[0][0]
        return teacher.labels[int(np.argmax(scores))]

    return label
