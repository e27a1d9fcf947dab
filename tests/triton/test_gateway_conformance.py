"""Tests of requests of the OpenAI API, field by field: effects of values, and refusals.

The cases follow OpenAI's reference and the fields that vLLM adds. Comments say where this server
differs.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from tests.support.gateway import Gateway
from tests.support.triton_client import picture
from vlora.gateway.requests import CHAT as READ_BY_CHAT
from vlora.gateway.requests import NEUTRAL, NO_EFFECT, OWN, PASSED
from vlora.sampling import REFUSED as REFUSED_KEYS
from vlora.structured.structure import STRUCTURE_KEYS

pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
LIMIT = 3


def user(content: Any, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **fields}]


def image(url: str | None = None, **fields: Any) -> dict[str, Any]:
    data = "data:image/png;base64," + base64.b64encode(picture()).decode()
    return {"type": "image_url", "image_url": {"url": url or data, **fields}}


TEXT = {"type": "text", "text": "What color is the square?"}
IMAGE, SHARP, ELSEWHERE = image(), image(detail="sharp"), image("http://example.org/a.png")
PART = "messages[0].content[0]"
FUNCTION = {"type": "function", "function": {"name": "f"}}
ASSISTANT = {"role": "assistant", "content": "A square."}

LONG = {"regex": "[a-z ]{40}"}
STRUCTURES = {
    "structured_outputs": LONG,
    "guided_decoding": LONG,
    "guided_regex": LONG["regex"],
    "guided_json": {"type": "string", "minLength": 40},
    "guided_json_object": True,
    "guided_grammar": 'start: "a"{40}',
}
"""Structures of more than LIMIT tokens."""

ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, fields)
    for fields in (
        {"model": "all-r8"},
        {"messages": user("hello")},
        {"messages": user([TEXT, TEXT])},
        {"messages": user([image(), TEXT])},
        {"messages": user([TEXT, image()])},
        {"messages": user([image(detail="auto"), TEXT])},
        # The checkpoint's image processor decides on the resolution, so `detail` has no effect.
        {"messages": user([image(detail="high"), TEXT])},
        # OpenAI's models read the name of a participant; chat templates have none.
        {"messages": user("x", name="ann")},
        {"messages": [{"role": "system", "content": "Be brief."}, *user("hello")]},
        {"messages": [{"role": "developer", "content": "Be brief."}, *user("hello")]},
        {"messages": [*user("hello"), ASSISTANT, *user("And now?")]},
        {"messages": [*user("hello"), ASSISTANT]},
        {"temperature": 0},
        {"temperature": 2},
        {"temperature": None},
        {"top_p": 0.5},
        {"n": 1},
        {"stop": None},
        {"stop": []},
        {"seed": 1},
        {"seed": -1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -2},
        {"logit_bias": {}},
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 2},
        {"max_completion_tokens": LIMIT},
        {"response_format": {"type": "text"}},
        {"stream": None},
        {"tools": []},
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"parallel_tool_calls": True},
        {"user": "ann"},
        {"metadata": {"a": "b"}},
        {"store": False},
        {"service_tier": "auto"},
        {"service_tier": "flex"},  # All tiers are the same here.
        {"stream_interval_ms": 0},
        {"reasoning_effort": "none"},
        {"modalities": ["text"]},
        {"top_k": 5},
        {"top_k": -1},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"min_tokens": 1},
        {"priority": 1},
        {"best_of": 1},
        {"task": "vqa"},
        {"function_call": "none"},
        {"functions": []},
        {"moderation": None},
        {"prompt_cache_key": "k"},
        {"prompt_cache_options": {"mode": "explicit"}},
        {"prompt_cache_retention": "24h"},
        {"safety_identifier": "s"},
        {"verbosity": "medium"},
        {"add_generation_prompt": True},
        {"continue_final_message": False},
        {
            "add_special_tokens": False,
            "bootstrap_host": None,
            "cache_salt": None,
            "chat_template": None,
            "chat_template_kwargs": {},
            "custom_logit_processor": None,
            "custom_params": {},
            "data_parallel_rank": None,
            "documents": [],
            "ebnf": None,
            "include_reasoning": True,
            "kv_transfer_params": None,
            "lora_path": None,
            "media_io_kwargs": {"video": {"num_frames": 4}},
            "mm_processor_kwargs": {},
            "no_stop_trim": False,
            "regex": None,
            "request_id": "r",
            "return_hidden_states": False,
            "return_token_ids": False,
            "return_tokens_as_token_ids": False,
            "rid": "r",
            "separate_reasoning": True,
            "session_params": None,
            "stop_regex": [],
            "stream_reasoning": False,
            "vllm_xargs": {},
        },
        {"stop_token_ids": []},
        {"include_stop_str_in_output": True},
        {"skip_special_tokens": True},
        {"word_probabilities": ["yes", "no"]},
        {"skip_special_tokens": False},
        {"deadline_ms": 600_000},
        {"stream_id": "camera", "supersede": False},
        *({key: value, "ignore_eos": False} for key, value in STRUCTURES.items()),
    )
] + [
    (COMPLETION, fields)
    for fields in (
        {"prompt": "hello"},
        {"prompt": ["hello"]},
        {"echo": False},
        {"suffix": ""},
        {"logprobs": 0},
        {"logprobs": 2},
        {"n": 1},
        {"model": "all-r8"},
        {"temperature": 1},
        {"top_p": 0.5},
        {"seed": 1},
        {"stop": []},
        {"stream": False},
        {"stream_options": None},
        {"max_tokens": LIMIT},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"logit_bias": {}},
        {"best_of": 1},
        {"user": "ann"},
    )
]
"""Fields that leave an answer of LIMIT tokens, which is cut by its length."""

REFUSED: list[tuple[str, dict[str, Any], int, str, str | None]] = [
    (CHAT, *case)
    for case in (
        ({"model": None}, 400, "INVALID_ARG", "model"),
        ({"model": 7}, 400, "INVALID_ARG", "model"),
        ({"model": "gpt-4o"}, 404, "NOT_FOUND", "model"),
        ({"messages": None}, 400, "INVALID_ARG", "messages"),
        ({"messages": []}, 400, "INVALID_ARG", "messages"),
        ({"messages": "hello"}, 400, "INVALID_ARG", "messages"),
        ({"messages": [1]}, 400, "INVALID_ARG", "messages[0]"),
        ({"messages": [{"content": "x"}]}, 400, "INVALID_ARG", "messages[0].role"),
        # Tools do not exist here, so no message has their role.
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "INVALID_ARG", "messages[0].role"),
        ({"messages": user(None)}, 400, "INVALID_ARG", "messages[0].content"),
        ({"messages": user([])}, 400, "INVALID_ARG", "messages[0].content"),
        ({"messages": user([{"type": "text"}])}, 400, "INVALID_ARG", PART),
        ({"messages": user("x", name=7)}, 400, "INVALID_ARG", "messages[0].name"),
        ({"messages": user("x", extra=1)}, 400, "INVALID_ARG", "messages[0].extra"),
        ({"messages": user([{"type": "input_audio"}])}, 400, "UNSUPPORTED", f"{PART}.type"),
        ({"messages": user([IMAGE | {"image_url": "x"}])}, 400, "INVALID_ARG", f"{PART}.image_url"),
        ({"messages": user([ELSEWHERE])}, 403, "PERMISSION_DENIED", f"{PART}.image_url.url"),
        ({"messages": user([SHARP])}, 400, "INVALID_ARG", f"{PART}.image_url.detail"),
        ({"temperature": -0.1}, 400, "INVALID_ARG", "temperature"),
        ({"temperature": "hot"}, 400, "INVALID_ARG", "temperature"),
        ({"temperature": True}, 400, "INVALID_ARG", "temperature"),
        ({"top_p": 0}, 400, "INVALID_ARG", "top_p"),
        ({"top_p": 1.5}, 400, "INVALID_ARG", "top_p"),
        # Several answers to one question are several requests with different seeds.
        ({"n": 2}, 400, "UNSUPPORTED", "n"),
        ({"stop": 7}, 400, "INVALID_ARG", "stop"),
        ({"stop": ""}, 400, "INVALID_ARG", "stop"),
        ({"max_tokens": 0}, 400, "INVALID_ARG", "max_tokens"),
        ({"max_tokens": "x"}, 400, "INVALID_ARG", "max_tokens"),
        # OpenAI cuts the answer instead; a limit that cannot be kept is an error here.
        ({"max_tokens": 10**9}, 400, "INVALID_ARG", "max_tokens"),
        ({"max_completion_tokens": 4}, 400, "INVALID_ARG", "max_completion_tokens"),
        ({"seed": "a"}, 400, "INVALID_ARG", "seed"),
        ({"seed": 2**64}, 400, "INVALID_ARG", "seed"),
        ({"presence_penalty": 3}, 400, "INVALID_ARG", "presence_penalty"),
        ({"frequency_penalty": -2.1}, 400, "INVALID_ARG", "frequency_penalty"),
        ({"logit_bias": {"5": -100}}, 400, "UNSUPPORTED", "logit_bias"),
        ({"logprobs": 1}, 400, "INVALID_ARG", "logprobs"),
        ({"top_logprobs": 2}, 400, "INVALID_ARG", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "INVALID_ARG", "top_logprobs"),
        ({"stream": "yes"}, 400, "INVALID_ARG", "stream"),
        ({"stream_options": {"include_usage": True}}, 400, "INVALID_ARG", "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, 400, "INVALID_ARG", "stream_options"),
        ({"response_format": {"type": "xml"}}, 400, "INVALID_ARG", "response_format"),
        ({"response_format": "json"}, 400, "INVALID_ARG", "response_format"),
        ({"tools": [FUNCTION]}, 400, "UNSUPPORTED", "tools"),
        ({"tool_choice": "required"}, 400, "UNSUPPORTED", "tool_choice"),
        ({"store": True}, 400, "UNSUPPORTED", "store"),
        ({"service_tier": "best"}, 400, "UNSUPPORTED", "service_tier"),
        ({"reasoning_effort": "high"}, 400, "UNSUPPORTED", "reasoning_effort"),
        ({"modalities": ["text", "audio"]}, 400, "UNSUPPORTED", "modalities"),
        ({"tempature": 1}, 400, "INVALID_ARG", "tempature"),
        ({"lora_name": "all-r8"}, 400, "INVALID_ARG", "lora_name"),
        ({"top_k": "x"}, 400, "INVALID_ARG", "top_k"),
        ({"min_p": 2}, 400, "INVALID_ARG", "min_p"),
        ({"repetition_penalty": 0}, 400, "INVALID_ARG", "repetition_penalty"),
        ({"min_tokens": 9}, 400, "INVALID_ARG", "min_tokens"),
        ({"audio": {"voice": "a"}}, 400, "UNSUPPORTED", "audio"),
        ({"function_call": {"name": "f"}}, 400, "UNSUPPORTED", "function_call"),
        ({"functions": [{"name": "f"}]}, 400, "UNSUPPORTED", "functions"),
        ({"prediction": {"type": "content"}}, 400, "UNSUPPORTED", "prediction"),
        ({"verbosity": "high"}, 400, "UNSUPPORTED", "verbosity"),
        ({"web_search_options": {}}, 400, "UNSUPPORTED", "web_search_options"),
        ({"continue_final_message": True}, 400, "INVALID_ARG", "continue_final_message"),
        ({"choices": []}, 400, "INVALID_ARG", "choices"),
        # A choice is never cut.
        ({"guided_choice": ["a" * 40], "ignore_eos": False}, 400, "INVALID_ARG", None),
        ({"ignore_eos": "x"}, 400, "INVALID_ARG", "ignore_eos"),
        *(({key: 7}, 400, "UNSUPPORTED", key) for key in REFUSED_KEYS),
    )
] + [
    (COMPLETION, *case)
    for case in (
        ({"prompt": None}, 400, "INVALID_ARG", "prompt"),
        ({"prompt": ["a", "b"]}, 400, "INVALID_ARG", "prompt"),
        ({"prompt": [1, 2]}, 400, "INVALID_ARG", "prompt"),
        ({"echo": True}, 400, "UNSUPPORTED", "echo"),
        ({"suffix": "x"}, 400, "UNSUPPORTED", "suffix"),
        ({"logprobs": 21}, 400, "INVALID_ARG", "logprobs"),
        ({"logprobs": True}, 400, "INVALID_ARG", "logprobs"),
        ({"best_of": 2}, 400, "UNSUPPORTED", "best_of"),
        ({"messages": []}, 400, "INVALID_ARG", "messages"),
    )
]
"""Fields, and the status, code and parameter of their error."""


def body_of(path: str, fields: dict[str, Any]) -> bytes:
    asked = {"messages": user("hello")} if path == CHAT else {"prompt": "hello"}
    common = {"model": "base", "max_tokens": LIMIT, "ignore_eos": True}
    return json.dumps({**common, **asked, **fields}).encode()


def name_of(case: Any) -> str | None:
    return json.dumps(case)[:60] if isinstance(case, dict) else None


def fields_with_cases(path: str) -> set[str]:
    return {name for case in (*ACCEPTED, *REFUSED) if case[0] == path for name in case[1]}


@pytest.mark.parametrize(("path", "module"), [(CHAT, "types.chat"), (COMPLETION, "types")])
def test_every_field_of_the_official_package_has_a_case(path: str, module: str) -> None:
    name = f"openai.{module}.completion_create_params"
    types = pytest.importorskip(name, reason="the package openai is not installed")
    ways = (types.CompletionCreateParamsNonStreaming, types.CompletionCreateParamsStreaming)
    official = {field for one in ways for field in one.__annotations__}
    assert official > {"model", "stop", "stream"}
    assert official - fields_with_cases(path) == set()


def test_every_field_that_the_gateway_knows_has_a_case() -> None:
    known = READ_BY_CHAT | OWN | PASSED | NEUTRAL.keys() | NO_EFFECT | STRUCTURE_KEYS.keys()
    assert known - fields_with_cases(CHAT) - fields_with_cases(COMPLETION) == set()


@pytest.mark.parametrize(("path", "fields"), ACCEPTED, ids=name_of)
def test_an_answer_has_the_form_of_the_api(
    gateway: Gateway, path: str, fields: dict[str, Any]
) -> None:
    status, text = gateway.http(path, body_of(path, fields))
    answer = json.loads(text)
    assert status == 200, answer
    kind, prefix = (
        ("chat.completion", "chatcmpl-") if path == CHAT else ("text_completion", "cmpl-")
    )
    assert answer["object"] == kind
    assert answer["id"].startswith(prefix)
    assert answer["model"] == fields.get("model", "base")
    assert isinstance(answer["created"], int)
    (choice,) = answer["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    if path == CHAT:
        assert choice["message"]["role"] == "assistant"
    words = choice["message"]["content"] if path == CHAT else choice["text"]
    assert isinstance(words, str)
    usage = answer["usage"]
    assert usage["completion_tokens"] == LIMIT
    assert usage["total_tokens"] == usage["prompt_tokens"] + LIMIT
    assert (choice["logprobs"] is not None) == ("logprobs" in fields)


@pytest.mark.parametrize(("path", "fields", "status", "code", "param"), REFUSED, ids=name_of)
def test_an_error_names_the_field(
    gateway: Gateway, path: str, fields: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    given, text = gateway.http(path, body_of(path, fields))
    error = json.loads(text)["error"]
    assert (given, error["code"], error["param"]) == (status, code, param), error
    assert error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_a_stream_ends_with_the_usage_and_done(gateway: Gateway, path: str) -> None:
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    status, text = gateway.http(path, body_of(path, fields))
    assert status == 200
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == LIMIT
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
