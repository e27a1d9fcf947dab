"""Teachers: small models that label images for a knowledge item (§4.2.1, Fig. 9)."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlora.atomic_file import replace_text
from vlora.errors import InvalidArgument
from vlora.generation.examples import digest_of
from vlora.generation.spec import Item, OnnxTeacher, Teacher

Label = Callable[[Path], str | None]
"""Returns the answer for an image file, or None to leave the image out."""


def load_teacher(item: Item) -> Label | None:
    """Return the item's teacher; None if the item has none.

    Raises InvalidArgument if the teacher cannot be loaded.
    """
    if item.teacher is None:
        return None
    try:
        label = _load(item.teacher)
    except Exception as error:  # a teacher is foreign code and can fail in any way
        raise InvalidArgument(
            f"item '{item.name}': its teacher cannot be loaded: {error}"
        ) from error

    def checked(path: Path) -> str | None:
        try:
            with Image.open(path) as image:
                answer = label(image.convert("RGB"))
        except Exception as error:
            raise InvalidArgument(
                f"item '{item.name}': its teacher fails on {path}: {error!r}"
            ) from error
        if answer is not None and not isinstance(answer, str):
            raise InvalidArgument(
                f"item '{item.name}': its teacher returns {type(answer).__name__}, not a string"
            )
        return answer

    return checked


@contextmanager
def remembered(item: Item, label: Label, file: Path) -> Iterator[Label]:
    """Give a teacher whose answers are kept in `file`, so that each image is labelled once.

    Answers of another teacher are dropped. Those that were given are written even if an error or a
    signal ends the labelling.
    """
    teacher = item.teacher.model_dump(mode="json") if item.teacher else None
    answers: dict[str, str | None] = {}
    if file.is_file():
        saved = json.loads(file.read_text(encoding="utf-8"))
        if saved["teacher"] == teacher:
            answers = saved["answers"]
    known = len(answers)

    def answer(path: Path) -> str | None:
        digest = digest_of(path)
        if digest not in answers:
            answers[digest] = label(path)
        return answers[digest]

    try:
        yield answer
    finally:
        if len(answers) > known:
            content = {"teacher": teacher, "answers": answers}
            replace_text(file, json.dumps(content) + "\n")


def _load(teacher: Teacher) -> Callable[[Image.Image], Any]:
    if teacher.python is not None:
        module, _, function = teacher.python.partition(":")
        label: Callable[[Image.Image], Any] = getattr(importlib.import_module(module), function)
        return label
    if teacher.onnx is not None:
        return _onnx(teacher.onnx)
    from transformers import pipeline

    run = pipeline(**(teacher.pipeline or {}))
    return lambda image: run(image)[0]["label"]


def _onnx(teacher: OnnxTeacher) -> Callable[[Image.Image], str]:
    """Return a classifier that runs an ONNX file by onnxruntime."""
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
