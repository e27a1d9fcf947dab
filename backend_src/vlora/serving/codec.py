"""Conversion of a request's tensors and parameters to a request of the engine. All pure.

Names, shapes and defaults are those of the vLLM backend. Only a request with `image_layout`, which
came through an ensemble (its vision encoder always sends it), has the ensembles' defaults.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vlora.config import Limits
from vlora.errors import InvalidArgument, nearest, shown
from vlora.request import Clip, Freshness, ImageFeatures, Request
from vlora.sampling import ADAPTER_KEY, KNOWN_KEYS, SamplingParams, is_known
from vlora.serving.tensors import Inputs, Tensors
from vlora.strict_json import load_object
from vlora.structured.structure import MAX_DEPTH, STRUCTURE_KEYS
from vlora.tasks import AUTO_TASK, CHAT_TASK, TASKS
from vlora.vision.chat_template import Chat, ChatTemplate
from vlora.vision.images import check_count
from vlora.vision.prompts import render

if TYPE_CHECKING:
    from vlora.adapters.files import AdapterInfo

# Triton's protocols define these request parameters. They are no sampling parameters.
TRITON_PARAMETERS = frozenset(
    {
        "binary_data",
        "binary_data_output",
        "binary_data_size",
        "classification",
        "priority",
        "sequence_end",
        "sequence_id",
        "sequence_start",
        "shared_memory_byte_size",
        "shared_memory_offset",
        "shared_memory_region",
        "timeout",
    }
)

MAX_SAMPLING_DEPTH = MAX_DEPTH + 2  # `sampling_parameters` may contain a JSON schema.
TRITON_PREFIXES = ("triton_", "x-")  # Reserved by Triton, or forwarded from HTTP headers.
IMAGE_INPUTS = ("image", "video", "frames", "frames_raw")
INPUTS = ("text_input", *IMAGE_INPUTS, "task", "metadata", "sampling_parameters")
# Tensor with the version of the adapter applied to the vision tower.
ADAPTER_VERSION = "image_adapter"
VIDEOS = "image_videos"  # Tensor with JSON of the video files' frames.
# Sampling keys that have an effect before the engine.
FRESHNESS_KEYS = ("deadline_ms", "stream_id", "supersede", "cache_salt")
MAX_VIDEOS_BYTES = 4 * 1024**2  # Maximum size of the description of video files.
DEFAULT_TASK = "vqa"  # Task of an ensemble's request if neither it nor its adapter names one.

# Outputs that a request gets only if its input `return_…` is true.
RETURNED = (
    "finish_reason",
    "num_input_tokens",
    "num_output_tokens",
    "logprobs",
    "cumulative_logprob",
)

# Outputs that every response to an ensemble has, because the next model requires them.
ENSEMBLE_OUTPUTS = frozenset(
    {"finish_reason", "num_input_tokens", "num_output_tokens", "metadata", "head"}
)


@dataclass(frozen=True)
class Call:
    """One `lmm` request as received, before adapter, task and template are applied.

    stream: whether every new piece of text is sent as a response of its own.
    prepend_input: whether the text begins with the prompt.
    outputs: names of the outputs that each response has in addition to the text.
    is_chat: whether the request says that `text` is JSON of a conversation.
    images: image features; None without images, or until `raw_images` are encoded.
    metadata: content of the input `metadata`, which the answer returns.
    ensemble: whether the request came through an ensemble.
    """

    text: str
    is_chat: bool
    task: str | None
    sampling: Mapping[str, Any]
    stream: bool
    prepend_input: bool
    outputs: frozenset[str]
    images: ImageFeatures | None
    raw_images: Tensors
    metadata: bytes | None
    ensemble: bool
    freshness: Freshness

    @property
    def counts(self) -> tuple[int, int]:
        """Number of images, and of frames that belong to no video file."""
        return (0, 0) if self.images is None else self.images.counts

    @property
    def videos(self) -> tuple[Clip, ...]:
        return () if self.images is None else self.images.videos


def is_cancel(tensors: Tensors) -> bool:
    """Return whether the request cancels another one (`cancel: true`)."""
    return bool(Inputs(tensors).flag("cancel"))


def is_describe(tensors: Tensors) -> bool:
    """Return whether the request asks for the description of the server (`describe: true`)."""
    return bool(Inputs(tensors).flag("describe"))


def read_call(
    tensors: Tensors, parameters: Mapping[str, Any], limits: Limits, arrival: float
) -> Call:
    """Return the call in a request. `prepare` checks its task and its sampling parameters later.

    arrival: time at which the request reached the first model, in seconds of CLOCK_MONOTONIC.

    Raises InvalidArgument or Unsupported, which name the field and its valid values.
    """
    inputs = Inputs(tensors)
    ensemble = "image_layout" in tensors
    text = inputs.required_text("text_input", limits.max_prompt_bytes)
    images = _read_features(inputs)
    raw_images = {name: tensors[name] for name in IMAGE_INPUTS if inputs.has_rows(name)}
    if raw_images and "image_features" in tensors:
        raise InvalidArgument(
            f"the request has both '{next(iter(raw_images))}' and 'image_features';"
            " send either images or their features"
        )
    pictures = (tensor.shape[0] for name, tensor in raw_images.items() if name != "video")
    check_count(sum(pictures), limits)
    sampling = read_sampling(inputs, parameters, limits)
    stream, prepend_input = _read_form(inputs, ensemble)
    returned = {name for name in RETURNED if inputs.flag(f"return_{name}")}
    return Call(
        text=text,
        is_chat=bool(inputs.flag("messages")),
        task=inputs.text("task") or None,
        sampling=sampling,
        stream=stream,
        prepend_input=prepend_input,
        outputs=ENSEMBLE_OUTPUTS | returned if ensemble else frozenset(returned),
        images=images,
        # Triton's tensors become invalid while the request waits for the encoder.
        raw_images={name: np.array(tensor) for name, tensor in raw_images.items()},
        metadata=inputs.blob("metadata", limits.max_metadata_bytes),
        ensemble=ensemble,
        freshness=freshness_of(sampling, arrival),
    )


def freshness_of(sampling: Mapping[str, Any], arrival: float) -> Freshness:
    """Return the freshness of a request with these sampling keys. Raises InvalidArgument."""
    return Freshness.of(SamplingParams.parse(freshness_keys(sampling)), arrival)


def freshness_keys(sampling: Mapping[str, Any]) -> dict[str, Any]:
    return {key: sampling[key] for key in FRESHNESS_KEYS if key in sampling}


def read_sampling(
    inputs: Inputs, parameters: Mapping[str, Any], limits: Limits
) -> Mapping[str, Any]:
    """Return the unparsed sampling parameters in the input of this name, or else in the request's.

    Raises InvalidArgument.
    """
    content = inputs.blob("sampling_parameters", limits.max_json_bytes)
    if content is not None:
        text = inputs.decode("sampling_parameters", content)
        return load_object(text, "'sampling_parameters'", MAX_SAMPLING_DEPTH)
    return sampling_keys(parameters)


def sampling_keys(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request's parameters without those that Triton's protocols define.

    Raises InvalidArgument for a key that is not a sampling key. The message also names the inputs,
    because the HTTP endpoint `generate` takes inputs and parameters in one object.
    """
    keys = {
        key: value
        for key, value in parameters.items()
        if key not in TRITON_PARAMETERS and not key.lower().startswith(TRITON_PREFIXES)
    }
    for key in keys:
        if not is_known(key):
            hint = nearest(key, (*INPUTS, *KNOWN_KEYS)) or "."
            raise InvalidArgument(
                f"unknown input or sampling parameter {shown(key)}{hint}"
                f" Known inputs: {', '.join(INPUTS)}; sampling parameters: {', '.join(KNOWN_KEYS)}"
            )
    return keys


def _read_form(inputs: Inputs, ensemble: bool) -> tuple[bool, bool]:
    """Return whether the answer streams, and whether its text begins with the prompt."""
    stream = inputs.flag("stream")
    if stream is None:
        stream = ensemble
    exclude = inputs.flag("exclude_input_in_output")
    if exclude is None:
        exclude = ensemble or stream
    if stream and not exclude:
        raise InvalidArgument(
            "'exclude_input_in_output' = false is not possible with 'stream' = true;"
            " leave one of them out"
        )
    return stream, not exclude


def _read_features(inputs: Inputs) -> ImageFeatures | None:
    layout = inputs.array("image_layout", np.int32, (None, 6))
    features = inputs.array("image_features", np.float32, (None, None))
    sizes = inputs.array("image_size", np.int32, (None, 2))
    if layout is None:
        if features is not None:
            raise InvalidArgument(
                "'image_layout' is missing; send it together with 'image_features'"
            )
        return None
    if features is None:
        if layout.shape[0]:
            raise InvalidArgument(
                f"'image_features' is missing; 'image_layout' has {layout.shape[0]} images"
            )
        return None
    if sizes is not None and sizes.shape[0] != layout.shape[0]:
        raise InvalidArgument(
            f"'image_size' has {sizes.shape[0]} rows but 'image_layout' has {layout.shape[0]};"
            " send one row per image in both"
        )
    if not layout.shape[0]:
        return None
    videos = read_videos(inputs.text(VIDEOS, MAX_VIDEOS_BYTES))
    return ImageFeatures(features, layout, inputs.text(ADAPTER_VERSION), videos)


def describe_videos(videos: Sequence[Clip]) -> str:
    """Return the content of the tensor VIDEOS."""
    return json.dumps({"videos": [{"seconds": v.seconds, "fps": v.fps} for v in videos]})


def read_videos(text: str | None) -> tuple[Clip, ...]:
    """Return the video files that `describe_videos` has described. Raises InvalidArgument."""
    videos = [] if text is None else load_object(text, f"'{VIDEOS}'").get("videos")
    if isinstance(videos, list) and all(map(_is_video, videos)):
        return tuple(Clip(tuple(map(float, v["seconds"])), float(v["fps"])) for v in videos)
    raise InvalidArgument(f"'{VIDEOS}' must be the output of 'vision_encoder'")


def _is_video(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("seconds"), list):
        return False
    numbers = [*value["seconds"], value.get("fps")]
    is_finite = all(type(n) in (int, float) and 0 <= n < math.inf for n in numbers)
    return is_finite and value["fps"] > 0


def prepare(
    call: Call, request_id: str, info: AdapterInfo | None, template: ChatTemplate, context: int
) -> tuple[Request, str]:
    """Return the request for the engine, and its task. Raises InvalidArgument or Unsupported.

    info: description of the adapter that the request uses; None for the base model.
    context: maximum number of tokens of a prompt and its answer.
    """
    chat = Chat.parse(call.text, context) if call.is_chat else None
    task = _task_of(call, chat, info)
    prompt = render(task, chat or call.text, *call.counts, template, call.videos, context)
    defaults = SamplingParams()
    if call.ensemble:
        defaults = SamplingParams(temperature=0.0, max_tokens=TASKS[task].max_tokens)
    sampling = SamplingParams.parse(call.sampling, defaults)
    if "cumulative_logprob" in call.outputs and sampling.logprobs is None:
        sampling = replace(sampling, logprobs=0)
    request = Request(
        id=request_id,
        prompt=prompt,
        sampling=sampling,
        adapter=None if info is None else info.name,
        images=call.images,
        use_head=info is not None and task in info.head_tasks,
        arrival=call.freshness.arrival,
    )
    return request, task


def adapter_name(sampling: Mapping[str, Any]) -> str | None:
    """Return the adapter's name in sampling keys, or None. Raises InvalidArgument."""
    name = sampling.get(ADAPTER_KEY)
    if name is not None and not isinstance(name, str):
        raise InvalidArgument(f"'{ADAPTER_KEY}' must be a string, not {json.dumps(name)}")
    return name


def names_no_adapter(call: Call) -> bool:
    """Return whether an ensemble's request leaves the adapter to the server; null is a choice."""
    return call.ensemble and ADAPTER_KEY not in call.sampling


def is_structured(call: Call) -> bool:
    """Return whether the answer must follow a structure, which takes time to compile."""
    return any(call.sampling.get(key) is not None for key in STRUCTURE_KEYS)


def _task_of(call: Call, chat: Chat | None, info: AdapterInfo | None) -> str:
    """Return the task that the request names, else the adapter's, else the default."""
    if call.task is not None and call.task != AUTO_TASK:
        return call.task
    if chat is not None:
        # A task's template takes one message.
        own = None if info is None or len(chat.messages) > 1 else info.own_task
        return own or CHAT_TASK
    if call.task is None and not call.ensemble:
        return "raw"
    return (None if info is None else info.own_task) or DEFAULT_TASK
