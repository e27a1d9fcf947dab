"""Tests of `lmm` and `lmm_unary`: the interface of the vLLM backend, and our extensions."""

import json
import math
import re
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from tests.support.polling import until
from tests.support.triton_client import REFRESH_SECONDS, Asker, Refused, picture, pixels

GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
LONG = {"temperature": 0, "max_tokens": 900, "ignore_eos": True}


def test_without_streaming_there_is_one_response_with_the_prompt_unless_it_is_left_out(
    ask: Asker,
) -> None:
    question = {"text_input": "hello", "sampling_parameters": GREEDY}
    (default,) = ask.stream("lmm", **question)
    (with_prompt,) = ask.stream("lmm", **question, exclude_input_in_output=False)
    (without,) = ask.stream("lmm", **question, exclude_input_in_output=True)
    assert default.final
    assert default["text_output"] == with_prompt["text_output"] == "hello" + without["text_output"]


def test_streaming_gives_deltas_without_the_prompt(ask: Asker) -> None:
    question = {"text_input": "hello", "sampling_parameters": GREEDY}
    deltas = ask.stream("lmm", stream=True, **question)
    (whole,) = ask.stream("lmm", exclude_input_in_output=True, **question)
    assert "".join(delta["text_output"] for delta in deltas) == whole["text_output"]
    assert [delta.final for delta in deltas] == [False] * (len(deltas) - 1) + [True]


def test_streaming_with_the_prompt_is_an_error(ask: Asker) -> None:
    with pytest.raises(Refused, match=r"INVALID_ARG: 'exclude_input_in_output' = false"):
        ask.stream("lmm", text_input="hello", stream=True, exclude_input_in_output=False)


def test_optional_outputs_are_absent_unless_requested(ask: Asker) -> None:
    question = {"text_input": "hello", "sampling_parameters": GREEDY, "stream": True}
    *others, last = ask.stream("lmm", **question)
    assert all(set(other.outputs) == {"text_output"} for other in others)
    assert set(last.outputs) == {"text_output", "details"}
    names = ("finish_reason", "num_input_tokens", "num_output_tokens", "logprobs")
    deltas = ask.stream("lmm", **question, **{f"return_{name}": True for name in names})
    assert all(set(names) < set(delta.outputs) for delta in deltas)
    assert sum(delta["num_output_tokens"] for delta in deltas) == 6
    *reasons, reason = (delta["finish_reason"] for delta in deltas)
    assert set(reasons) <= {"None"}
    assert reason == "length"


def test_logprobs_have_the_form_of_the_vllm_backend(ask: Asker) -> None:
    (response,) = ask.stream(
        "lmm",
        text_input="hello",
        sampling_parameters={**GREEDY, "logprobs": 2},
        return_logprobs=True,
        return_cumulative_logprob=True,
    )
    tokens = json.loads(response["logprobs"])
    assert len(tokens) == 6
    sampled = [next(iter(token.values())) for token in tokens]
    assert all(set(entry) - {"bytes"} == {"logprob", "rank", "decoded_token"} for entry in sampled)
    assert all(entry["rank"] == 1 for entry in sampled)
    total = sum(entry["logprob"] for entry in sampled)
    assert math.isclose(response["cumulative_logprob"], total, rel_tol=1e-5)
    question = {"text_input": "hello", "return_logprobs": True}
    (without,) = ask.stream("lmm", **question)
    assert without["logprobs"] == "null"
    (alone,) = ask.stream(
        "lmm", sampling_parameters=GREEDY, return_cumulative_logprob=True, **question
    )
    assert alone["logprobs"] == "null"
    assert math.isclose(alone["cumulative_logprob"], total, rel_tol=1e-5)


def test_the_sampling_defaults_are_those_of_vllm(ask: Asker) -> None:
    question = {"text_input": "hello", "parameters": {"ignore_eos": True}}
    answers = ask.stream("lmm", return_num_output_tokens=True, **question)
    assert answers[0]["num_output_tokens"] == 16
    assert len({ask.text("lmm", **question) for _ in range(4)}) > 1


def test_a_seed_makes_a_sampled_answer_repeatable(ask: Asker) -> None:
    question = {"text_input": "hello", "sampling_parameters": {"seed": 7, "ignore_eos": True}}
    assert ask.text("lmm", **question) == ask.text("lmm", **question)


def test_numeric_strings_are_coerced(ask: Asker) -> None:
    strings = {"temperature": "0", "max_tokens": "6", "ignore_eos": "true", "min_tokens": "2"}
    assert ask.text("lmm", text_input="hello", sampling_parameters=strings) == ask.text(
        "lmm", text_input="hello", sampling_parameters=GREEDY
    )


def test_sampling_parameters_replace_all_request_parameters(ask: Asker) -> None:
    (response,) = ask.stream(
        "lmm",
        text_input="hello",
        parameters={"max_tokens": 3, "no_such_key": 1},
        sampling_parameters={"ignore_eos": True},
        return_num_output_tokens=True,
    )
    assert response["num_output_tokens"] == 16


def test_the_requests_parameters_are_sampling_keys_unless_they_are_triton_s_or_headers(
    ask: Asker,
) -> None:
    parameters = {**GREEDY, "x-request-source": "camera", "classification": 0}
    assert ask.text("lmm", text_input="hello", parameters=parameters) == ask.text(
        "lmm", text_input="hello", sampling_parameters=GREEDY
    )


def test_the_default_task_is_raw_and_another_one_renders_its_template(ask: Asker) -> None:
    question = {
        "text_input": "What?",
        "sampling_parameters": GREEDY,
        "return_num_input_tokens": True,
    }
    (raw,) = ask.stream("lmm", **question)
    (named,) = ask.stream("lmm", task="raw", **question)
    (templated,) = ask.stream("lmm", task="vqa", **question)
    assert raw["num_input_tokens"] == named["num_input_tokens"] < templated["num_input_tokens"]


def test_an_image_is_encoded_by_the_vision_encoder(ask: Asker) -> None:
    question = {"text_input": "What is this?", "image": picture()}
    direct = ask.text(
        "lmm", task="vqa", stream=True, sampling_parameters={"temperature": 0}, **question
    )
    assert direct == ask.text("visual_retrieval", task="vqa", **question)


def test_frames_may_be_encoded_or_raw(ask: Asker) -> None:
    clip = [picture((60 * i, 0, 0)) for i in range(3)]
    question = {"text_input": "", "task": "video"}
    expected = ask.text("visual_retrieval", frames=clip, **question)
    assert expected == ask.text("visual_retrieval", frames_raw=pixels(clip), **question)
    for extra in ({"frames": clip}, {"frames_raw": pixels(clip)}):
        keys = {"temperature": 0}
        assert (
            ask.text("lmm", stream=True, sampling_parameters=keys, **extra, **question) == expected
        )


def test_a_client_may_send_features(ask: Asker) -> None:
    encoded = ask.once(
        "vision_encoder",
        text_input=np.array([[b"x"]], dtype=object),
        image=np.array([[picture()], [b""]], dtype=object)[:1],
    )
    features = {name: encoded[name][0] for name in ("image_features", "image_layout", "image_size")}
    assert ask.text("lmm", text_input="What is this?", **features) == ask.text(
        "visual_retrieval", text_input="What is this?", image=picture()
    )


def test_details_have_task_adapter_timings_and_modes(ask: Asker) -> None:
    (response,) = ask.stream("lmm", text_input="hello", sampling_parameters={"lora_name": "all-r8"})
    details = json.loads(response["details"])
    assert set(details) == {"task", "adapter", "num_cached_tokens", "timings", "modes"}
    assert sum(details["modes"].values()) >= 1, "number of steps by mode"
    assert details["task"] == "raw"
    assert details["adapter"]["name"] == "all-r8"


def test_a_head_answers_on_lmm_with_scores_and_labels(ask: Asker) -> None:
    (response,) = ask.stream(
        "lmm",
        text_input="",
        image=picture(),
        task="classify",
        exclude_input_in_output=True,
        sampling_parameters={"lora_name": "head-r8"},
    )
    assert response["head_labels"] == ["cat", "dog", "bird"]
    scores = response["head_scores"]
    assert response["text_output"] == response["head_labels"][int(np.argmax(scores))]


def test_metadata_is_returned_only_if_it_was_sent(ask: Asker) -> None:
    (extra,) = ask.stream("lmm", text_input="hello", metadata="m")
    (none,) = ask.stream("lmm", text_input="hello")
    assert extra["metadata"] == "m"
    assert "metadata" not in none


def test_an_absurd_number_is_answered_and_the_server_stays(ask: Asker) -> None:
    for top_k in (10**19, 10**300):
        parameters = {"top_k": top_k, "temperature": 1, "seed": 1, "max_tokens": 3}
        absurd = ask.text("lmm", text_input="hello", sampling_parameters=parameters)
        del parameters["top_k"]
        assert absurd == ask.text("lmm", text_input="hello", sampling_parameters=parameters)


def test_the_answer_is_one_of_the_choices(ask: Asker) -> None:
    choices = ["red", "green", "standing still"]
    for seed in range(3):
        text = ask.text(
            "lmm",
            text_input="hello",
            exclude_input_in_output=True,
            sampling_parameters={"choices": choices, "seed": seed},
        )
        assert text in choices


def test_a_stop_string_ends_the_answer_and_is_left_out(ask: Asker) -> None:
    question = {"text_input": "hello", "exclude_input_in_output": True}
    whole = ask.text("lmm", sampling_parameters=GREEDY, **question)
    stop = whole[len(whole) // 2 :]
    (response,) = ask.stream(
        "lmm", sampling_parameters={**GREEDY, "stop": [stop]}, return_finish_reason=True, **question
    )
    assert response["text_output"] == whole[: whole.index(stop)]
    assert response["finish_reason"] == "stop"


def test_stop_in_a_generate_body_sets_the_stop_strings(ask: Asker) -> None:
    question = {"text_input": "hello", "exclude_input_in_output": True}
    whole = ask.text("lmm", sampling_parameters=GREEDY, **question)
    keys = {**GREEDY, "stop": whole[len(whole) // 2 :]}
    for how in (keys, {"sampling_parameters": json.dumps(keys)}):
        status, text = ask.http("lmm", "generate", question | how)
        assert status == 200, text
        assert json.loads(text)["text_output"] == whole[: whole.index(keys["stop"])]


def test_lmm_unary_answers_like_lmm(ask: Asker) -> None:
    question = {"text_input": "hello", "image": picture(), "return_finish_reason": True}
    for how in ({"parameters": GREEDY}, {"sampling_parameters": GREEDY}):
        unary = ask.once("lmm_unary", **question, **how)
        (direct,) = ask.stream("lmm", **question, **how)
        assert unary["text_output"] == direct["text_output"]
        assert set(unary.outputs) == set(direct.outputs) | {"answer"}


def test_lmm_unary_rejects_streaming(ask: Asker) -> None:
    with pytest.raises(
        Refused, match="INVALID_ARG: 'stream' = true is not possible for 'lmm_unary'"
    ):
        ask.once("lmm_unary", text_input="hello", stream=True)


def test_lmm_unary_passes_on_the_error_codes_of_lmm(ask: Asker) -> None:
    with pytest.raises(Refused, match=r"^NOT_FOUND: ") as unknown:
        ask.once("lmm_unary", text_input="hello", parameters={"lora_name": "unknown"})
    assert unknown.value.status == "StatusCode.NOT_FOUND"
    with pytest.raises(Refused, match=r"^UNSUPPORTED: ") as unsupported:
        ask.once("lmm_unary", text_input="hello", parameters={"best_of": 3})
    assert unsupported.value.status == "StatusCode.UNIMPLEMENTED"


def test_a_request_past_its_deadline_ends_with_cancelled(ask: Asker) -> None:
    keys = {**LONG, "deadline_ms": 5, "priority": -1}
    with pytest.raises(Refused, match="CANCELLED: past its deadline: 'deadline_ms' = 5"):
        ask.once("lmm_unary", text_input="hello", sampling_parameters=keys)


def test_cancel_ends_a_running_request_with_cancelled(ask: Asker) -> None:
    question = {"text_input": "hello", "stream": True, "sampling_parameters": LONG}

    def error_of_cancelled() -> str:
        """Cancel a request; return its error. On a busy machine it may have ended before."""
        client_id = uuid.uuid4().hex
        with ask.streaming("lmm", id=client_id, **question) as responses:
            next(responses)
            assert ask.stream("lmm", id=client_id, cancel=True) == []
            try:
                list(responses)
            except Refused as error:
                return error.message
        return ""

    assert until(error_of_cancelled).startswith("CANCELLED: ")


def test_cancel_ends_a_request_of_an_ensemble(ask: Asker) -> None:
    question = {"text_input": "hello", "sampling_parameters": LONG}
    for model, call in (("visual_retrieval", ask.stream), ("video_analytics", ask.once)):
        client_id = uuid.uuid4().hex
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(call, model, id=client_id, **question)
            while not running.done():
                ask.stream("lmm", id=client_id, cancel=True)
                time.sleep(0.05)
        with pytest.raises(Refused, match="CANCELLED: "):
            running.result()


def test_cancelling_an_unknown_id_succeeds_and_a_short_id_is_rejected(ask: Asker) -> None:
    assert ask.stream("lmm", id="an-unknown-client-id", cancel=True) == []
    with pytest.raises(Refused, match="INVALID_ARG: 'cancel' = "):
        ask.stream("lmm", id="short", cancel=True)


def test_a_second_running_request_with_the_same_long_id_is_rejected(ask: Asker) -> None:
    question = {"text_input": "hello", "sampling_parameters": LONG}

    def error_of_second(model: str, call: Callable[..., object]) -> str:
        """Ask twice; return the error. On a busy machine the first request may have ended."""
        client_id = uuid.uuid4().hex
        with ask.streaming("lmm", stream=True, id=client_id, **question) as responses:
            next(responses)
            try:
                call(model, id=client_id, **question)
            except Refused as error:
                return error.message
        return ""

    for model, call in (("lmm", ask.stream), ("lmm_unary", ask.once)):
        error = until(partial(error_of_second, model, call))
        assert re.search(r"INVALID_ARG: .*in use by another request", error)


def test_two_running_requests_may_share_a_short_id(ask: Asker) -> None:
    question = {"text_input": "hello", "sampling_parameters": LONG, "id": "1"}
    with ask.streaming("lmm", stream=True, **question) as responses:
        next(responses)
        assert ask.stream("lmm", text_input="hello", id="1")


def test_a_request_ends_when_its_client_disconnects(ask: Asker) -> None:
    def aborted() -> float:
        return ask.metrics()['vlora:requests_aborted_total{model="lmm",version="1"}']

    def is_quiet() -> bool:
        """Whether the abandoned streams of earlier tests are counted. Counts are up to 1 s old."""
        before = aborted()
        time.sleep(2)
        running = ask.metrics()['vllm:num_requests_running{model="lmm",version="1"}']
        return running == 0 and aborted() == before

    until(is_quiet)
    before = aborted()

    def leaves() -> bool:
        """Leave a stream. On a busy machine its request may have ended before."""
        with ask.streaming("lmm", text_input="hello", stream=True, parameters=LONG) as responses:
            next(responses)
        time.sleep(REFRESH_SECONDS)
        return aborted() > before

    until(leaves)
    before = aborted()

    def disconnects() -> bool:
        """Give up on a request. On a slow machine it may not have reached the server yet."""
        with pytest.raises(Refused, match="Deadline"):
            ask.once("lmm_unary", text_input="hello", parameters=LONG, timeout=0.1)
        return aborted() > before

    until(disconnects)


def test_special_tokens_never_appear_in_text(ask: Asker) -> None:
    for seed in range(3):
        text = ask.text(
            "lmm",
            text_input="hello",
            exclude_input_in_output=True,
            sampling_parameters={"seed": seed, "max_tokens": 200, "ignore_eos": True},
        )
        assert not any(token in text for token in ("<image>", "<s>", "</s>", "<pad>"))
