"""Tests of the conversion of tensors to a request of the engine, and of its outputs to tensors."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.fakes import TEMPLATE, adapter, features, first
from vlora.config import Limits
from vlora.errors import InvalidArgument
from vlora.request import Clip, Output, Request, Timings, TokenLogprob
from vlora.serving.answer_writer import AnswerWriter
from vlora.serving.codec import (
    Call,
    describe_videos,
    is_cancel,
    prepare,
    read_call,
    sampling_keys,
)
from vlora.serving.task_head import to_result
from vlora.serving.tensors import EncodedStrings, Tensors, check_strings, flag, strings
from vlora.tasks import TASKS
from vlora.vision.results import MAX_WARNINGS

THROUGH_ENCODER = {"image_layout": np.zeros((0, 6), np.int32)}
CONTEXT = 1024
DETAILS = json.dumps({"task": "vqa", "adapter": None, "timings": {}})


def read(parameters: dict[str, Any] | None = None, **tensors: np.ndarray) -> Call:
    inputs = {"text_input": strings(["hello"])} | tensors
    return read_call(inputs, parameters or {}, Limits(), 42.5)


def keys(**values: Any) -> np.ndarray:
    return strings([json.dumps(values)])


def prepare_call(call: Call) -> tuple[Request, str]:
    return prepare(call, "id", None, TEMPLATE, CONTEXT)


def encoded(*lengths_and_texts: tuple[int, bytes]) -> np.ndarray:
    """Return the protocol's form of strings with these length prefixes, uint8 [bytes]."""
    parts = [length.to_bytes(4, "little") + text for length, text in lengths_and_texts]
    return np.frombuffer(b"".join(parts), np.uint8)


def test_strings_are_read_in_their_shape() -> None:
    content = encoded((2, b"ab"), (0, b""), (3, b"cde"), (1, b"f"))
    tensor = EncodedStrings(content).reshape((2, 2))
    assert tensor.tolist() == [[b"ab", b""], [b"cde", b"f"]]
    assert EncodedStrings(encoded()).reshape((0,)).shape == (0,)


@pytest.mark.parametrize(
    ("content", "shape", "reason"),
    [
        (encoded((9, b"ab")), (1,), "'text' does not hold 1 elements, each after its length"),
        (encoded((1, b"ab")), (1,), "does not hold 1 elements"),
        (encoded((1, b"a"), (1, b"b")), (1,), "does not hold 1 elements"),
        (encoded((1, b"a")), (2,), "does not hold 2 elements"),
        (encoded()[:0], (1,), "does not hold 1 elements"),
        (encoded((0, b"")), (1, 5_000_000), "has 5000000 elements; the limit is 16384"),
    ],
)
def test_strings_that_cannot_be_read_fail_alone(
    content: np.ndarray, shape: tuple[int, ...], reason: str
) -> None:
    tensor = EncodedStrings(content).reshape(shape)
    assert tensor.shape == shape
    with pytest.raises(InvalidArgument, match=reason):
        check_strings({"text": tensor})


def test_a_plain_request_has_the_defaults_of_the_vllm_backend() -> None:
    call = read()
    assert not call.ensemble
    assert not call.stream
    assert call.prepend_input
    assert not call.outputs
    request, task = prepare_call(call)
    assert (task, request.prompt, request.arrival) == ("raw", "hello", 42.5)
    assert (request.sampling.temperature, request.sampling.max_tokens) == (1.0, 16)


def test_a_request_through_the_encoder_has_the_defaults_of_the_ensembles() -> None:
    call = read(**THROUGH_ENCODER)
    assert call.stream
    assert not call.prepend_input
    assert {"finish_reason", "num_input_tokens", "num_output_tokens"} <= call.outputs
    request, task = prepare_call(call)
    assert task == "vqa"
    assert request.prompt.startswith(TEMPLATE.prefix)
    assert request.sampling.temperature == 0.0
    assert request.sampling.max_tokens == TASKS["vqa"].max_tokens


@pytest.mark.parametrize("named", [None, "auto"])
@pytest.mark.parametrize(
    ("tasks", "default", "task"),
    [
        (("caption",), None, "caption"),
        (("caption", "refer"), "caption", "caption"),
        (("caption", "refer"), None, "chat"),
        ((), None, "chat"),
    ],
)
def test_messages_get_the_adapters_own_task_or_the_chat_template(
    named: str | None, tasks: tuple[str, ...], default: str | None, task: str
) -> None:
    turn = {"role": "user", "content": [{"type": "text", "text": "a <image> b"}]}
    inputs = {"messages": flag(True), **({} if named is None else {"task": strings([named])})}
    info = replace(adapter("a", tasks), default_task=default)
    call = read(text_input=strings([json.dumps({"messages": [turn]})]), **inputs)
    request, found = prepare(call, "id", info, TEMPLATE, CONTEXT)
    assert found == task
    ending = "" if task == "chat" else " Answer:"
    assert request.prompt == f"[USER] a <image> b{ending} [BOT]"
    conversation = {"messages": [turn, {**turn, "role": "assistant"}]}
    several = read(text_input=strings([json.dumps(conversation)]), **inputs)
    with pytest.raises(InvalidArgument, match="no chat template, so a chat must have one message"):
        prepare(several, "id", info, TEMPLATE, CONTEXT)


def test_parameters_are_sampling_keys_except_those_of_triton() -> None:
    parameters = {
        "temperature": 0.5,
        "priority": 3,
        "timeout": 1000,
        "sequence_id": 4,
        "binary_data_output": True,
        "triton_enable_empty_final_response": True,
        "X-Trace": "a",
    }
    assert sampling_keys(parameters) == {"temperature": 0.5}


@pytest.mark.parametrize(("unknown", "near"), [("imag", "image"), ("temperatur", "temperature")])
def test_an_unknown_parameter_is_rejected_with_the_nearest_input_or_sampling_key(
    unknown: str, near: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"input or .* '{unknown}'; did you mean '{near}'"):
        read({unknown: "x"})
    with pytest.raises(InvalidArgument, match=r"'zzz'\. Known inputs: text_input, .*temperature"):
        read({"zzz": 1})


def test_images_and_frames_are_counted_from_the_layout() -> None:
    assert read(**features(2, 3, 1, video=[2])).counts == (2, 1)
    tensors = features(2, 3)
    tensors["image_layout"][1, 5] = 6
    assert read(**tensors).counts == (1, 6)
    tensors["image_layout"][1, 5] = 11
    with pytest.raises(InvalidArgument, match="has 11 frames in column is_video; 5 rows of"):
        prepare_call(read(**tensors))


def test_frames_of_video_files_are_told_from_those_of_the_clip() -> None:
    videos = (Clip((0.0, 0.5, 1.0), 2.0), Clip((0.0,), 24.0))
    tensors = features(1, 2, 1, 1, 4)
    tensors["image_layout"][:, 5] = [0, 2, 1, 1, 4]
    tensors["image_videos"] = strings([describe_videos(videos)])
    call = read(**tensors)
    assert (call.counts, call.videos) == ((1, 4), videos)
    assert call.images is not None
    assert call.images.videos_by_entry() == [None, 0, 0, 1, None]
    tensors["image_layout"][3:, 5] = 0
    with pytest.raises(InvalidArgument, match="has 3 frames, fewer than the video files"):
        prepare_call(read(**tensors))
    for wrong in ('{"videos": [{}]}', '{"videos": [{"seconds": [-1], "fps": 1}]}', "[]"):
        with pytest.raises(InvalidArgument, match="'image_videos'"):
            read(**features(1), image_videos=strings([wrong]))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"text_input": strings(["a", "b"])}, r"shape \[2\]; it must be STRING of shape \[1\]"),
        ({"text_input": strings([b"\xff"])}, "not valid UTF-8"),
        ({"stream": np.array([1], np.int32)}, "'stream' must be BOOL"),
        ({"image_features": np.zeros((1, 4), np.float32)}, "'image_layout' is missing"),
        ({"image_layout": np.ones((1, 6), np.int32)}, "missing; 'image_layout' has 1 image"),
        ({**features(2), "image_size": np.ones((2, 2), np.int32)}, "send one row per image"),
        ({"image_layout": np.ones((1, 5), np.int32)}, r"must be \[any, 6\]"),
        ({"image_layout": np.ones((1, 6), np.int64)}, "must be int32, not int64"),
    ],
)
def test_a_wrong_input_is_rejected_with_its_valid_form(
    tensors: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        read(**tensors)


def test_the_limits_of_json_and_metadata_are_options_and_named_in_the_errors() -> None:
    assert read(metadata=strings([b"\xff\x00 "])).metadata == b"\xff\x00 "
    limits = Limits(max_json_bytes=50, max_metadata_bytes=4)
    for tensors, message in (
        ({"sampling_parameters": keys(stop=["x" * 100])}, r"'sampling_par.* \d+ bytes.* is 50"),
        ({"metadata": strings(["12345"])}, "'metadata' has 5 bytes; the limit is 4"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            read_call({"text_input": strings(["x"]), **tensors}, {}, limits, 0.0)


def test_cancel_needs_no_other_input() -> None:
    assert is_cancel({"cancel": flag(True)})
    assert not is_cancel({"cancel": flag(False)})
    assert not is_cancel({})


def test_features_do_not_change_with_the_tensors_of_the_request() -> None:
    inputs = features(2)
    call = read(**inputs)
    inputs["image_features"][:] = 7
    assert call.images is not None
    assert call.images.features.max() == 1


def writer(**tensors: np.ndarray) -> AnswerWriter:
    return AnswerWriter(read(text_input=strings(["ask: "]), **tensors), "vqa")


def responses_to(answers: AnswerWriter, produced: list[Output]) -> list[Tensors]:
    return [tensors for output in produced if (tensors := answers.write(output)) is not None]


def test_an_ensemble_gets_all_outputs_in_every_response() -> None:
    produced = [Output("r", text="a", token_ids=(1,), num_input_tokens=4)]
    produced.append(Output("r", text="b", token_ids=(2,), finish_reason="stop"))
    responses = responses_to(writer(**THROUGH_ENCODER, metadata=strings(["m"])), produced)
    expected = {"text_output", "finish_reason", "num_input_tokens", "num_output_tokens"}
    expected |= {"metadata", "head_scores", "head_labels"}
    assert all(expected <= set(tensors) for tensors in responses)
    assert responses[0]["head_scores"].shape == (0,)
    assert [first(tensors["metadata"]) for tensors in responses] == ["", "m"]


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
    bare = Output("r", finish_reason="length", timings=output.timings)
    (tensors,) = responses_to(writer(), [bare])
    assert json.loads(first(tensors["details"]))["adapter"] is None


def test_only_with_streaming_each_response_has_the_new_text_and_tokens() -> None:
    produced = [Output("r", text=text, token_ids=(1,) * (1 + len(text))) for text in ("a", "")]
    produced.append(Output("r", text="bc", token_ids=(3, 4), finish_reason="stop"))
    for stream, texts, counts in (
        (True, ["a", "", "bc"], [[2], [1], [2]]),
        (False, ["ask: abc"], [[5]]),
    ):
        answers = writer(stream=flag(stream), return_num_output_tokens=flag(True))
        responses = responses_to(answers, produced)
        assert [first(tensors["text_output"]) for tensors in responses] == texts
        assert [tensors["num_output_tokens"].tolist() for tensors in responses] == counts


def test_tokens_within_the_interval_are_sent_together_and_the_first_and_last_never_wait() -> None:
    times = iter([5.0, 5.005, 5.009, 5.010, 5.012])
    tensors = {"stream": flag(True), "return_num_output_tokens": flag(True)}
    answers = AnswerWriter(read(**tensors), "vqa", interval=0.01, clock=lambda: next(times))
    produced = [Output("r", text=letter, token_ids=(1,)) for letter in "abcde"]
    produced.append(Output("r", text="f", token_ids=(1,), finish_reason="stop"))
    responses = responses_to(answers, produced)
    assert [first(one["text_output"]) for one in responses] == ["a", "bcd", "ef"]
    assert [one["num_output_tokens"].tolist() for one in responses] == [[1], [3], [2]]


def test_logprobs_are_json_by_token_and_their_sum_is_over_the_sampled_ones() -> None:
    token = (TokenLogprob(7, -0.5, 2, b"x"), TokenLogprob(8, -0.1, 1, b"\xe6\x98"))
    produced = [
        Output("r", text="x", token_ids=(7,), logprobs=(token,), finish_reason=reason)
        for reason in (None, "stop")
    ]
    answers = writer(
        stream=flag(True),
        return_logprobs=flag(True),
        return_cumulative_logprob=flag(True),
        sampling_parameters=keys(logprobs=1),
    )
    one, two = responses_to(answers, produced)
    assert json.loads(first(one["logprobs"])) == [
        {
            "7": {"logprob": -0.5, "rank": 2, "decoded_token": "x"},
            "8": {
                "logprob": -0.1,
                "rank": 1,
                "decoded_token": "\ufffd",
                "bytes": [0xE6, 0x98],
            },
        }
    ]
    assert one["cumulative_logprob"].tolist() == [-0.5]
    assert two["cumulative_logprob"].tolist() == [-1.0]


def test_logprobs_are_always_valid_json() -> None:
    def written(logprob: float) -> Tensors:
        token = (TokenLogprob(7, logprob, 1, b"x"),)
        output = Output("r", text="x", token_ids=(7,), logprobs=(token,), finish_reason="stop")
        flags = {"return_logprobs": flag(True), "return_cumulative_logprob": flag(True)}
        (tensors,) = responses_to(writer(**flags, sampling_parameters=keys(logprobs=0)), [output])
        return tensors

    tensors = written(-math.inf)
    assert json.loads(first(tensors["logprobs"]))[0]["7"]["logprob"] == -9999.0
    assert np.isfinite(tensors["cumulative_logprob"]).all()
    with pytest.raises(ValueError, match="not JSON compliant"):
        written(math.nan)


# -- task_head: an answer becomes JSON ------------------------------------------------------------


def result_of(text_output: str, details: str = DETAILS, **limits: int) -> Any:
    tensors = {"text_output": strings([text_output]), "details": strings([details])}
    return json.loads(first(to_result(tensors, Limits(**limits))["result"]))


def test_limits_of_the_request_do_not_apply_to_its_answer() -> None:
    """An answer may be longer than the prompts and the JSON that the server accepts."""
    result = result_of("a long answer", max_prompt_bytes=10, max_json_bytes=10)
    assert result["text"] == "a long answer"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"text_output": " " * 101}, "'text_output' has 101 bytes; the limit is 100"),
        ({"details": " " * 101}, "'details' has 101 bytes; the limit is 100"),
        ({"details": "[]"}, "'details'"),
        ({"details": "{}"}, "'details'"),
    ],
)
def test_an_answer_that_is_too_long_or_has_wrong_details_is_refused(
    tensors: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        result_of(**({"text_output": "x"} | tensors), max_answer_bytes=100)


def test_an_answer_of_malformed_boxes_has_a_bounded_number_of_warnings() -> None:
    result = result_of("<box>" * 100_000)
    assert len(result["warnings"]) == MAX_WARNINGS + 1
    assert result["warnings"][-1] == f"{100_000 - MAX_WARNINGS} more"
