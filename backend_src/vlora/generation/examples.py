"""Reading of the examples of knowledge items, and their split into three parts."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vlora.errors import InvalidArgument, shown
from vlora.generation.spec import BOX_TASKS, Item
from vlora.vision.pictures import open_file
from vlora.vision.results import parse_boxes

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})
PLACEHOLDER = "<image>"
BOX_EXAMPLE = "<ref>dog</ref><box>(120,80),(460,900)</box>"
MAX_LEFT_OUT = 0.1  # Share of an item's images that may fail. If more do, the item is refused.
TRAIN, VALIDATION, TEST = "train", "validation", "test"


@dataclass(frozen=True)
class Example:
    """One question about an image, or about a clip with several images as its frames."""

    images: tuple[Path, ...]
    question: str
    answer: str


@dataclass(frozen=True)
class Splits:
    """Examples of one item. Those with equal first images are in the same split."""

    train: tuple[Example, ...]
    validation: tuple[Example, ...]
    test: tuple[Example, ...]


def read_examples(
    item: Item,
    label: Callable[[Path], str | None] | None = None,
    left_out: Callable[[str], None] = lambda _: None,
) -> list[Example]:
    """Return all examples of an item whose images can be read, in a fixed order.

    label: the item's teacher, if any. It returns an image's answer, or None to leave the image out.
    left_out: called with the reason for each image that cannot be read or labelled.

    Raises InvalidArgument, which names the item and the file, for an invalid file, or if too many
    images are left out.
    """
    bad: dict[Path, str] = {}

    def labelled(path: Path) -> str | None:
        try:
            return label(path) if label is not None and path not in bad else None
        except InvalidArgument as error:
            bad[path] = str(error)
            return None

    examples = _all_examples(item, labelled if label is not None else None)
    images = {path for example in examples for path in example.images} | bad.keys()
    for path in sorted(images - bad.keys()):
        if (reason := _unreadable(path)) is not None:
            bad[path] = f"item '{item.name}': {path} cannot be read: {reason}"
    for reason in bad.values():
        left_out(reason)
    if len(bad) > MAX_LEFT_OUT * len(images):
        raise InvalidArgument(
            f"{next(iter(bad.values()))}; {len(bad)} of {len(images)} images fail, and at most"
            f" {MAX_LEFT_OUT:.0%} of them may"
        )
    usable = [example for example in examples if not bad.keys() & set(example.images)]
    _check_answers(item, usable)
    return usable


def _check_answers(item: Item, examples: Sequence[Example]) -> None:
    # A picture without boxes is a valid example of a task that needs boxes.
    if not examples:
        source = item.conversations or item.images
        reason = " that its teacher labels" if item.teacher else ""
        raise InvalidArgument(f"item '{item.name}': {source} has no examples{reason}")
    answers = [example.answer for example in examples]
    if item.task in BOX_TASKS and not any(parse_boxes(answer)[0] for answer in answers):
        raise InvalidArgument(
            f"item '{item.name}': no answer has a box, for example {shown(answers[0])}; task"
            f" '{item.task}' needs answers like {BOX_EXAMPLE}"
        )


def _all_examples(item: Item, label: Callable[[Path], str | None] | None) -> list[Example]:
    if item.conversations is not None:
        return list(_read_conversations(item, item.conversations))
    if label is not None:
        answers = ((path, label(path)) for path in _images_in(item.images))
        return [Example((path,), item.question, a) for path, a in answers if a is not None]
    examples = [
        Example((path,), item.question, folder.name)
        for folder in sorted(path for path in item.images.iterdir() if path.is_dir())
        for path in _images_in(folder)
    ]
    if not examples:
        raise InvalidArgument(
            f"item '{item.name}': {item.images} has no images in folders named by their labels"
        )
    return examples


def split(item: Item, examples: Sequence[Example], shares: Sequence[float], seed: int) -> Splits:
    """Return the examples, split by a hash of the first image's content and the seed.

    Raises InvalidArgument if a split or a label would have no examples.
    """
    ranked = sorted(examples, key=lambda example: _position(example, seed))
    parts: dict[str, list[Example]] = {TRAIN: [], VALIDATION: [], TEST: []}
    for example in ranked[: item.max_examples]:
        position = _position(example, seed + 1)
        later = VALIDATION if position < shares[0] + shares[1] else TEST
        parts[TRAIN if position < shares[0] else later].append(example)
    for name, part in parts.items():
        if not part:
            raise InvalidArgument(
                f"item '{item.name}' has {len(examples)} examples, none of them for {name};"
                " examples are split by a hash of the image, so add more images"
            )
    if item.head or (item.conversations is None and item.teacher is None):
        _check_labels(item, parts)
    return Splits(*(tuple(parts[name]) for name in (TRAIN, VALIDATION, TEST)))


def _check_labels(item: Item, parts: Mapping[str, Sequence[Example]]) -> None:
    counts = Counter(example.answer for part in parts.values() for example in part)
    if len(counts) < 2:
        raise InvalidArgument(
            f"item '{item.name}' has only the label '{next(iter(counts))}'; at least 2 labels are"
            " needed"
        )
    for label in sorted(counts.keys() - {example.answer for example in parts[TRAIN]}):
        raise InvalidArgument(
            f"item '{item.name}': label '{label}' has {counts[label]} examples, none of them for"
            " training; add more images with this label, or remove it"
        )


def _position(example: Example, seed: int) -> float:
    """Return a number in [0, 1) that depends on the first image's content and the seed."""
    digest = hashlib.sha256(f"{seed}:{digest_of(example.images[0])}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


@cache
def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _unreadable(path: Path) -> str | None:
    """Return why a file is not an image; None if it seems to be one. Pixels are not decoded."""
    try:
        with open_file(path) as image:
            image.verify()
    except Exception as error:  # Pillow raises many types of exceptions for damaged files.
        return str(error) or type(error).__name__
    return None


def _images_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)


def _read_conversations(item: Item, file: Path) -> Iterator[Example]:
    for number, record in _records(item, file):
        where = f"item '{item.name}': {file.name}: record {number}"
        images = record.get("image", record.get("images"))
        names = [images] if isinstance(images, str) else images
        turns = record.get("conversations")
        if not names or not isinstance(names, list) or not isinstance(turns, list):
            raise InvalidArgument(f"{where} needs 'image' and 'conversations'")
        paths = tuple(_image(item, where, name) for name in names)
        if not turns or len(turns) % 2:
            raise InvalidArgument(
                f"{where}: the number of turns is {len(turns)}; it must be even and above 0,"
                " because every question needs an answer"
            )
        for human, answer in zip(turns[::2], turns[1::2], strict=True):
            try:
                speakers = human["from"], answer["from"]
                question, text = str(human["value"]), str(answer["value"])
            except (TypeError, KeyError) as error:
                raise InvalidArgument(f"{where} has a turn without {error}") from None
            if speakers != ("human", "gpt"):
                raise InvalidArgument(f"{where} has turns of {speakers}, not of human and gpt")
            if not text.strip():
                raise InvalidArgument(f"{where} has an empty answer")
            yield Example(paths, question.replace(PLACEHOLDER, "").strip(), text.strip())


def _image(item: Item, where: str, name: Any) -> Path:
    path = (item.images / str(name)).resolve()
    if not path.is_relative_to(item.images.resolve()):
        raise InvalidArgument(f"{where} names '{name}', outside {item.images}")
    if not path.is_file():
        raise InvalidArgument(f"{where} names '{name}', which is not in {item.images}")
    return path


def _records(item: Item, file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the records of a JSON list or of JSON lines, numbered from 1."""
    where = f"item '{item.name}': {file}"
    try:
        if file.suffix == ".json":
            records = json.loads(file.read_text(encoding="utf-8"))
        else:
            lines = file.read_text(encoding="utf-8").splitlines()
            records = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{where} cannot be read: {error}") from error
    if not isinstance(records, list):
        raise InvalidArgument(f"{where} must hold a list of conversations")
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict):
            raise InvalidArgument(f"{where}: record {number} is not an object")
        yield number, record
