"""Tests of the specification of a generation run, its examples and its metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from vlora.cli import app
from vlora.errors import InvalidArgument
from vlora.generation.examples import Example, read_examples, split
from vlora.generation.metrics import chrf, f1_iou50, top1, vqa_score
from vlora.generation.spec import Item, read_spec
from vlora.generation.teachers import (
    SAVE_EVERY,
    load_teacher,
    read_truth,
    remembered,
    teacher_score,
)

ITEM = {"name": "digits", "task": "classify", "images": "digits", "required": 0.9}


def brightness(image: Image.Image) -> str | None:
    """Label an image: the teacher of these tests."""
    value = image.getpixel((0, 0))
    assert isinstance(value, tuple)
    return None if value[0] == 99 else ("light" if value[0] > 127 else "dark")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a folder with 60 images of two labels and a base folder."""
    (tmp_path / "base").mkdir()
    for number in range(60):
        folder = tmp_path / "digits" / str(number % 2)
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (number * 4, number, 0)).save(folder / f"{number}.png")
    return tmp_path


def write(folder: Path, **changes: object) -> Path:
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump({"base": "base", "items": [ITEM], **changes}))
    return path


def item_of(folder: Path, **changes: object) -> Item:
    return read_spec(write(folder, items=[{**ITEM, **changes}])).items[0]


def test_paths_are_relative_to_the_file(data: Path) -> None:
    spec = read_spec(write(data))
    assert (spec.base, spec.items[0].images) == (data / "base", data / "digits")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bases": "x"}, "bases: Extra inputs are not permitted"),
        ({"items": []}, "items: Tuple should have at least 1 item"),
        ({"items": [{**ITEM, "required": 1.2}]}, "items.0.required: Input should be less than"),
        ({"items": [{**ITEM, "task": "sing"}]}, "unknown task 'sing'; known tasks are vqa"),
        ({"items": [{**ITEM, "task": "vqa"}]}, "task 'vqa' needs a question"),
        ({"items": [ITEM, ITEM]}, "two items are named 'digits'"),
        ({"items": [{**ITEM, "name": "../up"}]}, "items.0.name: String should match pattern"),
        ({"items": [{**ITEM, "images": "none"}]}, "none does not exist"),
        ({"items": [{**ITEM, "teacher": {}}]}, "give exactly one of pipeline, onnx and python"),
        ({"items": [{**ITEM, "head": True, "metric": "chrf"}]}, "its metric is top1"),
        ({"split": [0.5, 0.5, 0.5]}, "the shares of split must be positive and add up to 1"),
        ({"training": {"rank": 0}}, "training.rank: Input should be greater than or equal to 1"),
        ({"options": {"order": "alphabetical"}}, "options.order: Input should be 'given'"),
    ],
)
def test_a_wrong_specification_is_reported_by_key(
    data: Path, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        read_spec(write(data, **changes))


@pytest.mark.parametrize("content", ["[", "items: &a [*a]\n", "- 1", "", "x" * (1 << 21)])
def test_a_file_that_is_no_specification_is_reported(tmp_path: Path, content: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(content)
    with pytest.raises(InvalidArgument, match=r"spec\.yaml"):
        read_spec(path)


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


def test_conversations_are_read_question_by_question(data: Path) -> None:
    turns = [
        {"from": "human", "value": "<image>\nWhat color is it?"},
        {"from": "gpt", "value": "red"},
        {"from": "human", "value": "And what shape?"},
        {"from": "gpt", "value": "square"},
    ]
    record = {"id": "7", "image": "0/0.png", "conversations": turns}
    wanted = [("What color is it?", "red"), ("And what shape?", "square")]
    for name, text in (("a.json", json.dumps([record])), ("a.jsonl", json.dumps(record) + "\n\n")):
        (data / name).write_text(text)
        examples = read_examples(item_of(data, task="vqa", conversations=name))
        assert [(one.question, one.answer) for one in examples] == wanted
        assert {one.images for one in examples} == {((data / "digits/0/0.png").resolve(),)}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"image": "0/0.png"}, "record 1 needs 'image' and 'conversations'"),
        ({"image": "none.png", "conversations": []}, "names 'none.png', which is not in"),
        ({"image": "../base", "conversations": []}, "names '../base', outside"),
        ({"image": "0/0.png", "conversations": [{}, {}]}, "record 1 has a turn without 'from'"),
        (
            {
                "image": "0/0.png",
                "conversations": [{"from": "gpt", "value": ""}, {"from": "human", "value": ""}],
            },
            "has turns of",
        ),
        ([1], "record 1 is not an object"),
    ],
)
def test_a_wrong_conversation_is_reported_by_record(
    data: Path, record: object, reason: str
) -> None:
    (data / "a.jsonl").write_text(json.dumps(record))
    with pytest.raises(InvalidArgument, match=reason):
        read_examples(item_of(data, task="vqa", conversations="a.jsonl"))


def test_a_teacher_labels_images_or_leaves_them_out(data: Path) -> None:
    Image.new("RGB", (4, 4), (99, 0, 0)).save(data / "digits" / "unknown.png")
    item = item_of(data, teacher={"python": f"{__name__}:brightness"}, question="How is it?")
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
    with pytest.raises(InvalidArgument, match="9 of 69 images are like this"):
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


def test_a_teacher_that_cannot_be_loaded_is_reported(data: Path) -> None:
    item = item_of(data, teacher={"python": "no_such_module:label"})
    with pytest.raises(InvalidArgument, match="item 'digits': its teacher cannot be loaded"):
        load_teacher(item)


def test_top1_is_the_share_of_equal_labels() -> None:
    assert top1(["a ", "b", "c", "d"], ["a", "b", "x", "D"]) == 0.5


def test_vqa_answers_are_compared_as_the_official_metric_does() -> None:
    answers = ["The dog.", "two", "YES!", "none", "a red-brown cat", "left"]
    references = ["dog", "2", "yes", "0", "red brown cat", "right"]
    assert vqa_score(answers, references) == pytest.approx(5 / 6)


def test_f1_matches_each_box_once_by_label_and_overlap() -> None:
    def text(label: str, *boxes: tuple[int, int, int, int]) -> str:
        ends = "".join(f"<box>({a},{b}),({c},{d})</box>" for a, b, c, d in boxes)
        return f"<ref>{label}</ref>{ends}"

    reference = text("cat", (0, 0, 100, 100), (500, 500, 600, 600))
    assert f1_iou50([reference], [reference]) == 1.0
    assert f1_iou50([text("dog", (0, 0, 100, 100))], [reference]) == 0.0
    twice = text("cat", (0, 0, 100, 100), (0, 0, 100, 100))
    assert f1_iou50([twice], [reference]) == pytest.approx(0.5)
    shifted = text("cat", (0, 33, 100, 133), (0, 0, 1, 1))
    assert f1_iou50([shifted], [reference]) == pytest.approx(0.5)
    too_far = text("cat", (0, 34, 100, 134))
    assert f1_iou50([too_far], [reference]) == 0.0
    assert f1_iou50(["nothing"], ["nothing"]) == 1.0


def test_chrf_is_one_for_equal_captions_and_lower_for_others() -> None:
    pytest.importorskip("sacrebleu")
    assert chrf(["a red star"], ["a red star"]) == pytest.approx(1.0)
    assert 0.2 < chrf(["a red circle"], ["a red star"]) < 0.8


def test_a_dry_run_prints_the_plan_and_writes_nothing(data: Path) -> None:
    path = write(data)
    arguments = ["adapters", "generate", str(path), "--out", str(data / "out"), "--dry-run"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "at least 1 attempts, at most 1, of up to 800 steps" in result.output
    assert not (data / "out").exists()
