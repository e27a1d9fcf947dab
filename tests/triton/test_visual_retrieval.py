"""Tests of `visual_retrieval`, which takes images and a question and streams its answer."""

import base64
import itertools
from typing import Any
from urllib.parse import urlsplit

import pytest

from clients.common import ClientError, connect
from tests.support.triton_client import Asker, Refused, Response, picture
from vlora.tasks import TASKS

RETRIEVAL = "visual_retrieval"
IGNORE_EOS = {"ignore_eos": True}


def test_deltas_are_streamed_without_the_prompt(ask: Asker) -> None:
    responses = ask.stream(
        RETRIEVAL,
        text_input="What is this?",
        image=picture(),
        sampling_parameters={"max_tokens": 100, **IGNORE_EOS},
    )
    assert "What is this?" not in "".join(response["text_output"] for response in responses)
    new = [response["num_output_tokens"] for response in responses]
    assert sum(new) == 100
    assert len(new) >= 2
    assert min(new) >= 1


def test_every_response_has_all_outputs(ask: Asker) -> None:
    responses = ask.stream(RETRIEVAL, text_input="What is this?", image=picture(), metadata="m-1")
    names = {
        "text_output",
        "finish_reason",
        "num_input_tokens",
        "num_output_tokens",
        "metadata_output",
    }
    assert all(set(response.outputs) == names for response in responses)
    metadata = [response["metadata_output"] for response in responses]
    assert metadata == [""] * (len(responses) - 1) + ["m-1"]
    assert len({response["num_input_tokens"] for response in responses}) == 1


def test_any_subset_of_the_outputs_may_be_requested(ask: Asker) -> None:
    every = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens")
    every += ("metadata_output",)
    request = {"text_input": "What is this?", "image": picture(), "metadata": "m"}

    def total(responses: list[Response], name: str) -> Any:
        """Combine all responses: join deltas, and take other outputs from the last response."""
        values = [response[name] for response in responses]
        if name == "text_output":
            return "".join(values)
        return sum(values) if name == "num_output_tokens" else values[-1]

    whole = ask.stream(RETRIEVAL, **request)
    for names in (n for size in range(1, 6) for n in itertools.combinations(every, size)):
        answers = ask.stream(RETRIEVAL, outputs=names, **request)
        assert all(set(response.outputs) == set(names) for response in answers)
        assert all(total(answers, name) == total(whole, name) for name in names)


def test_only_the_last_response_has_a_finish_reason(ask: Asker) -> None:
    responses = ask.stream(
        RETRIEVAL, text_input="Why?", sampling_parameters={"max_tokens": 3, **IGNORE_EOS}
    )
    *others, last = responses
    assert {response["finish_reason"] for response in others} <= {"None"}
    assert not any(response.final for response in others)
    assert (last["finish_reason"], last.final) == ("length", True)


def test_the_defaults_are_greedy_sampling_and_the_max_tokens_of_the_task(ask: Asker) -> None:
    request = {"text_input": "Same again?", "image": picture()}
    first, second = (ask.text(RETRIEVAL, **request) for _ in range(2))
    assert first == second
    for task in ("vqa", "caption"):
        responses = ask.stream(RETRIEVAL, task=task, sampling_parameters=IGNORE_EOS, **request)
        tokens = sum(response["num_output_tokens"] for response in responses)
        assert tokens == TASKS[task].max_tokens


def test_the_default_task_is_the_adapters_if_it_has_just_one(ask: Asker) -> None:
    def words(**extra: object) -> int:
        responses = ask.stream(RETRIEVAL, text_input="Tell me.", image=picture(), **extra)
        return int(responses[0]["num_input_tokens"])

    one, two = {"lora_name": "feed-forward-r16"}, {"lora_name": "head-r8"}
    assert words(sampling_parameters=one) == words(sampling_parameters=one, task="caption")
    assert words(sampling_parameters=two) == words(sampling_parameters=two, task="vqa")
    assert words() == words(task="vqa")


def test_base64_and_raw_bytes_are_the_same_image(ask: Asker) -> None:
    raw = picture()
    question = {"text_input": "What is this?"}
    assert ask.text(RETRIEVAL, image=raw, **question) == ask.text(
        RETRIEVAL, image=base64.b64encode(raw), **question
    )


def test_each_image_and_frame_takes_the_same_number_of_prompt_tokens(ask: Asker) -> None:
    def length(**extra: object) -> int:
        request = {"text_input": "What?", "sampling_parameters": {"max_tokens": 1}}
        return int(ask.stream(RETRIEVAL, **request, **extra)[0]["num_input_tokens"])

    one = length(image=[picture()] * 2) - length(image=picture())
    both = length(image=[picture()] * 2, frames=[picture()] * 3)
    assert both - length(image=picture()) == 4 * one


def test_adapters_answer_differently_from_the_base_and_from_each_other(ask: Asker) -> None:
    request = {"text_input": "What is this?", "image": picture()}
    texts = {
        ask.text(RETRIEVAL, sampling_parameters={"lora_name": name} if name else {}, **request)
        for name in ("", "attention-r4", "all-r8", "head-r8")
    }
    assert len(texts) == 4


def test_an_adapter_may_be_named_by_an_alias_or_in_the_request_parameters(ask: Asker) -> None:
    request = {"text_input": "What is this?", "image": picture()}
    name = {"lora_name": "attention-r4"}
    expected = ask.text(RETRIEVAL, sampling_parameters=name, **request)
    assert expected == ask.text(RETRIEVAL, parameters=name, **request)
    assert expected == ask.text(RETRIEVAL, sampling_parameters={"lora_name": "alias"}, **request)


def test_a_head_streams_its_top_label_as_the_only_response(ask: Asker) -> None:
    responses = ask.stream(
        RETRIEVAL,
        text_input="",
        image=picture(),
        task="classify",
        sampling_parameters={"lora_name": "head-r8"},
    )
    assert len(responses) == 1
    assert responses[0]["text_output"] in ("cat", "dog", "bird")
    assert responses[0]["num_output_tokens"] == 0


def test_placeholders_in_the_text_set_the_positions_of_the_images(ask: Asker) -> None:
    placed = ask.stream(RETRIEVAL, text_input="Is <image> like <image>?", image=[picture()] * 2)
    before = ask.stream(RETRIEVAL, text_input="Is it like it?", image=[picture()] * 2)
    assert abs(placed[0]["num_input_tokens"] - before[0]["num_input_tokens"]) < 8
    with pytest.raises(Refused, match="placeholders"):
        ask.stream(RETRIEVAL, text_input="Is <image> it?", image=[picture()] * 2)


def test_a_client_that_uses_another_port_of_the_server_gets_a_helpful_error(ask: Asker) -> None:
    for url in (ask.http_url, urlsplit(ask.metrics_url).netloc):
        with pytest.raises(ClientError, match=r"does not speak gRPC.* give the gRPC port"):
            connect(url, RETRIEVAL)
