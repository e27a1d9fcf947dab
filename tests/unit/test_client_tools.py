"""Tests of the load inputs, of the sweep with perf_analyzer, and of the demo of answers."""

import io
import json
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from benchmarks.perf_analyzer import sweep
from clients.common import ClientError
from tests.support.fake_triton import FakeTriton
from tools.demo import show
from tools.demo.pictures import INK, RIGHT, SIDE, WRONG, draw_answer
from tools.demo.show import is_right

BOX = "<ref>a</ref><box>(0,0),(500,500)</box>"
GREY = np.full((64, 64, 3), 128, np.uint8)


@pytest.mark.parametrize("model", sweep.MODELS)
def test_load_inputs_are_distinct_and_alternate_between_adapters(model, tmp_path):
    path = sweep.write_inputs(tmp_path / "in.json", model, ["base", "a", "b"], images=12, tokens=7)
    data = json.loads(path.read_text())["data"]
    given = [json.loads(entry["sampling_parameters"][0]) for entry in data]
    assert [g.get("lora_name") for g in given] == [None, "a", "b"] * 4
    assert all(g["max_tokens"] == g["min_tokens"] == 7 for g in given)
    pictures = [str(entry.get("image") or entry.get("frames")) for entry in data]
    assert len(set(pictures)) == (1 if model == "lmm-text" else 12)


def test_a_sweep_row_contains_rates_and_means():
    names = [f"vlora:{name}_total" for name in sweep.COUNTERS]
    before = dict(zip(names, (10, 5, 100.0, 10.0), strict=True))
    after = dict(zip(names, (22, 9, 148.0, 14.0), strict=True))
    times = [(0.0, 0.1, 0.4), (0.5, 0.8, 1.0)]
    row = sweep.summarize(times, before, after)
    assert row["requests_per_second"] == pytest.approx(2.0)
    assert (row["first_p50_ms"], row["last_p50_ms"]) == (pytest.approx(100), pytest.approx(400))
    assert row["last_p95_ms"] == pytest.approx(500)
    assert (row["encoder_batch"], row["decode_rows"]) == (3.0, 12.0)
    assert sweep.summarize(times, before, before)["encoder_batch"] is None


def test_times_are_read_from_a_profile_that_is_not_valid_json():
    profile = (
        b'{"requests":[{"timestamp":1000000000,"request_inputs":{"a":"\xff[1"},'
        b'"response_timestamps":[1500000000,2000000000],"response_outputs":["\x00"},'
        b'{"timestamp":3000000000,"response_timestamps":[4000000000],"x":"'
    )
    assert sweep.read_times(profile) == [(1.0, 1.5, 2.0), (3.0, 4.0, 4.0)]


def test_metrics_are_summed_over_labels(tmp_path):
    page = tmp_path / "metrics"
    page.write_text('# HELP a\na{x="1"} 2\na{x="2"} 3\nb 1e3\n')
    assert sweep.read_metrics(page.as_uri()) == {"a": 5.0, "b": 1000.0}
    with pytest.raises(ClientError, match="--metrics-url"):
        sweep.read_metrics("http://127.0.0.1:9/metrics")


@pytest.mark.parametrize(
    ("expected", "given", "right"),
    [
        ("blue", "blue", True),
        ("blue", "red", False),
        ("<ref>a</ref><box>(0,0),(500,500)</box>", "<ref>a</ref><box>(9,0),(490,500)</box>", True),
        ("<ref>a</ref><box>(0,0),(500,500)</box>", "<ref>b</ref><box>(0,0),(500,500)</box>", False),
        (
            "<ref>a</ref><box>(0,0),(500,500)</box>",
            "<ref>a</ref><box>(400,0),(900,500)</box>",
            False,
        ),
        ("<ref>a</ref><box>(0,0),(500,500)</box>", "nothing", False),
    ],
)
def test_a_demo_answer_is_judged_by_words_and_box_overlap(expected, given, right):
    assert is_right(expected, given) is right


def test_the_demo_reports_that_it_starts_a_server_without_a_terminal(monkeypatch):
    said = io.StringIO()
    with FakeTriton() as server:
        server.grpc_url = server.url
        monkeypatch.setattr(show, "TritonServer", lambda: nullcontext(server))
        with show.server_at("127.0.0.1:9", Console(file=said)):
            pass
    assert said.getvalue().startswith("no server at 127.0.0.1:9: starting one")


def test_the_demo_table_shows_boxes_without_tags_and_the_expected_answer():
    sample = show.Sample("s", "detect", None, "a", BOX, (), [], [], is_video=False)
    said = io.StringIO()
    wrong = BOX.replace("500,500", "90,90")
    table = show.table_of([sample, sample], [show.Answer(BOX, 0.1), show.Answer(wrong, 0.1)])
    Console(file=said, width=80).print(table)
    shown = said.getvalue()
    words = " ".join(shown.split())
    assert words.count("from (0,0) to (500,500)") == 2
    assert "expected: a in the box" in words
    assert "<box>" not in shown


def test_the_demo_pictures_show_boxes_in_words(monkeypatch, tmp_path):
    shown = []
    monkeypatch.setattr(
        show, "draw_answer", lambda *given: shown.append(given) or draw_answer(*given)
    )
    sample = show.Sample("s", "detect", None, "a", BOX, (), [GREY], [], is_video=False)
    clip = replace(sample, name="clip", frames=[GREY] * 6)
    found = [{"box": [1, 2, 30, 40], "label": "a"}]
    answer = show.Answer(BOX.replace("(0,", "(10,"), 0.1, found)
    wrong = show.Answer("none", 0.1)
    show.draw([sample, clip], [answer, wrong], tmp_path)
    for one in (sample, clip):
        with Image.open(tmp_path / f"{one.name}.png") as picture:
            assert picture.width == SIDE * len(one.frames)
    asked = ("detect · base · a", INK)
    assert [texts for _, _, texts in shown] == [
        [asked, ("answer: a in the box from (10,0) to (500,500)", RIGHT)],
        [
            asked,
            ("answer: none", WRONG),
            ("expected: a in the box from (0,0) to (500,500)", WRONG),
        ],
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("none", "none"),
        (
            BOX + "<box>(1,2),(3,4)</box> x",
            "a in the boxes from (0,0) to (500,500) and from (1,2) to (3,4) x",
        ),
        ("<ref>a</ref><box>(1,2)</box>", "<ref>a</ref><box>(1,2)</box>"),
    ],
)
def test_boxes_of_an_answer_are_put_into_words(text, words):
    assert show.in_words(text) == words
