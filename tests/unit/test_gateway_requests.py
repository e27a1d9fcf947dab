"""Tests that the fields of a request's body are read, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vlora.errors import BY_CODE
from vlora.gateway.errors import STATUSES, ApiError
from vlora.gateway.messages import MAX_MEDIA
from vlora.gateway.requests import MAX_COMMAS, Ask, read_body, read_chat, read_completion

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def chat(*parts: Any, **fields: Any) -> Ask:
    messages = [{"role": "user", "content": list(parts) or "What?"}]
    return read_chat({"model": "base", "messages": messages, **fields})


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    return refused.value


def parts_of(ask: Ask) -> list[list[dict[str, str]]]:
    return [turn["content"] for turn in json.loads(ask.conversation.text)["messages"]]


def test_texts_and_images_become_parts_in_their_order() -> None:
    ask = chat(text("a <image>"), IMAGE, text(" b"))
    assert parts_of(ask) == [[text("a <image>"), {"type": "image"}, text(" b")]]
    assert [media.param for media in ask.conversation.images] == [
        "messages[0].content[1].image_url.url"
    ]
    assert parts_of(chat()) == [[text("What?")]]


def test_the_message_of_the_task_raw_is_a_prompt() -> None:
    assert chat(IMAGE, IMAGE, text("Same?"), task="raw").conversation.text == "Same?"
    assert chat(text("a "), IMAGE, text(" b"), task="raw").conversation.text == "a <image> b"
    assert chat(IMAGE, text("a <image> b"), task="raw").conversation.text == "a <image> b"
    assert not chat(text("a"), task="raw").has_messages
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert refusal(messages=turns, task="raw").param == "messages"


def test_a_clip_is_a_list_of_frames() -> None:
    clip = {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AA,BB,CC"}}
    frames = chat(clip, text("What happens?")).conversation.frames
    assert [frame.url.rpartition(",")[2] for frame in frames] == ["AA", "BB", "CC"]


@pytest.mark.parametrize("frames", [0, 1000])
def test_the_number_of_images_and_frames_is_limited_before_they_are_read(frames: int) -> None:
    clip = "data:video/jpeg;base64," + ",".join(["AA"] * frames)
    parts = [IMAGE] * (MAX_MEDIA - frames)
    parts += [{"type": "video_url", "video_url": {"url": clip}}] if frames else []
    read = chat(*parts).conversation
    assert len(read.images) + len(read.frames) == MAX_MEDIA
    with pytest.raises(ApiError, match="has 1025 or more images and frames; the limit is 1024"):
        chat(IMAGE, *parts)


def test_all_messages_are_passed_on_with_their_roles_and_options() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [IMAGE, text("What is it?")]},
        {"role": "assistant", "content": "A"},
    ]
    prefilled = {"add_generation_prompt": False, "continue_final_message": True}
    ask = read_chat({"model": "base", "messages": messages, **prefilled})
    sent = json.loads(ask.conversation.text)
    assert ask.task is None
    assert ask.has_messages
    assert [turn["role"] for turn in sent["messages"]] == ["system", "user", "assistant"]
    assert {name: sent[name] for name in prefilled} == prefilled
    assert refusal(**prefilled).param == "continue_final_message"


def test_a_chat_is_greedy_and_as_long_as_the_context_unless_it_says_otherwise() -> None:
    assert chat().sampling == {"temperature": 0, "stream_interval_ms": 20, "max_tokens": None}
    given = chat(temperature=0.5, max_completion_tokens=7, top_k=3, stop=["."], seed=1, user="me")
    assert given.sampling == {
        "temperature": 0.5,
        "stream_interval_ms": 20,
        "max_tokens": 7,
        "top_k": 3,
        "stop": ["."],
        "seed": 1,
    }


@pytest.mark.parametrize(
    ("fields", "structure"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}},
            {"json": {"a": 1}},
        ),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"], "json": None}}, {"choice": ["a", "b"]}),
    ],
)
def test_every_way_to_restrict_the_answer_becomes_structured_outputs(
    fields: dict[str, Any], structure: dict[str, Any] | None
) -> None:
    sent = chat(**fields).sampling.get("structured_outputs")
    assert (sent and json.loads(sent)) == structure


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"model": None}, "INVALID_ARG", "model"),
        ({"model": 5}, "INVALID_ARG", "model"),
        ({"model": "m" * 257}, "INVALID_ARG", "model"),
        ({"messages": []}, "INVALID_ARG", "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "INVALID_ARG", "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "UNSUPPORTED",
            "messages[0].content[0].type",
        ),
        ({"temprature": 1}, "INVALID_ARG", "temprature"),
        ({"lora_name": "a"}, "INVALID_ARG", "lora_name"),
        ({"tools": [{"type": "function"}]}, "UNSUPPORTED", "tools"),
        ({"store": True}, "UNSUPPORTED", "store"),
        ({"stream": "yes"}, "INVALID_ARG", "stream"),
        ({"stream_options": {"include_usage": True}}, "INVALID_ARG", "stream_options"),
        ({"top_logprobs": 3}, "INVALID_ARG", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "INVALID_ARG", "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "INVALID_ARG", "max_completion_tokens"),
        ({"response_format": {"type": "xml"}}, "INVALID_ARG", "response_format"),
        ({"guided_regex": "a", "guided_json": {}}, "INVALID_ARG", "guided_regex"),
    ],
)
def test_a_field_that_cannot_be_served_is_refused_by_name(
    fields: dict[str, Any], code: str, param: str
) -> None:
    error = refusal(**fields)
    assert (error.code, error.param) == (code, param)
    assert json.loads(error.as_json())["error"]["type"] == "invalid_request_error"


def test_a_completion_has_one_prompt_and_a_number_of_alternatives() -> None:
    ask = read_completion({"model": "base", "prompt": ["Once"], "logprobs": 2, "max_tokens": 3})
    assert (ask.conversation.text, ask.top_logprobs, ask.task) == ("Once", 2, None)
    for wrong in ({"prompt": ["a", "b"]}, {"prompt": [1]}, {"prompt": "a", "logprobs": "5"}):
        with pytest.raises(ApiError, match="must be"):
            read_completion({"model": "base", **wrong})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\xff", "UTF-8 at byte 0"),
        (b"[]", "must be a JSON object"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", "64 levels"),
        (b'{"a": [' + b"0," * MAX_COMMAS + b"0, 0]}", "commas"),
    ],
)
def test_a_body_is_one_json_object_of_bounded_depth_and_number_of_values(
    body: bytes, message: str
) -> None:
    with pytest.raises(ApiError, match=message):
        read_body(body)


def test_an_unknown_field_with_a_long_name_is_refused_without_a_search() -> None:
    error = refusal(**{"x" * 10_000_000: 1})
    assert len(error.message) < 300
    assert len(error.param or "") < 100


def test_every_error_of_the_server_has_a_status() -> None:
    assert set(BY_CODE) <= STATUSES.keys()
