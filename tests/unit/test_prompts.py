"""Tests of task prompts, and of the boxes, labels and counts that a result has from an answer."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.demo.build import make_tokenizer
from vlora.errors import InvalidArgument
from vlora.request import Clip
from vlora.tasks import TASKS
from vlora.vision.chat_template import MAX_STAND_INS, Chat, ChatTemplate
from vlora.vision.prompts import render, task_text
from vlora.vision.results import (
    TextBox,
    build_result,
    parse_boxes,
    pixels_per_patch,
    result_schema,
)

BARE = ChatTemplate(prefix="", suffix="")
CHAT = ChatTemplate(prefix="<s><|user|>", suffix="<|assistant|>")


VIDEO = ChatTemplate("", "", image_text="[i]", clip_text=lambda frames, seconds: "[i]")
"""Template of a checkpoint that takes a clip as one video."""
DETECT = "Please box all the objects in the picture that you think are airplane."


@pytest.mark.parametrize(
    ("task", "text", "images", "expected"),
    [
        # The prompts of the paper.
        ("vqa", "How many cars?", 1, "<image>, How many cars? Answer:"),
        ("caption", "", 1, "<image>, Generate the caption in English: Answer:"),
        ("refer", "red circle", 1, "<image>, Circle the red circle on the picture. Answer:"),
        ("detect", "airplane", 1, f"<image>, {DETECT} Answer:"),
        ("classify", "", 1, "<image>, What is the category of the picture? Answer:"),
        # A text replaces the default instruction of a task.
        ("caption", "Describe it.", 1, "<image>, Describe it. Answer:"),
        # Placeholders in the text position the images; without images there are none.
        ("vqa", "Is <image> like <image>?", 2, "Is <image> like <image>? Answer:"),
        ("vqa", "Hello?", 0, "Hello? Answer:"),
        ("refer", "{images}", 1, "<image>, Circle the {images} on the picture. Answer:"),
        # Raw text is sent verbatim after the images.
        ("raw", " as it is\n", 0, " as it is\n"),
        ("raw", "x", 2, "<image><image>x"),
    ],
)
def test_a_task_has_its_prompt(task: str, text: str, images: int, expected: str) -> None:
    assert render(task, text, images, 0, BARE) == expected


def test_a_clip_has_one_placeholder_per_frame() -> None:
    prompt = render("video", "", 0, 6, CHAT)
    assert prompt.startswith("<s><|user|>" + "<image>" * 6 + " Please analyze the consecutive")
    assert prompt.endswith("occurring in the video. Answer:<|assistant|>")
    assert render("raw", "x", 0, 0, CHAT) == "x"


def test_a_clip_that_is_one_video_has_one_placeholder() -> None:
    assert render("raw", "x", 1, 3, VIDEO) == "[i][i]x"
    assert render("raw", "<image>a<image><image>b", 1, 2, VIDEO) == "[i]a[i]b"
    assert render("raw", "<image>a<image>b", 2, 0, VIDEO) == "[i]a[i]b"
    assert render("raw", "<image>a<image>b", 1, 1, VIDEO) == "[i]a[i]b"


@pytest.mark.parametrize("text", ["<image>a<image>", "<image><image>a<image>"])
def test_placeholders_of_a_video_must_stand_together_and_last(text: str) -> None:
    with pytest.raises(InvalidArgument, match="takes the 2 frames as one video"):
        render("raw", text, text.count("<image>") - 2, 2, VIDEO)


SECONDS = replace(VIDEO, clip_text=lambda frames, seconds: f"{seconds}" + "[i]" * 2)
FILES = (Clip((0.0, 1.0), 1.0), Clip((0.5,), 1.0))


def test_video_files_stand_after_the_images_or_at_their_placeholders() -> None:
    default = render("raw", "x", 1, 2, SECONDS, FILES)
    assert default == "[i](0.0, 1.0)[i][i](0.5,)[i][i]()[i][i]x"
    assert default.order == ()
    placed = render("raw", "<video>a<image>b<video><image><image>", 1, 2, SECONDS, FILES)
    assert placed == "(0.0, 1.0)[i][i]a[i]b(0.5,)[i][i]()[i][i]"
    assert placed.order == (1, 2, 0, 3, 4, 5, 6)
    separate = render("vqa", "<video>a<image>?<video>", 1, 0, BARE, FILES)
    assert separate == "<image><image>a<image>?<image> Answer:"
    assert separate.order == (1, 2, 0, 3)
    assert render("raw", "<video>?", 0, 0, SECONDS) == "<video>?"
    with pytest.raises(
        InvalidArgument, match=r"1 <image> and 1 <video> .* 1 images, 2 videos and 0"
    ):
        render("vqa", "<image><video>?", 1, 0, SECONDS, FILES)


def test_video_files_of_a_conversation_are_taken_in_the_order_of_its_parts() -> None:
    printing = replace(SECONDS, apply=lambda messages, start, goes_on: messages[0]["content"])
    parts = message(CLIP, PICTURE, "a", CLIP)
    prompt = render("chat", Chat([parts]), 1, 0, printing, FILES)
    assert prompt == "(0.0, 1.0)[i][i]\n[i]\na\n(0.5,)[i][i]"
    assert prompt.order == (1, 2, 0, 3, 4)
    task = render("vqa", Chat([parts]), 1, 0, BARE, FILES)
    assert (task, task.order) == ("<image><image><image>a<image> Answer:", (1, 2, 0, 3))
    for clips in (1, 3):
        with pytest.raises(InvalidArgument, match=f"have 1 <image> and {clips} <video> place"):
            render("chat", Chat([message(*[CLIP] * clips, PICTURE)]), 1, 0, printing, FILES)


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


def test_templates_that_need_content_parts_and_those_of_transformers_4_are_read(
    folder: Path,
) -> None:
    expected = ChatTemplate("USER: ", " ASSISTANT:")
    assert ChatTemplate.from_checkpoint(with_template(folder, PARTS)) == expected
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": PARTS}))
    assert ChatTemplate.from_checkpoint(folder) == expected
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


PICTURE, CLIP = {"type": "image"}, {"type": "video"}


def test_a_task_takes_one_message_whose_text_is_only_text() -> None:
    def ask(*parts: dict[str, str] | str, images: int = 1, frames: int = 0) -> str:
        return render("vqa", Chat([message(*parts)]), images, frames, BARE)

    assert ask(PICTURE, "a", "b") == "<image>, a\nb Answer:"
    assert ask("a ", PICTURE, " b") == "a <image> b Answer:"
    assert ask(CLIP, "a", images=0, frames=3) == "<image><image><image>, a Answer:"
    written = ask(PICTURE, "is <image> a tag?")
    assert written == "<image>, is <image> a tag? Answer:"
    (span,) = written.literals
    assert span == (12, 19)
    for chat_of in (Chat([message("a"), message("b")]), Chat([message("a", role="system")])):
        with pytest.raises(InvalidArgument, match="takes the text of one user message"):
            render("vqa", chat_of, 0, 0, BARE)


def test_roles_and_other_texts_of_a_message_are_only_text() -> None:
    printing = replace(BARE, apply=lambda messages, start, goes_on: str(messages[0]))
    turn = {**message("x"), "role": "<image>", "reasoning_content": "<image>"}
    prompt = render("chat", Chat([turn]), 0, 0, printing)
    assert [prompt[start:end] for start, end in prompt.literals] == ["<image>"] * 2


def test_a_text_of_very_many_special_tokens_is_refused() -> None:
    many = Chat([message(PICTURE, "<image>" * MAX_STAND_INS)])
    assert len(render("vqa", many, 1, 0, BARE).literals) == MAX_STAND_INS
    more = Chat([message(PICTURE, "<image>" * (MAX_STAND_INS + 1))])
    with pytest.raises(InvalidArgument, match="more than 32768 special tokens"):
        render("vqa", more, 1, 0, BARE)


def test_a_clip_is_printed_by_the_template_or_stands_in_its_place() -> None:
    printing = replace(
        BARE,
        image_text="[i]",
        clip_text=lambda frames, seconds: f"[{frames}]",
        apply=lambda messages, start, goes_on: str(messages[0]["content"]),
    )
    chat_of = Chat([message(PICTURE, CLIP, "x")])
    assert render("chat", chat_of, 1, 4, printing) == "[i]\n[4]\nx"
    parts = replace(printing, takes_parts=True, prints_images=True, video_text="{'type': 'video'}")
    assert render("chat", chat_of, 1, 4, parts) == (
        "[{'type': 'image'}, [4], {'type': 'text', 'text': 'x'}]"
    )
    turned = render("chat", Chat([message(CLIP, PICTURE, "x")]), 1, 4, parts)
    assert turned == "[[4], {'type': 'image'}, {'type': 'text', 'text': 'x'}]"
    for images in (0, 4):
        with pytest.raises(InvalidArgument, match=r"and 2 <video> .*, 0 videos and 4 frames"):
            render("chat", Chat([message(CLIP, CLIP)]), images, 4, printing)
    for task, template in product(("chat", "vqa"), (printing, replace(printing, clip_text=None))):
        with pytest.raises(InvalidArgument, match="'video', but the request has no frames; send"):
            render(task, Chat([message(CLIP, "x")]), 0, 0, template)


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


DETAILS = {"task": "detect", "adapter": None, "timings": {"queued": 0.0, "total": 0.25}}


def pictures(*sizes, frames=0):
    """Return the layout and size of pictures, of which the last `frames` are a clip.

    sizes: (height, width) of each.
    """
    flags = [0] * (len(sizes) - frames) + [1] * frames
    layout = [(4 * i, 4, 1, 2, 2, flag) for i, flag in enumerate(flags)]
    return {
        "layout": np.array(layout, np.int32).reshape(-1, 6),
        "size": np.array(sizes, np.int32).reshape(-1, 2),
    }


ONE_IMAGE = pictures((100, 200))


def result_of(text="", details=DETAILS, pictures=ONE_IMAGE, **options):
    result = json.loads(build_result(text=text, details=details, **pictures, **options))
    jsonschema.validate(result, result_schema())
    return result


def test_a_result_has_the_frames_of_each_video_file_with_their_times() -> None:
    shown = pictures((10, 20), *[(100, 200)] * 4, frames=4)
    text = "<ref>cat</ref><box>(0,0),(500,500)</box>"
    result = result_of(text, pictures=shown, videos=FILES)
    times = [[one["seconds"] for one in video["frames"]] for video in result["videos"]]
    assert times == [[0.0, 1.0], [0.5]]
    assert [one["index"] for one in result["frames"]] == [0]
    assert result["frames"][0]["objects"][0]["box"] == [0.0, 0.0, 100.0, 50.0]
    alone = result_of(text, pictures=pictures(*[(100, 200)] * 3, frames=3), videos=FILES)
    assert [len(one["objects"]) for one in alone["videos"][1]["frames"]] == [1]
    with pytest.raises(InvalidArgument, match="'image_videos' has 3 frames, 'image_layout' has 0"):
        result_of(text, pictures=pictures((10, 20)), videos=FILES)


@pytest.mark.parametrize("task", [*TASKS])
def test_the_result_of_each_task_follows_the_schema(task):
    assert "chat" in TASKS
    assert result_of("two birds", DETAILS | {"task": task})["task"] == task


def test_the_schema_is_valid_and_refuses_an_unknown_task():
    jsonschema.Draft202012Validator.check_schema(result_schema())
    with pytest.raises(jsonschema.ValidationError, match="'dance' is not one of"):
        result_of(details=DETAILS | {"task": "dance"})


def test_the_example_of_the_paper_is_parsed():
    text = (
        "<ref>airplane</ref><box>(767,0),(910,83)</box><box>(601,0),(748,76)</box>"
        "<box>(455,0),(587,64)</box>"
    )
    boxes, warnings = parse_boxes(text)
    assert warnings == []
    assert [box.label for box in boxes] == ["airplane"] * 3
    assert boxes[0].grid == (767, 0, 910, 83)


def test_boxes_of_a_clip_of_joined_frames_are_on_its_last_frame():
    clip = pictures((100, 200), (100, 200), frames=1)
    clip["layout"][1, 5] = 3
    result = result_of("<box>(100,250),(500,999)</box>", pictures=clip)
    assert [len(frame["objects"]) for frame in result["frames"]] == [0, 0, 1]
    assert len(result["images"]) == 1
    clip["layout"][1, 5] = 2**31 - 1
    with pytest.raises(InvalidArgument, match="more than 65536 images and frames"):
        result_of(pictures=clip)


def test_boxes_become_pixels_of_the_original_image_and_are_counted_by_name():
    result = result_of("<ref>red star</ref><box>(100,250),(500,999)</box>")
    box = {"box": [20.0, 25.0, 100.0, 99.9], "label": "red star", "score": None}
    assert result["images"] == [{"index": 0, "objects": [box]}]
    assert result["frames"] == []
    assert result["scores"] == {}
    a = "<ref>a</ref><box>(1,1),(2,2)</box><box>(3,3),(4,4)</box>"
    text = a + " and <ref>b</ref><box>(5,5),(6,6)</box>"
    assert result_of(text)["counts"] == {"a": 2, "b": 1}


def test_corners_may_come_in_either_order_and_an_unclosed_name_is_not_a_label():
    boxes, warnings = parse_boxes("<box> ( 9 , 8 ) ( 7 , 6 ) </box>")
    assert (boxes, warnings) == ([TextBox(None, (7, 6, 9, 8))], [])
    (box,), _ = parse_boxes("<ref>a</ref><ref>b<box>(1,2),(3,4)</box>")
    assert box.label is None


# Answers as the families' publishers print them, with the pixels and the label of each box in a
# picture of 100 x 200 pixels.
QWEN2 = (
    "<|object_ref_start|>the dog<|object_ref_end|><|box_start|>(500,250),(1000,1000)<|box_end|>"
    "<|box_start|>(0,0),(100,500)<|box_end|>"
)
QWEN2_BOXES = [([100, 25, 200, 100], "the dog"), ([0, 0, 20, 50], "the dog")]
JSON = """```json
[
\t{"bbox_2d": [28, 14, 112, 56], "label": "fox"},
\t{"bbox_2d": [112, 56, 56, 28], "text_content": "exit {"},
\t{"bbox_2d": [1.5, 0, 14, 7]}
]
```"""


@pytest.mark.parametrize(
    ("model_type", "text", "boxes"),
    [
        ("qwen", "<ref>a</ref><box>(500,250),(999,999)</box>", [([100, 25, 199.8, 99.9], "a")]),
        ("qwen2_vl", QWEN2, QWEN2_BOXES),
        ("qwen3_vl", QWEN2, QWEN2_BOXES),
        (
            "qwen3_vl",
            '{"bbox_2d": [500, 250, 1000, 1000], "label": "a"}',
            [([100, 25, 200, 100], "a")],
        ),
        # The resized picture has 56 x 112 pixels: 4 x 8 patches of 14 pixels.
        (
            "qwen2_5_vl",
            JSON.replace(" {", ""),
            [
                ([50, 25, 200, 100], "fox"),
                ([100, 50, 200, 100], "exit"),
                ([2.68, 0, 25, 12.5], None),
            ],
        ),
        ("qwen2_5_vl", "<|box_start|>(56,28),(112,56)<|box_end|>", [([100, 50, 200, 100], None)]),
        (
            "qwen2_5_vl",
            "<ref>a</ref><box>(500,250),(999,999)</box>",
            [([100, 25, 199.8, 99.9], "a")],
        ),
    ],
)
def test_boxes_are_read_as_each_family_writes_them(model_type, text, boxes, tmp_path):
    config = {
        "model_type": model_type,
        "vision_config": {"patch_size": 14, "spatial_patch_size": 14},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    picture = pictures((5, 5), (100, 200))
    picture["layout"][1, 3:5] = 4, 8
    result = result_of(text, pictures=picture, pixels_per_patch=pixels_per_patch(tmp_path))
    objects = result["images"][1]["objects"]
    assert [(one["box"], one["label"]) for one in objects] == boxes
    assert result["warnings"] == []


def test_a_box_off_the_resized_picture_is_omitted_with_a_warning(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    picture = pictures((100, 200))
    result = result_of(JSON, pictures=picture, pixels_per_patch=pixels_per_patch(tmp_path))
    assert (
        'not a box within 28 x 28 pixels: \'{"bbox_2d": [28, 14, 112, 56]' in result["warnings"][0]
    )


def test_a_layout_without_patches_is_refused_if_boxes_are_in_pixels(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    picture = pictures((100, 200))
    picture["layout"][0, 4] = 0
    with pytest.raises(InvalidArgument, match="h, w = 2, 0; they must be positive"):
        result_of(JSON, pictures=picture, pixels_per_patch=pixels_per_patch(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InvalidArgument, match=r"config\.json cannot be read"):
        pixels_per_patch(tmp_path)


@pytest.mark.parametrize(
    ("text", "boxes", "warning"),
    [
        ("<|box_start|>(1,2),(3,1001)<|box_end|>", 0, "not a box on the grid of 0-1000"),
        ("<|box_start|>(1,2),(3,4)</box>", 0, "</box> at character 24 closes nothing"),
        ('{"bbox_2d": [1, 2, 3]}', 0, "not a box on the grid"),
        ('{"bbox_2d": [1, 2, 3, true]}', 0, "not a box"),
        ('{"bbox_2d": [1, 2, 3, NaN]}', 0, "not a box"),
        ('{"bbox_2d": [1, 2, 3, 4], "bbox_2d": 0}', 0, "not a box"),
        ('{"bbox_2d": ' + "[" * 5000 + "}", 0, "not a box"),
        ('[{"bbox_2d": [1, 2, 3, 4]}, {"bbox_2d": [5, 6', 1, '1 "bbox_2d" outside of a complete'),
        (JSON, 2, '1 "bbox_2d" outside of a complete'),
        ("<ref>a</ref><box>(1,2),(3,1000)</box>", 0, "not a box on the grid of 0-999"),
        ("<box>(1,2),(3)</box>", 0, "not a box"),
        ("<box>(-1,2),(3,4)</box>", 0, "not a box"),
        ("<box>(1,2),(3,4)", 0, "<box> at character 0 is not closed"),
        ("(1,2)</box><box>(1,2),(3,4)</box>", 1, "</box> at character 5 closes nothing"),
        ("<ref>a<box>(1,2),(3,4)</box>", 1, "<ref> at character 0 is not closed"),
        ("<ref>a</box>", 0, "</box> at character 6 closes nothing"),
    ],
)
def test_a_malformed_box_is_omitted_with_a_warning(text, boxes, warning):
    parsed, warnings = parse_boxes(text)
    assert len(parsed) == boxes
    assert warning in warnings[0]
    assert result_of(text)["warnings"] == warnings


def test_boxes_are_on_the_last_of_several_pictures():
    text = "<ref>a</ref><box>(0,0),(500,500)</box>"
    result = result_of(text, pictures=pictures((10, 10), (20, 20), (40, 80), frames=1))
    assert [picture["index"] for picture in result["images"]] == [0, 1]
    assert [picture["objects"] for picture in result["images"]] == [[], []]
    assert [picture["index"] for picture in result["frames"]] == [0]
    assert result["frames"][0]["objects"][0]["box"] == [0, 0, 40, 20]


def test_boxes_without_an_image_give_a_warning():
    result = result_of("<box>(1,2),(3,4)</box>", pictures=pictures())
    assert result["images"] == []
    assert result["warnings"] == ["the request has no image for 1 boxes"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"details": {"task": "vqa"}}, "lacks 'adapter'"),
        ({"labels": ["a"], "scores": []}, "the head has 1 labels and 0 scores"),
        ({"labels": ["a"], "scores": [float("nan")]}, "finite"),
        ({"size": np.zeros((2, 2), np.int32)}, "has 1 rows, 'image_size' has 2"),
        ({"layout": np.zeros((1, 5), np.int32)}, r"\[n, 6\]"),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(changes, message):
    values = {"text": "", "details": DETAILS, **pictures((8, 8))} | changes
    with pytest.raises(InvalidArgument, match=message):
        build_result(**values)


FRAGMENTS = st.sampled_from(
    [
        "<ref>",
        "</ref>",
        "<box>",
        "</box>",
        "<|box_start|>",
        "<|box_end|>",
        "(12,34)",
        ",",
        "star",
        "(999,0)",
        "(1000,1000)",
        '{"bbox_2d": ',
        "[1, 2, 3.5, 1000]",
        "}",
    ]
)


@settings(deadline=None)
@given(st.one_of(st.text(), st.lists(FRAGMENTS | st.text(max_size=3)).map("".join)))
def test_any_text_gives_boxes_within_the_image(text):
    result = result_of(text, pictures=pictures((30, 50)))
    assert result["text"] == text
    for item in result["images"][0]["objects"]:
        left, top, right, bottom = item["box"]
        assert 0 <= left <= right <= 50
        assert 0 <= top <= bottom <= 30


def test_hostile_text_takes_linear_time():
    start = time.process_time()
    parse_boxes("<ref>" * 20_000 + "<box>(" * 20_000 + '{"bbox_2d": [' * 20_000)
    assert time.process_time() - start < 1
