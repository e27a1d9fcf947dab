"""Tests of boxes, labels and counts from text, and of `result`, which follows its schema."""

import json
import time

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlora.errors import InvalidArgument
from vlora.vision.prompts import TASKS
from vlora.vision.results import TextBox, build_result, parse_boxes, result_schema

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


@pytest.mark.parametrize(
    ("text", "boxes", "warning"),
    [
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
    ["<ref>", "</ref>", "<box>", "</box>", "(12,34)", ",", "star", "(999,0)"]
)


@given(st.one_of(st.text(), st.lists(FRAGMENTS | st.text(max_size=3)).map("".join)))
def test_any_text_gives_boxes_within_the_image(text):
    result = result_of(text, pictures=pictures((30, 50)))
    assert result["text"] == text
    for item in result["images"][0]["objects"]:
        left, top, right, bottom = item["box"]
        assert 0 <= left <= right < 50
        assert 0 <= top <= bottom < 30


def test_hostile_text_takes_linear_time():
    start = time.perf_counter()
    parse_boxes("<ref>" * 20_000 + "<box>(" * 20_000)
    assert time.perf_counter() - start < 1
