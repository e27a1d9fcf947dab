"""Tests of reading, labelling and splitting the examples of knowledge items."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.support.knowledge import item_of, write_images
from vlora.errors import InvalidArgument
from vlora.generation.examples import Example, read_examples, split
from vlora.generation.spec import Teacher
from vlora.generation.teachers import (
    SAVE_EVERY,
    load_teacher,
    read_truth,
    remembered,
    teacher_score,
)

NOT_A_FUNCTION = 3


def brightness(image: Image.Image) -> str | None:
    """Label an image: the teacher of these tests."""
    value = image.getpixel((0, 0))
    assert isinstance(value, tuple)
    return None if value[0] == 99 else ("light" if value[0] > 127 else "dark")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a folder with 60 images of two labels and a base folder."""
    write_images(tmp_path)
    return tmp_path


def test_labels_that_cannot_be_learned_are_reported(data: Path) -> None:
    item = item_of(data)
    examples = read_examples(item)
    zeros = [one for one in examples if one.answer == "0"]
    with pytest.raises(InvalidArgument, match="has only the label '0'; at least 2 labels"):
        split(item, zeros, (0.6, 0.2, 0.2), seed=0)
    held_out = split(item, examples, (0.6, 0.2, 0.2), seed=0).test[0]
    rare = Example(held_out.images, held_out.question, "rare")
    with pytest.raises(InvalidArgument, match="label 'rare' has 1 examples, none of them for"):
        split(item, [*examples, rare], (0.6, 0.2, 0.2), seed=0)


def test_no_image_is_in_two_splits(data: Path) -> None:
    item = item_of(data)
    examples = read_examples(item)
    copies = [Example(one.images, "another question", one.answer) for one in examples]
    parts = split(item, [*examples, *copies], (0.6, 0.2, 0.2), seed=3)
    images = [{one.images for one in part} for part in (parts.train, parts.validation, parts.test)]
    assert sum(map(len, images)) == len(set.union(*images)) == 60
    assert len(parts.train) == 2 * len(images[0])
    again = split(item, [*copies, *examples], (0.6, 0.2, 0.2), seed=3)
    assert set(again.train) == set(parts.train)
    other = split(item, examples, (0.6, 0.2, 0.2), seed=4)
    assert set(other.test) != {one for one in parts.test if one in examples}


def test_fewer_examples_are_a_subset(data: Path) -> None:
    item = item_of(data)
    every = split(item, read_examples(item), (0.6, 0.2, 0.2), seed=0)
    few = split(item_of(data, max_examples=30), read_examples(item), (0.6, 0.2, 0.2), seed=0)
    assert len(few.train) + len(few.validation) + len(few.test) == 30
    assert set(few.train) <= set(every.train)
    assert set(few.test) <= set(every.test)


def test_too_few_examples_are_reported(data: Path) -> None:
    with pytest.raises(InvalidArgument, match="item 'digits' has 2 examples, none of them for"):
        split(item_of(data), read_examples(item_of(data))[:2], (0.6, 0.2, 0.2), seed=0)


def record(*turns: tuple[str, str]) -> dict[str, object]:
    """Return a record with these turns: who says what."""
    said = [{"from": speaker, "value": value} for speaker, value in turns]
    return {"image": "0/0.png", "conversations": said}


def test_conversations_are_read_question_by_question(data: Path) -> None:
    said = record(
        ("human", "<image>\nWhat color is it?"),
        ("gpt", "red"),
        ("human", "And what shape?"),
        ("gpt", "square"),
    ) | {"id": "7"}
    wanted = [("What color is it?", "red"), ("And what shape?", "square")]
    for name, text in (("a.json", json.dumps([said])), ("a.jsonl", json.dumps(said) + "\n\n")):
        (data / name).write_text(text)
        examples = read_examples(item_of(data, task="vqa", conversations=name))
        assert [(one.question, one.answer) for one in examples] == wanted
        assert {one.images for one in examples} == {((data / "digits/0/0.png").resolve(),)}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"image": "0/0.png"}, "record 1 needs 'image' and 'conversations'"),
        ({"image": "none.png", "conversations": []}, "names 'none.png', which is not in"),
        ({"image": "../base", "conversations": []}, "names '../base', outside"),
        ({"image": "0/0.png", "conversations": [{}, {}]}, "record 1 has a turn without 'from'"),
        (record(("gpt", ""), ("human", "")), "has turns of"),
        ([1], "record 1 is not an object"),
        (record(("human", "q")), "the number of turns is 1; it must be even and above 0"),
        (record(("human", ""), ("gpt", " ")), "record 1 has an empty answer"),
    ],
)
def test_a_wrong_conversation_is_reported_by_record(data: Path, wrong: object, reason: str) -> None:
    (data / "a.jsonl").write_text(json.dumps(wrong))
    with pytest.raises(InvalidArgument, match=reason):
        read_examples(item_of(data, task="vqa", conversations="a.jsonl"))


def test_a_task_with_boxes_needs_an_answer_with_a_box(data: Path) -> None:
    none, words, box = (
        record(("human", "dogs"), ("gpt", answer))
        for answer in ("none", "hello", "<box>(1,2),(3,4)</box>")
    )
    item = {"task": "detect", "metric": "f1_iou50", "conversations": "a.json"}
    (data / "a.json").write_text(json.dumps([none, words]))
    with pytest.raises(InvalidArgument, match="no answer has a box, for example 'none'"):
        read_examples(item_of(data, **item))
    (data / "a.json").write_text(json.dumps([none, box]))
    assert len(read_examples(item_of(data, **item))) == 2


def test_a_teacher_labels_images_or_leaves_them_out(data: Path) -> None:
    Image.new("RGB", (4, 4), (99, 0, 0)).save(data / "digits" / "unknown.png")
    item = item_of(data, teacher={"python": f"{__name__}:brightness"}, question="How is it?")
    # A server also takes a picture with such a profile.
    picture = Image.open(data / "digits" / "0" / "0.png")
    picture.save(data / "digits" / "0" / "0.png", icc_profile=bytes(2 << 20))
    examples = read_examples(item, load_teacher(item))
    assert len(examples) == 60
    assert {one.answer for one in examples} == {"light", "dark"}


def test_a_teacher_labels_each_image_once_even_if_it_is_stopped(data: Path) -> None:
    item = item_of(data, teacher={"python": f"{__name__}:brightness"}, question="How is it?")
    teacher = load_teacher(item)
    asked: list[Path] = []
    stop_after = 20

    def counted(path: Path) -> str | None:
        if len(asked) == stop_after:
            raise KeyboardInterrupt
        asked.append(path)
        assert teacher is not None
        return teacher(path)

    file = data / "labels.json"
    with pytest.raises(KeyboardInterrupt), remembered(item, counted, file) as label:
        read_examples(item, label)
    stop_after = 100
    with remembered(item, counted, file) as label:
        assert len(read_examples(item, label)) == 60
    assert len(asked) == len(set(asked)) == 60
    other = item_of(data, teacher={"python": f"{__name__}:darkness"}, question="How is it?")
    stop_after = 200
    with remembered(other, counted, file) as label:
        read_examples(other, label)
    assert len(asked) == 120
    stored = file.read_text()
    with remembered(item, counted, file):
        pass
    assert file.read_text() == stored, (
        "another teacher without a new answer dropped the stored ones"
    )


def test_answers_are_saved_while_the_teacher_still_labels(data: Path) -> None:
    item = item_of(data, teacher={"python": f"{__name__}:brightness"}, question="How is it?")
    file, seen = data / "labels.json", []
    with remembered(item, lambda path: path.stem, file) as label:
        for number, path in enumerate(sorted(item.images.rglob("*.png"))):
            label(path)
            if number + 1 == SAVE_EVERY:
                seen.append(len(json.loads(file.read_text())["answers"]))
    assert seen == [SAVE_EVERY]


def blink(image: Image.Image) -> str | None:
    """Fail on one brightness."""
    if image.getpixel((0, 0)) == (40, 10, 0):
        raise ZeroDivisionError("division by zero")
    return brightness(image)


def test_a_few_unusable_images_are_left_out_with_a_reason(data: Path) -> None:
    (data / "digits" / "0" / "damaged.png").write_bytes(b"no image")
    reasons: list[str] = []
    assert len(read_examples(item_of(data), None, reasons.append)) == 60
    item = item_of(data, teacher={"python": f"{__name__}:blink"}, question="How is it?")
    assert len(read_examples(item, load_teacher(item), reasons.append)) == 59
    assert sum("damaged.png" in reason for reason in reasons) == 2
    assert sum("ZeroDivisionError" in reason for reason in reasons) == 1
    for number in range(8):
        (data / "digits" / "0" / f"damaged{number}.png").write_bytes(b"no image")
    with pytest.raises(InvalidArgument, match="9 of 69 images fail, and at most 10% of them may"):
        read_examples(item_of(data))


def test_a_teacher_is_measured_against_the_truth(data: Path) -> None:
    images = sorted((data / "digits").rglob("*.png"))
    truth = {str(path.relative_to(data / "digits")): "light" for path in images[:40]}
    (data / "truth.json").write_text(json.dumps(truth))
    item = item_of(
        data,
        teacher={"python": f"{__name__}:brightness"},
        question="How is it?",
        truth="truth.json",
    )
    examples = read_examples(item, load_teacher(item))
    light = sum(brightness(Image.open(path)) == "light" for path in images[:40])
    score = teacher_score(item, examples, read_truth(item))
    assert score == pytest.approx(light / 40)
    assert 0 < light < 40
    (data / "truth.json").write_text("[]")
    with pytest.raises(InvalidArgument, match="is not a JSON object of answers"):
        read_truth(item)
    with pytest.raises(InvalidArgument, match="truth measures a teacher, and the item has none"):
        item_of(data, truth="truth.json")


@pytest.mark.parametrize(
    ("python", "reason"),
    [
        ("no_such_module:label", "it needs the module 'no_such_module', which is not installed"),
        (f"{__name__}:missing", "has no attribute 'missing'"),
        (f"{__name__}:NOT_A_FUNCTION", "is not a function but 3"),
    ],
)
def test_a_teacher_that_cannot_be_loaded_is_reported(data: Path, python: str, reason: str) -> None:
    item = item_of(data, teacher={"python": python})
    message = f"item 'digits': its teacher cannot be loaded: .*{reason}"
    with pytest.raises(InvalidArgument, match=message):
        load_teacher(item)


def test_a_teacher_that_labels_nothing_is_reported(data: Path) -> None:
    item = item_of(data)
    labelled = item.model_copy(update={"teacher": Teacher(python="a:b")})
    with pytest.raises(InvalidArgument, match="has no examples that its teacher labels"):
        read_examples(labelled, lambda _: None)
