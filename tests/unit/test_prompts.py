"""Tests of task prompts: the paper's appendix C inside the checkpoint's own chat template."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tools.demo.build import make_tokenizer
from vlora.errors import InvalidArgument
from vlora.vision.chat_template import Chat, ChatTemplate
from vlora.vision.prompts import render, task_text

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
def test_prompts_equal_those_of_the_paper(task: str, text: str, expected: str) -> None:
    assert render(task, text, 1, 0, BARE) == expected


def test_a_clip_has_one_placeholder_per_frame() -> None:
    prompt = render("video", "", 0, 6, CHAT)
    assert prompt.startswith("<s><|user|>" + "<image>" * 6 + " Please analyze the consecutive")
    assert prompt.endswith("occurring in the video. Answer:<|assistant|>")


def test_a_clip_that_is_one_video_has_one_placeholder() -> None:
    video = ChatTemplate("", "", image_text="[i]", clip_text=lambda frames: "[i]")
    assert render("raw", "x", 1, 3, video) == "[i][i]x"
    assert render("raw", "<image>a<image><image>b", 1, 2, video) == "[i]a[i]b"
    assert render("raw", "<image>a<image>b", 2, 0, video) == "[i]a[i]b"
    assert render("raw", "<image>a<image>b", 1, 1, video) == "[i]a[i]b"


@pytest.mark.parametrize("text", ["<image>a<image>", "<image><image>a<image>"])
def test_placeholders_of_a_video_must_stand_together_and_last(text: str) -> None:
    video = ChatTemplate("", "", image_text="[i]", clip_text=lambda frames: "[i]")
    frames = 2
    with pytest.raises(InvalidArgument, match="takes the 2 frames as one video"):
        render("raw", text, text.count("<image>") - frames, frames, video)


def test_a_text_replaces_the_default_instruction_of_a_task() -> None:
    assert render("caption", "Describe it.", 1, 0, BARE) == "<image>, Describe it. Answer:"


def test_raw_text_is_sent_verbatim_after_the_images() -> None:
    assert render("raw", " as it is\n", 0, 0, CHAT) == " as it is\n"
    assert render("raw", "x", 2, 0, CHAT) == "<image><image>x"


def test_text_only_prompts_have_no_placeholder() -> None:
    assert render("vqa", "Hello?", 0, 0, BARE) == "Hello? Answer:"


def test_placeholders_in_the_text_position_the_images() -> None:
    prompt = render("vqa", "Is <image> brighter than <image>?", 2, 0, BARE)
    assert prompt == "Is <image> brighter than <image>? Answer:"


def test_braces_in_the_text_are_kept() -> None:
    assert "{images} {text}" in render("refer", "{images} {text}", 1, 0, BARE)


@pytest.mark.parametrize(("images", "frames"), [(1, 0), (0, 0), (2, 1)])
def test_placeholders_that_do_not_match_the_images_are_refused_with_the_counts(
    images: int, frames: int
) -> None:
    with pytest.raises(InvalidArgument, match=f"2 .*{images} images and {frames} frames"):
        render("vqa", "<image> or <image>?", images, frames, BARE)


@pytest.mark.parametrize("task", ["vqa", "refer", "detect", "raw"])
@pytest.mark.parametrize("text", ["", "  \n", "<image>"])
def test_an_empty_prompt_is_refused_for_tasks_that_need_a_text(task: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match="empty"):
        render(task, text, 1, 0, BARE)


@pytest.mark.parametrize("task", ["caption", "classify", "video"])
@pytest.mark.parametrize("text", ["", "  ", "<image>"])
def test_tasks_with_a_default_instruction_need_no_text(task: str, text: str) -> None:
    assert render(task, text, 1, 0, BARE) == render(task, "", 1, 0, BARE)


def test_an_unknown_task_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match=r"vqa, caption, refer, .*, chat, auto$"):
        render("segment", "x", 1, 0, BARE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that holds only the demo's tokenizer."""
    make_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def with_template(folder: Path, source: str) -> Path:
    (folder / "chat_template.jinja").write_text(source)
    return folder


def test_the_prompt_equals_that_of_the_checkpoints_chat_template(folder: Path) -> None:
    tokenizer = make_tokenizer()
    template = ChatTemplate.from_checkpoint(folder)
    for task, text in (("vqa", "What color is the star?"), ("caption", ""), ("detect", "star")):
        message = {"role": "user", "content": task_text(task, text, "<image>")}
        own = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        assert render(task, text, 1, 0, template) == own


PARTS = (
    "{% for m in messages %}USER: {% for p in m['content'] | selectattr('type', 'equalto', "
    "'text') %}{{ p['text'] }}{% endfor %}{% endfor %} ASSISTANT:"
)


def test_templates_that_need_content_parts_are_supported(folder: Path) -> None:
    expected = ChatTemplate("USER: ", " ASSISTANT:")
    assert ChatTemplate.from_checkpoint(with_template(folder, PARTS)) == expected


def test_templates_of_transformers_4_processors_are_read(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": PARTS}))
    assert ChatTemplate.from_checkpoint(folder) == ChatTemplate("USER: ", " ASSISTANT:")
    (folder / "chat_template.json").write_text("[]")
    with pytest.raises(InvalidArgument, match=r"chat_template\.json cannot be read"):
        ChatTemplate.from_checkpoint(folder)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ raise_exception('only tools here') }}", "fails: only tools here"),
        ("{% for m in messages %}{{ m['content'] }}", "fails: .*end of template"),
        ("{{ messages[3]['content'] }}", "fails: .*no element 3"),
        ("{{ 1 / 0 }}", "fails: division by zero"),
        ("no text at all", "does not contain the user's text exactly once"),
        ("{{ messages[0]['content'] }}{{ messages[0]['content'] }}", "exactly once"),
    ],
)
def test_a_template_that_fails_is_an_error_with_its_reason(
    folder: Path, source: str, problem: str
) -> None:
    with pytest.raises(InvalidArgument, match=problem) as caught:
        ChatTemplate.from_checkpoint(with_template(folder, source))
    assert str(folder) in str(caught.value)


def test_a_checkpoint_without_a_template_gets_its_begin_of_text_token(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    assert ChatTemplate.from_checkpoint(folder) == ChatTemplate("<s>", "")


def chat(*contents: str) -> str:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return json.dumps({"messages": messages})


def test_a_conversation_goes_through_the_checkpoints_template(folder: Path) -> None:
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>"
    template = ChatTemplate.from_checkpoint(with_template(folder, source))
    text = chat("<image> Why?", "So.", "And <image>?")
    assert render("chat", text, 2, 0, template) == (
        "[user]<image> Why?[assistant]So.[user]And <image>?>"
    )
    with pytest.raises(InvalidArgument, match=r"2 <image> placeholders .* 1 images and 0 frames"):
        render("chat", text, 1, 0, template)


def test_a_conversation_that_the_template_refuses_is_an_error(folder: Path) -> None:
    source = (
        "{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    template = ChatTemplate.from_checkpoint(with_template(folder, source))
    with pytest.raises(InvalidArgument, match="refuses the messages: one only"):
        render("chat", chat("a", "b"), 0, 0, template)
    with pytest.raises(InvalidArgument, match="no chat template"):
        render("chat", chat("a", "b"), 0, 0, BARE)
    for text in ("[]", "{}", '{"messages": []}', '{"messages": [{"role": "user"}]}'):
        with pytest.raises(InvalidArgument, match=r"object|Object"):
            render("chat", text, 0, 0, template)


def message(*parts: dict[str, str] | str, role: str = "user") -> dict[str, Any]:
    return {
        "role": role,
        "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts],
    }


IMAGE, VIDEO = {"type": "image"}, {"type": "video"}


def test_a_task_takes_one_message_whose_text_is_only_text() -> None:
    def ask(*parts: dict[str, str] | str, images: int = 1, frames: int = 0) -> str:
        return render("vqa", Chat([message(*parts)]), images, frames, BARE)

    assert ask(IMAGE, "a", "b") == "<image>, a\nb Answer:"
    assert ask("a ", IMAGE, " b") == "a <image> b Answer:"
    assert ask(VIDEO, "a", images=0, frames=3) == "<image><image><image>, a Answer:"
    written = ask(IMAGE, "is <image> a tag?")
    assert written == "<image>, is <image> a tag? Answer:"
    (span,) = written.literals
    assert span == (12, 19)
    for chat_of in (Chat([message("a"), message("b")]), Chat([message("a", role="system")])):
        with pytest.raises(InvalidArgument, match="takes the text of one user message"):
            render("vqa", chat_of, 0, 0, BARE)


def test_a_clip_is_printed_by_the_template_or_stands_in_its_place() -> None:
    printing = replace(
        BARE,
        image_text="[i]",
        clip_text=lambda frames: f"[{frames}]",
        apply=lambda messages, start, goes_on: str(messages[0]["content"]),
    )
    chat_of = Chat([message(IMAGE, VIDEO, "x")])
    assert render("chat", chat_of, 1, 4, printing) == "[i]\n[4]\nx"
    parts = replace(printing, takes_parts=True, prints_images=True, video_text="{'type': 'video'}")
    assert render("chat", chat_of, 1, 4, parts) == (
        "[{'type': 'image'}, [4], {'type': 'text', 'text': 'x'}]"
    )
    for wrong in (Chat([message(VIDEO, IMAGE)]), Chat([message(VIDEO, VIDEO)])):
        with pytest.raises(InvalidArgument, match="one clip, after all images"):
            render("chat", wrong, 1, 4, printing)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "list of parts"),
        ({"messages": [message("a")], "tools": []}, "unknown key 'tools'"),
        ({"messages": [message("a")], "add_generation_prompt": 1}, "must be true or false"),
        ({"messages": [message("a")], "continue_final_message": True}, "needs 'add_generation"),
    ],
)
def test_a_conversation_that_cannot_be_read_is_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        Chat.parse(json.dumps(given))
