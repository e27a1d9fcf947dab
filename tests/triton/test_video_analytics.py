"""Tests of `video_analytics`, which takes images or a clip and returns one structured answer."""

import base64
import io
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from tests.support.triton_client import Asker, Refused, picture, png
from vlora.vision.results import result_schema

ANALYTICS = "video_analytics"


def result_of(ask: Asker, **values: Any) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(ask.once(ANALYTICS, **values)["result"])
    jsonschema.validate(result, result_schema())
    return result


NAMES = ("result", "text_output", "finish_reason", "num_input_tokens", "num_output_tokens")
SUBSETS = [names for size in range(1, 6) for names in itertools.combinations(NAMES, size)]


def test_any_subset_of_the_outputs_may_be_requested(ask: Asker) -> None:
    question = {"text_input": "What is this?", "image": picture()}
    whole = dict(ask.once(ANALYTICS, **question).outputs)
    assert set(whole) == set(NAMES)
    assert "What is this?" not in whole["text_output"]

    def differing(names: tuple[str, ...]) -> dict[str, Any]:
        answers = dict(ask.once(ANALYTICS, outputs=names, **question).outputs)
        assert set(answers) == set(names)
        return {name: value for name, value in answers.items() if value != whole[name]}

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(differing, SUBSETS))
    assert len(answers) == 31
    assert all(set(names) <= {"result"} for names in answers), (
        "only the timings in `result` may differ"
    )


def test_result_follows_the_schema_for_every_task(ask: Asker) -> None:
    for task in ("vqa", "caption", "refer", "detect", "classify", "video", "raw"):
        result = result_of(ask, text_input="the star", image=picture(), task=task)
        assert result["task"] == task
        assert result["adapter"] is None
        assert len(result["images"]) == 1


def test_metadata_is_returned_unchanged_also_without_images(ask: Asker) -> None:
    metadata = '{"camera": "Hof \\u00e4", "t": 1.50}  '
    result = result_of(ask, text_input="What?", metadata=metadata)
    assert result["metadata"] == metadata
    assert result["images"] == result["frames"] == []


def test_images_and_frames_are_indexed_separately(ask: Asker) -> None:
    result = result_of(
        ask, text_input="What?", image=[picture()] * 2, frames=[picture()] * 3, task="vqa"
    )
    assert [one["index"] for one in result["images"]] == [0, 1]
    assert [one["index"] for one in result["frames"]] == [0, 1, 2]


def test_a_video_file_is_answered_as_its_sampled_frames(ask: Asker) -> None:
    av = pytest.importorskip("av", reason="the extra video is not installed")
    from tests.support import video_files as files

    data = files.video("mjpeg", "mkv")
    with av.open(io.BytesIO(data)) as file:
        every = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    sampled = {"media_io_kwargs": {"video": {"num_frames": 4}}, "max_tokens": 8}
    question = {"text_input": "What?", "task": "vqa", "image": picture()}
    result = result_of(ask, video=data, sampling_parameters=sampled, **question)
    (video,) = result["videos"]
    assert [one["seconds"] for one in video["frames"]] == [0.0, 0.4, 0.8, 1.2]
    assert (len(result["images"]), result["frames"]) == (1, [])
    frames = [png(every[number]) for number in (0, 10, 20, 30)]
    asked = {"sampling_parameters": {"max_tokens": 8}, **question}
    assert result["text"] == result_of(ask, frames=frames, **asked)["text"]
    files = ",".join(base64.b64encode(one).decode() for one in frames)
    listed = result_of(ask, video=f"data:video/jpeg;base64,{files}", **asked)
    assert listed["text"] == result["text"]
    times = [one["seconds"] for one in listed["videos"][0]["frames"]]
    assert times == [0.0, 0.042, 0.083, 0.125]
    encoded = [base64.b64encode(data).decode()]
    keys = sampled | {"temperature": 0}
    own = {**question, "video": encoded, "sampling_parameters": keys}
    assert ask.text("lmm", exclude_input_in_output=True, **own) == result["text"]
    with pytest.raises(Refused, match="INVALID_ARG: video 0 is neither a video file"):
        ask.once(ANALYTICS, text_input="What?", video=picture())


def test_probabilities_of_words_are_reported_if_they_are_asked_for(ask: Asker) -> None:
    question = {"text_input": "What is this?", "image": picture()}
    keys = {"word_probabilities": ["yes", "red"]}
    words = result_of(ask, sampling_parameters=keys, **question)["word_probabilities"]
    assert list(words) == ["yes", "red"]
    assert 0.0 < sum(words.values()) < 1.0
    one = result_of(ask, sampling_parameters=keys | {"max_tokens": 1}, **question)
    assert one["word_probabilities"] == pytest.approx(words, rel=1e-4), "one token is enough"
    assert "word_probabilities" not in result_of(ask, **question)
    with pytest.raises(Refused, match="INVALID_ARG: 'word_probabilities' has 'zebra', which is no"):
        ask.once(ANALYTICS, sampling_parameters={"word_probabilities": ["zebra"]}, **question)


def test_a_head_returns_scores_by_label_and_its_best_label_as_text(ask: Asker) -> None:
    question = {"frames": [picture(), picture((0, 0, 200))], "task": "classify", "text_input": ""}
    result = result_of(ask, sampling_parameters={"lora_name": "head-r8"}, **question)
    assert set(result["scores"]) == {"cat", "dog", "bird"}
    assert sum(result["scores"].values()) == pytest.approx(1.0, abs=1e-5)
    assert result["text"] == max(result["scores"], key=result["scores"].__getitem__)
    assert result["adapter"]["name"] == "head-r8"
    assert len(result["adapter"]["digest"]) == 64


def test_any_other_task_of_a_head_adapter_is_answered_by_the_lm_head(ask: Asker) -> None:
    question = {"text_input": "What?", "image": picture(), "task": "vqa"}
    result = result_of(ask, sampling_parameters={"lora_name": "head-r8"}, **question)
    assert result["scores"] == {}
    assert result["task"] == "vqa"


def test_the_text_is_the_same_as_that_of_visual_retrieval(ask: Asker) -> None:
    question = {"text_input": "What is this?", "image": picture()}
    question["sampling_parameters"] = {"lora_name": "all-r8"}
    assert ask.once(ANALYTICS, **question)["text_output"] == ask.text(
        "visual_retrieval", **question
    )


def test_timings_are_seconds_in_order(ask: Asker) -> None:
    timings = result_of(ask, text_input="What?", image=picture())["timings"]
    assert 0 <= timings["queued"] <= timings["first_token"] <= timings["total"] < 60


def test_errors_keep_their_code_and_name_the_ensemble(ask: Asker) -> None:
    with pytest.raises(Refused, match="in ensemble 'video_analytics', NOT_FOUND: ") as caught:
        ask.once(ANALYTICS, text_input="What?", sampling_parameters={"lora_name": "unknown"})
    assert caught.value.status == "StatusCode.NOT_FOUND"


def test_task_head_can_be_called_directly(ask: Asker) -> None:
    details = {"task": "detect", "adapter": None, "timings": {}}
    text = "<ref>star</ref><box>(0,0),(500,500)</box>"
    response = ask.once("task_head", text_output=text, details=details)
    result = json.loads(response["result"])
    assert result["counts"] == {"star": 1}
    with pytest.raises(Refused, match="INVALID_ARG: 'details' is not valid JSON"):
        ask.once("task_head", text_output=text, details="{")
