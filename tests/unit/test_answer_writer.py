"""Tests of the conversion of engine outputs to response tensors."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from tests.support.fakes import first
from vlora.config import Limits
from vlora.request import HeadScores, Output, Timings, TokenLogprob
from vlora.serving.answer_writer import AnswerWriter
from vlora.serving.codec import read_call
from vlora.serving.tensors import Tensors, flag, strings

ENSEMBLE = {"image_layout": np.zeros((0, 6), np.int32)}


def writer(**tensors: np.ndarray) -> AnswerWriter:
    call = read_call({"text_input": strings(["ask: "]), **tensors}, {}, Limits(), 0.0)
    return AnswerWriter(call, "vqa")


def outputs() -> list[Output]:
    return [
        Output("r", text="a", token_ids=(1,), num_input_tokens=4),
        Output("r", text="", token_ids=(2,), num_input_tokens=4),
        Output("r", text="bc", token_ids=(3, 4), num_input_tokens=4, finish_reason="stop"),
    ]


def responses_to(answers: AnswerWriter, produced: list[Output]) -> list[Tensors]:
    return [tensors for output in produced if (tensors := answers.write(output)) is not None]


def test_without_streaming_one_response_has_the_prompt_and_all_text() -> None:
    (tensors,) = responses_to(writer(return_num_output_tokens=flag(True)), outputs())
    assert first(tensors["text_output"]) == "ask: abc"
    assert tensors["num_output_tokens"].tolist() == [4]
    assert tensors["num_output_tokens"].dtype == np.uint32


def test_with_streaming_each_response_has_the_new_text_and_tokens() -> None:
    responses = responses_to(
        writer(stream=flag(True), return_num_output_tokens=flag(True)), outputs()
    )
    assert [first(tensors["text_output"]) for tensors in responses] == ["a", "", "bc"]
    assert [tensors["num_output_tokens"].tolist() for tensors in responses] == [[1], [1], [2]]


def test_tokens_within_the_interval_are_sent_together_and_the_first_and_last_never_wait() -> None:
    times = iter([5.0, 5.005, 5.009, 5.010, 5.012])
    tensors = {"stream": flag(True), "return_num_output_tokens": flag(True)}
    call = read_call({"text_input": strings(["ask"]), **tensors}, {}, Limits(), 0.0)
    answers = AnswerWriter(call, "vqa", interval=0.01, clock=lambda: next(times))
    produced = [Output("r", text=letter, token_ids=(1,)) for letter in "abcde"]
    produced.append(Output("r", text="f", token_ids=(1,), finish_reason="stop"))
    responses = responses_to(answers, produced)
    assert [first(one["text_output"]) for one in responses] == ["a", "bcd", "ef"]
    assert [one["num_output_tokens"].tolist() for one in responses] == [[1], [3], [2]]


def test_an_ensemble_gets_all_outputs_in_every_response() -> None:
    responses = responses_to(writer(**ENSEMBLE, metadata=strings(["m"])), outputs())
    expected = {"text_output", "finish_reason", "num_input_tokens", "num_output_tokens"}
    expected |= {"metadata", "head_scores", "head_labels"}
    assert all(expected <= set(tensors) for tensors in responses)
    assert responses[0]["head_scores"].shape == (0,)
    assert [first(tensors["metadata"]) for tensors in responses] == ["", "", "m"]


def test_metadata_are_sent_once_with_the_last_response() -> None:
    responses = responses_to(writer(stream=flag(True), metadata=strings(["m"])), outputs())
    assert ["metadata" in tensors for tensors in responses] == [False, False, True]
    assert first(responses[-1]["metadata"]) == "m"
    (only,) = responses_to(writer(metadata=strings(["m"])), outputs())
    assert first(only["metadata"]) == "m"


def test_details_come_with_the_last_response() -> None:
    output = Output(
        "r",
        finish_reason="length",
        num_cached_tokens=16,
        adapter="a",
        adapter_digest="d",
        timings=Timings(queued=0.1, first_token=0.2, total=0.3),
        modes={"merged": 2, "mixture": 1},
    )
    (tensors,) = responses_to(writer(), [output])
    assert json.loads(first(tensors["details"])) == {
        "task": "vqa",
        "adapter": {"name": "a", "digest": "d"},
        "num_cached_tokens": 16,
        "timings": {"queued": 0.1, "first_token": 0.2, "total": 0.3},
        "modes": {"merged": 2, "mixture": 1},
    }


def test_a_heads_text_is_its_best_label() -> None:
    head = HeadScores(("cat", "dog"), (0.25, 0.75))
    produced = Output("r", finish_reason="stop", head=head)
    (tensors,) = responses_to(writer(exclude_input_in_output=flag(True)), [produced])
    assert first(tensors["text_output"]) == "dog"
    assert tensors["head_scores"].tolist() == [0.25, 0.75]
    assert [bytes(label) for label in tensors["head_labels"]] == [b"cat", b"dog"]


def test_logprobs_are_json_by_token_and_their_sum_is_over_the_sampled_ones() -> None:
    token = (TokenLogprob(7, -0.5, 2, "x"), TokenLogprob(8, -0.1, 1, "y"))
    produced = [
        Output("r", text="x", token_ids=(7,), logprobs=(token,)),
        Output("r", text="x", token_ids=(7,), logprobs=(token,), finish_reason="stop"),
    ]
    answers = writer(
        stream=flag(True),
        return_logprobs=flag(True),
        return_cumulative_logprob=flag(True),
        sampling_parameters=strings(['{"logprobs": 1}']),
    )
    one, two = responses_to(answers, produced)
    assert json.loads(first(one["logprobs"])) == [
        {
            "7": {"logprob": -0.5, "rank": 2, "decoded_token": "x"},
            "8": {"logprob": -0.1, "rank": 1, "decoded_token": "y"},
        }
    ]
    assert one["cumulative_logprob"].tolist() == [-0.5]
    assert two["cumulative_logprob"].tolist() == [-1.0]


def test_logprobs_that_were_not_requested_are_null_even_if_their_sum_is() -> None:
    token = (TokenLogprob(7, -0.5, 1, "x"),)
    produced = [Output("r", text="x", token_ids=(7,), logprobs=(token,), finish_reason="stop")]
    answers = writer(return_logprobs=flag(True), return_cumulative_logprob=flag(True))
    (tensors,) = responses_to(answers, produced)
    assert first(tensors["logprobs"]) == "null"
    assert tensors["cumulative_logprob"].tolist() == [-0.5]


def one_token(logprob: float) -> list[Output]:
    token = (TokenLogprob(7, logprob, 1, "x"),)
    return [Output("r", text="x", token_ids=(7,), logprobs=(token,), finish_reason="stop")]


def test_logprobs_are_always_valid_json() -> None:
    flags = {"return_logprobs": flag(True), "return_cumulative_logprob": flag(True)}
    flags["sampling_parameters"] = strings(['{"logprobs": 0}'])
    (tensors,) = responses_to(writer(**flags), one_token(-math.inf))
    assert json.loads(first(tensors["logprobs"]))[0]["7"]["logprob"] == -9999.0
    assert np.isfinite(tensors["cumulative_logprob"]).all()
    with pytest.raises(ValueError, match="not JSON compliant"):
        responses_to(writer(**flags), one_token(math.nan))
