"""Tests of how the playground shows answers, and of its use by keyboard or screen reader."""

from __future__ import annotations

import random

import pytest

from tests.support.browser import Page, barriers
from tests.support.playground import example
from tools.demo.show import SAMPLES
from vlora.vision.results import parse_boxes

pytestmark = pytest.mark.slow

MODES = ("ask", "compare", "live")


def test_boxes_are_drawn_where_the_answer_says(page: Page) -> None:
    example(page, "defects")
    page.answer()
    text = page.run("""
        const {parseAnswer} = await import("/playground/boxes.js");
        return document.querySelector(".answer .box").textContent;
    """)
    (found,), _ = parse_boxes(f"<ref>stain</ref><box>{text}</box>")
    picture, box = (page.find(selector).rect for selector in (".figure img", ".layer .box"))
    assert page.text(".layer .box span") == "stain"
    drawn = (
        (box["x"] - picture["x"]) / picture["width"],
        (box["y"] - picture["y"]) / picture["height"],
        (box["x"] + box["width"] - picture["x"]) / picture["width"],
        (box["y"] + box["height"] - picture["y"]) / picture["height"],
    )
    assert drawn == pytest.approx([edge / 1000 for edge in found.grid], abs=0.01)


def test_labels_of_boxes_stay_within_the_picture(page: Page) -> None:
    name = "a thing with a name that is longer than half of the picture"
    boxes = ("(900,500),(990,600)", "(20,5),(90,60)", "(820,5),(990,60)", "(510,300),(560,350)")
    example(page, "detect")
    page.answer()
    page.click(".more summary")
    page.write("#choices", f"<ref>{name}</ref>" + "".join(f"<box>{box}</box>" for box in boxes))
    page.click("#ask")
    page.answer()
    picture = page.find(".figure img").rect
    labels = [label.rect for label in page.all(".layer .box span")]
    assert len(labels) == len(boxes)
    for label in labels:
        assert picture["x"] <= label["x"] + 4
        assert label["x"] + label["width"] <= picture["x"] + picture["width"] + 4


def test_chosen_options_are_not_cut_off(page: Page) -> None:
    """Compare the width of the text with that of the field, less its arrow (20 pixels)."""
    page.mode("compare")
    example(page, "action")
    page.answer("b")
    assert [one.text for one in page.all("legend")][1:] == ["Model A", "Model B"]
    for mode in ("compare", "ask"):
        page.mode(mode)
        page.choose(".column-a .task", "detect")
        cut = page.run("""
            const context = document.createElement("canvas").getContext("2d");
            return [...document.querySelectorAll("select")].filter((one) => {
              const {font, paddingLeft, paddingRight} = getComputedStyle(one);
              context.font = font;
              const text = context.measureText(one.selectedOptions[0].textContent).width;
              const edges = parseFloat(paddingLeft) + parseFloat(paddingRight) + 20;
              return one.clientWidth && text + edges > one.clientWidth;
            }).map((one) => one.selectedOptions[0].textContent);
        """)
        assert cut == [], mode


def test_answers_are_split_as_the_server_splits_them(page: Page) -> None:
    rng = random.Random(7)
    words = [
        "<ref>",
        "</ref>",
        "<box>",
        "</box>",
        "(1,2),(30,4)",
        "(999,0) (5,7)",
        "(1000,1),(2,3)",
        "<|object_ref_start|>",
        "<|object_ref_end|>",
        "<|box_start|>",
        "<|box_end|>",
    ]
    words += [" cat ", "é<", "<re", "\n", "(7,8)"]
    texts = ["".join(rng.choices(words, k=rng.randint(1, 9))) for _ in range(400)]
    answers = page.run(
        """
        const {parseAnswer} = await import("/playground/boxes.js");
        return arguments[0].map((text) => parseAnswer(text).boxes);
        """,
        texts,
    )
    for text, boxes in zip(texts, answers, strict=True):
        expected = [(box.label, list(box.grid)) for box in parse_boxes(text)[0]]
        assert [(box["label"], box["grid"]) for box in boxes] == expected, text


def test_the_scores_of_a_head_are_bars(page: Page) -> None:
    example(page, "textures")
    assert page.answer() == "zigzag"
    rows = page.all("#answers .scores li")
    shares = [float(row.text.split()[-2]) for row in rows]
    assert len(rows) == 6
    assert rows[0].text.startswith("zigzag")
    assert sum(shares) == pytest.approx(100, abs=0.5)
    track, fill = (page.find(f".scores .bar-{part}").rect["width"] for part in ("track", "fill"))
    assert fill / track == pytest.approx(shares[0] / 100, abs=0.02)


def test_the_keyboard_is_enough(page: Page) -> None:
    page.write("#question", "What color is the star?")
    page.find("#file").send_keys(str(SAMPLES / "vqa.png"))
    page.wait(".figure img")
    page.run('document.querySelector("input[name=mode]:checked").focus()')
    page.press("ARROW_RIGHT")
    assert page.run("return document.querySelector('input[name=mode]:checked').value") == "compare"
    page.press("ARROW_LEFT")
    reached = set()
    for _ in range(40):
        page.press("TAB")
        focus = page.run("return document.activeElement.id || document.activeElement.className")
        reached.add(focus)
    assert {"file", "camera", "clear", "adapter", "task", "question", "ask", "answer"} <= reached
    page.run("document.querySelector('#question').focus()")
    page.press("CONTROL", "ENTER")
    assert page.answer() == "blue"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible(page: Page, scheme: str) -> None:
    page.scheme(scheme)
    for mode in MODES:
        page.mode(mode)
        assert barriers(page) == []
    page.mode("compare")
    example(page, "defects")
    page.answer()
    example(page, "digits")
    page.answer()
    page.click("#key-panel summary")
    assert barriers(page) == []
    page.click("#key-panel summary")
    page.click(".more summary")
    page.write("#max-tokens", "99999999999")
    page.run("document.querySelector('#ask-form').noValidate = true")
    page.click("#ask")
    page.wait(".failure")
    assert barriers(page) == []
    page.faults()
