"""Tests of the conversion of tensors to a request of the engine: names, defaults and errors."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.fakes import TEMPLATE, adapter, features
from vlora.config import Limits
from vlora.errors import InvalidArgument
from vlora.request import Request
from vlora.serving.codec import Call, is_cancel, prepare, read_call, sampling_keys
from vlora.serving.tensors import flag, strings
from vlora.vision.prompts import TASKS

THROUGH_ENCODER = {"image_layout": np.zeros((0, 6), np.int32)}


def read(parameters: dict[str, Any] | None = None, **tensors: np.ndarray) -> Call:
    inputs = {"text_input": strings(["hello"]), **tensors}
    return read_call(inputs, parameters or {}, Limits(), 42.5)


def keys(**values: Any) -> np.ndarray:
    return strings([json.dumps(values)])


class Prepared(NamedTuple):
    request: Request
    task: str


def prepare_call(call: Call, *, info: Any = None) -> Prepared:
    return Prepared(*prepare(call, "id", info, TEMPLATE))


def test_a_plain_request_has_the_defaults_of_the_vllm_backend() -> None:
    call = read()
    assert not call.ensemble
    assert not call.stream
    assert call.prepend_input
    assert not call.outputs
    prepared = prepare_call(call)
    assert (prepared.task, prepared.request.prompt) == ("raw", "hello")
    assert prepared.request.arrival == 42.5
    assert (prepared.request.sampling.temperature, prepared.request.sampling.max_tokens) == (
        1.0,
        16,
    )


def test_a_request_through_the_encoder_has_the_defaults_of_the_ensembles() -> None:
    call = read(**THROUGH_ENCODER)
    assert call.stream
    assert not call.prepend_input
    assert {"finish_reason", "num_input_tokens", "num_output_tokens"} <= call.outputs
    prepared = prepare_call(call)
    assert prepared.task == "vqa"
    assert prepared.request.prompt.startswith(TEMPLATE.prefix)
    assert prepared.request.sampling.temperature == 0.0
    assert prepared.request.sampling.max_tokens == TASKS["vqa"].max_tokens


def test_the_ensembles_default_max_tokens_is_the_tasks() -> None:
    for task, spec in TASKS.items():
        if task == "chat":
            continue
        prepared = prepare_call(read(**THROUGH_ENCODER, task=strings([task])))
        assert prepared.request.sampling.max_tokens == spec.max_tokens


def test_sampling_keys_of_the_request_override_the_ensembles_defaults() -> None:
    prepared = prepare_call(read(**THROUGH_ENCODER, sampling_parameters=keys(temperature=0.5)))
    assert prepared.request.sampling.temperature == 0.5
    assert prepared.request.sampling.max_tokens == TASKS["vqa"].max_tokens


@pytest.mark.parametrize(
    ("tasks", "task"), [(("caption",), "caption"), (("caption", "refer"), "vqa"), ((), "vqa")]
)
def test_the_default_task_is_the_adapters_if_it_has_just_one(
    tasks: tuple[str, ...], task: str
) -> None:
    assert prepare_call(read(**THROUGH_ENCODER), info=adapter("a", tasks)).task == task
    assert prepare_call(read(), info=adapter("a", tasks)).task == "raw"


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
    prepared = prepare_call(call, info=info)
    assert prepared.task == task
    ending = "" if task == "chat" else " Answer:"
    assert prepared.request.prompt == f"[USER] a <image> b{ending} [BOT]"
    conversation = {"messages": [turn, {**turn, "role": "assistant"}]}
    several = read(text_input=strings([json.dumps(conversation)]), **inputs)
    with pytest.raises(InvalidArgument, match="no chat template, so a chat must have one message"):
        prepare_call(several, info=info)


def test_a_head_answers_only_if_the_task_is_one_of_its_tasks() -> None:
    info = adapter("a", ("classify",), head=("classify",))
    assert prepare_call(read(**THROUGH_ENCODER), info=info).request.use_head
    assert not prepare_call(read(), info=info).request.use_head
    call = read(**THROUGH_ENCODER, task=strings(["caption"]))
    assert not prepare_call(call, info=info).request.use_head


@pytest.mark.parametrize(
    ("stream", "exclude", "prepend"),
    [
        (None, None, True),
        (False, None, True),
        (True, None, False),
        (False, False, True),
        (False, True, False),
        (True, True, False),
    ],
)
def test_the_prompt_is_prepended_as_the_vllm_backend_does(
    stream: bool | None, exclude: bool | None, prepend: bool
) -> None:
    inputs = {}
    if stream is not None:
        inputs["stream"] = flag(stream)
    if exclude is not None:
        inputs["exclude_input_in_output"] = flag(exclude)
    assert read(**inputs).prepend_input == prepend


def test_streaming_with_the_prompt_in_the_output_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="not possible with 'stream' = true"):
        read(stream=flag(True), exclude_input_in_output=flag(False))


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
    assert prepare_call(read(parameters)).request.sampling.temperature == 0.5


@pytest.mark.parametrize(("unknown", "near"), [("imag", "image"), ("temperatur", "temperature")])
def test_an_unknown_parameter_is_rejected_with_the_nearest_input_or_sampling_key(
    unknown: str, near: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"input or .* '{unknown}'; did you mean '{near}'"):
        read({unknown: "x"})
    with pytest.raises(InvalidArgument, match=r"'zzz'\. Known inputs: text_input, .*temperature"):
        read({"zzz": 1})


def test_sampling_parameters_replace_all_request_parameters() -> None:
    call = read({"temperature": 0.5, "nonsense": 1}, sampling_parameters=keys(max_tokens=3))
    sampling = prepare_call(call).request.sampling
    assert (sampling.temperature, sampling.max_tokens) == (1.0, 3)


def test_the_limit_of_json_inputs_is_an_option_and_named_in_the_error() -> None:
    inputs = {"text_input": strings(["x"]), "sampling_parameters": keys(stop=["x" * 100])}
    with pytest.raises(InvalidArgument, match=r"'sampling_parameters' has \d+ bytes.* is 50"):
        read_call(inputs, {}, Limits(max_json_bytes=50), 0.0)


def test_metadata_up_to_its_limit_is_not_changed() -> None:
    assert read(metadata=strings([b"\xff\x00 "])).metadata == b"\xff\x00 "
    inputs = {"text_input": strings(["x"]), "metadata": strings(["12345"])}
    with pytest.raises(InvalidArgument, match="'metadata' has 5 bytes; the limit is 4"):
        read_call(inputs, {}, Limits(max_metadata_bytes=4), 0.0)


def test_images_and_frames_are_counted_from_the_layout() -> None:
    call = read(**features(2, 3, 1, video=[2]))
    assert call.counts == (2, 1)
    assert call.images is not None
    assert prepare_call(call).request.prompt.count("<image>") == 3


def test_a_clip_of_joined_frames_is_counted_by_its_frames() -> None:
    tensors = features(2, 3)
    tensors["image_layout"][1, 5] = 6
    assert read(**tensors).counts == (1, 6)
    tensors["image_layout"][1, 5] = 11
    with pytest.raises(InvalidArgument, match="has 11 frames in column is_video; 5 rows of"):
        prepare_call(read(**tensors))


def test_images_wait_for_the_encoder() -> None:
    call = read(image=strings([b"png"]), frames=strings([]))
    assert set(call.raw_images) == {"image"}
    assert call.images is None


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"text_input": strings(["a", "b"])}, r"shape \[2\]; it must be STRING of shape \[1\]"),
        ({"text_input": strings([b"\xff"])}, "not valid UTF-8"),
        ({"stream": np.array([1], np.int32)}, "'stream' must be BOOL"),
        ({"image_features": np.zeros((1, 4), np.float32)}, "'image_layout' is missing"),
        (
            {"image_layout": np.ones((1, 6), np.int32)},
            "'image_features' is missing; 'image_layout' has 1 image",
        ),
        ({"image_layout": np.ones((1, 5), np.int32)}, r"must be \[any, 6\]"),
        ({"image_layout": np.ones((1, 6), np.int64)}, "must be int32, not int64"),
        ({**features(2), "image": strings([b"x"])}, "send either images or their features"),
        ({**features(2), "image_size": np.ones((2, 2), np.int32)}, "send one row per image"),
        ({"sampling_parameters": strings(["[]"])}, "must be a JSON object"),
    ],
)
def test_a_wrong_input_is_rejected_with_its_valid_form(
    tensors: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        read(**tensors)


def test_a_missing_prompt_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="'text_input' is missing"):
        read_call({}, {}, Limits(), 0.0)


def test_keys_of_real_time_streams_are_read_from_the_sampling_parameters() -> None:
    sampling = keys(priority=2, deadline_ms=40, stream_id="camera", supersede=True)
    params = prepare_call(read(sampling_parameters=sampling)).request.sampling
    assert (params.priority, params.deadline_ms) == (2, 40.0)
    assert (params.stream_id, params.supersede) == ("camera", True)


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
