"""Prompts follow the paper's appendix C inside the checkpoint's own chat template."""

import json
from pathlib import Path

import pytest

from vlora.errors import InvalidArgument
from vlora.vision.prompts import TASK_DEFAULT_MAX_TOKENS, TASKS, ChatTemplate, render, task_text

BARE = ChatTemplate(prefix="", suffix="")
CHAT = ChatTemplate(prefix="<s><|user|>", suffix="<|assistant|>")


@pytest.mark.parametrize(
    ("task", "text", "expected"),
    [
        ("vqa", "How many cars?", "<image>, How many cars? Answer:"),
        ("caption", "", "<image>, Generate the caption in English: Answer:"),
        ("refer", "red circle", "<image>, Circle the red circle on the picture. Answer:"),
        (
            "detect",
            "airplane",
            "<image>, Please box all the objects in the picture that you think are airplane. "
            "Answer:",
        ),
        ("classify", "", "<image>, What is the category of the picture? Answer:"),
    ],
)
def test_templates_read_as_in_the_paper(task: str, text: str, expected: str) -> None:
    assert render(task, text, 1, 0, BARE) == expected


def test_a_clip_has_one_placeholder_a_frame() -> None:
    prompt = render("video", "", 0, 6, CHAT)
    assert prompt.startswith("<s><|user|>" + "<image>" * 6 + " Please analyze the consecutive")
    assert prompt.endswith("occurring in the video. Answer:<|assistant|>")


def test_every_task_has_a_default_limit() -> None:
    assert set(TASK_DEFAULT_MAX_TOKENS) == set(TASKS)


def test_text_replaces_the_instruction_of_a_task_that_brings_one() -> None:
    assert render("caption", "Describe it.", 1, 0, BARE) == "<image>, Describe it. Answer:"


def test_raw_is_verbatim_but_for_images_before_it() -> None:
    assert render("raw", " as it is\n", 0, 0, CHAT) == " as it is\n"
    assert render("raw", "x", 2, 0, CHAT) == "<image><image>x"


def test_text_only_prompts_have_no_placeholder() -> None:
    assert render("vqa", "Hello?", 0, 0, BARE) == "Hello? Answer:"


def test_placeholders_in_the_text_place_the_images() -> None:
    prompt = render("vqa", "Is <image> brighter than <image>?", 2, 0, BARE)
    assert prompt == "Is <image> brighter than <image>? Answer:"


def test_braces_in_the_text_are_only_text() -> None:
    assert "{images} {text}" in render("refer", "{images} {text}", 1, 0, BARE)


@pytest.mark.parametrize(("images", "frames"), [(1, 0), (0, 0), (2, 1)])
def test_placeholders_that_do_not_match_are_refused_with_the_counts(
    images: int, frames: int
) -> None:
    with pytest.raises(InvalidArgument, match=f"2 .*{images} images and {frames} frames"):
        render("vqa", "<image> or <image>?", images, frames, BARE)


@pytest.mark.parametrize("task", ["vqa", "refer", "detect", "raw"])
@pytest.mark.parametrize("text", ["", "  \n", "<image>"])
def test_an_empty_prompt_is_refused_unless_the_task_supplies_one(task: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match="empty"):
        render(task, text, 1, 0, BARE)


@pytest.mark.parametrize("task", ["caption", "classify", "video"])
@pytest.mark.parametrize("text", ["", "  ", "<image>"])
def test_tasks_with_an_instruction_need_no_text(task: str, text: str) -> None:
    assert render(task, text, 1, 0, BARE) == render(task, "", 1, 0, BARE)


def test_an_unknown_task_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match="vqa, caption, refer"):
        render("segment", "x", 1, 0, BARE)


def test_the_prompt_equals_the_checkpoints_own_chat_template(tmp_path: Path) -> None:
    tokenizer = pytest.importorskip("tools.demo.tokenizer").make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    template = ChatTemplate.from_checkpoint(tmp_path)
    for task, text in (("vqa", "What color is the star?"), ("caption", ""), ("detect", "star")):
        message = {"role": "user", "content": task_text(task, text, "<image>")}
        own = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        assert render(task, text, 1, 0, template) == own


def test_templates_that_want_parts_are_understood(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}USER: {% for p in m['content'] | selectattr('type', 'equalto', "
        "'text') %}{{ p['text'] }}{% endfor %}{% endfor %} ASSISTANT:"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    assert ChatTemplate.from_checkpoint(tmp_path) == ChatTemplate("USER: ", " ASSISTANT:")


def test_a_checkpoint_without_a_template_gets_its_bos_token(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    assert ChatTemplate.from_checkpoint(tmp_path) == ChatTemplate("<s>", "")
