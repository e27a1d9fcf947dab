"""Conversion of a request's tensors and parameters to a request of the engine.

Names, shapes and defaults follow the vLLM backend, so that its clients work unchanged. A request
with `image_layout` came through the vision encoder (the ensembles' first step always sends it) and
gets the ensembles' defaults instead.

All functions are pure. Independent of Triton, threads and the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vlora.config import Limits
from vlora.errors import InvalidArgument, nearest, shown
from vlora.request import Freshness, ImageFeatures, IntArray, Request
from vlora.sampling import KNOWN_KEYS, SamplingParams, is_known
from vlora.serving.tensors import Inputs, Tensors
from vlora.strict_json import load_object
from vlora.vision.images import check_count
from vlora.vision.prompts import TASKS, ChatTemplate, render

if TYPE_CHECKING:
    from vlora.lora.adapter import AdapterInfo

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
"""Request parameters that Triton's protocols define. They are not sampling keys."""

TRITON_PREFIXES = ("triton_", "x-")
"""Prefixes of parameters that Triton reserves or forwards from HTTP headers."""

IMAGE_INPUTS = ("image", "frames", "frames_raw")
INPUTS = ("text_input", *IMAGE_INPUTS, "task", "metadata", "sampling_parameters")
"""Inputs of every model that answers."""

FEATURE_INPUTS = ("image_features", "image_layout", "image_size")

FRESHNESS_KEYS = ("deadline_ms", "stream_id", "supersede")
"""Sampling keys that count from a request's arrival, before it reaches the engine."""

DEFAULT_TASK = "vqa"
"""Task of a request to an ensemble if neither the request nor its adapter sets one."""


@dataclass(frozen=True)
class OutputOptions:
    """The outputs that the client requests in addition to the text, and their form."""

    stream: bool
    prepend_input: bool
    finish_reason: bool
    num_input_tokens: bool
    num_output_tokens: bool
    logprobs: bool
    cumulative_logprob: bool
    everything: bool
    """True if every response must have all outputs, as the steps of an ensemble require."""


@dataclass(frozen=True)
class Call:
    """One `lmm` request as it was received, before adapter, task and template are applied.

    images: features that the request brought; None if it has no images, or if `raw_images` have
        not been encoded yet.
    counts: number of images and of frames.
    ensemble: True if the request came through an ensemble.
    freshness: its arrival, deadline and stream.
    """

    text: str
    task: str | None
    sampling: Mapping[str, Any]
    outputs: OutputOptions
    client_id: str
    images: ImageFeatures | None
    counts: tuple[int, int]
    raw_images: Tensors
    metadata: bytes | None
    ensemble: bool
    freshness: Freshness

    def with_images(self, images: ImageFeatures) -> Call:
        """Return this call with its images encoded."""
        return replace(self, images=images, counts=count_images(images.layout), raw_images={})


def is_cancel(tensors: Tensors) -> bool:
    """Return whether the request cancels another one (`cancel: true`)."""
    return bool(Inputs(tensors).flag("cancel"))


def read_call(
    tensors: Tensors,
    parameters: Mapping[str, Any],
    client_id: str,
    limits: Limits,
    arrival: float,
) -> Call:
    """Read a request, and check every field that can be checked without the engine.

    arrival: time at which the request reached the first of our models.

    Raises InvalidArgument or Unsupported, with the name of the field and its valid values.
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
    check_count(sum(tensor.shape[0] for tensor in raw_images.values()), limits)
    sampling = read_sampling(inputs, parameters, limits)
    return Call(
        text=text,
        task=inputs.text("task") or None,
        sampling=sampling,
        outputs=_read_output_options(inputs, ensemble),
        client_id=client_id,
        images=images,
        counts=(0, 0) if images is None else count_images(images.layout),
        raw_images=raw_images,
        metadata=inputs.blob("metadata", limits.max_metadata_bytes),
        ensemble=ensemble,
        freshness=freshness_of(sampling, arrival),
    )


def freshness_of(sampling: Mapping[str, Any], arrival: float) -> Freshness:
    """Return the freshness of a request with these sampling keys, of which it reads only its own.

    Raises InvalidArgument.
    """
    params = SamplingParams.parse(freshness_keys(sampling))
    return Freshness(arrival, params.deadline_ms, params.stream_id, params.supersede)


def freshness_keys(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling keys that `freshness_of` reads."""
    return {key: sampling[key] for key in FRESHNESS_KEYS if key in sampling}


def read_sampling(
    inputs: Inputs, parameters: Mapping[str, Any], limits: Limits
) -> Mapping[str, Any]:
    """Return the keys in `sampling_parameters`, or the request's parameters if that is absent."""
    content = inputs.blob("sampling_parameters", limits.max_json_bytes)
    if content is not None:
        text = inputs.decode("sampling_parameters", content)
        return load_object(text, "'sampling_parameters'")
    return sampling_keys(parameters)


def sampling_keys(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request's parameters without Triton's.

    Raises InvalidArgument for a key that is not a sampling key. In a request to `generate`, which
    has inputs and parameters in one object, it may be meant as either.
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


def _read_output_options(inputs: Inputs, ensemble: bool) -> OutputOptions:
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

    def requested(name: str) -> bool:
        return bool(inputs.flag(name))

    return OutputOptions(
        stream=stream,
        prepend_input=not exclude,
        finish_reason=requested("return_finish_reason") or ensemble,
        num_input_tokens=requested("return_num_input_tokens") or ensemble,
        num_output_tokens=requested("return_num_output_tokens") or ensemble,
        logprobs=requested("return_logprobs"),
        cumulative_logprob=requested("return_cumulative_logprob"),
        everything=ensemble,
    )


def count_images(layout: IntArray) -> tuple[int, int]:
    """Return the number of images and of frames in a layout; frames are its video rows."""
    frames = int((layout[:, 5] != 0).sum())
    return int(layout.shape[0]) - frames, frames


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
    return ImageFeatures(features, layout) if layout.shape[0] else None


@dataclass(frozen=True)
class Prepared:
    """A request for the engine, with the task that was chosen for it."""

    request: Request
    task: str


def prepare(
    call: Call, request_id: str, info: AdapterInfo | None, template: ChatTemplate
) -> Prepared:
    """Choose the task, render the prompt and parse the sampling parameters.

    info: the adapter that `call` names, None for the base model.
    """
    task = call.task or _default_task(call, info)
    prompt = render(task, call.text, *call.counts, template)
    defaults = SamplingParams()
    if call.ensemble:
        defaults = SamplingParams(temperature=0.0, max_tokens=TASKS[task].max_tokens)
    sampling = SamplingParams.parse(call.sampling, defaults)
    if call.outputs.cumulative_logprob and sampling.logprobs is None:
        sampling = replace(sampling, logprobs=0)
    request = Request(
        id=request_id,
        prompt=prompt,
        sampling=sampling,
        adapter=None if info is None else info.name,
        images=call.images,
        use_head=info is not None and task in info.head_tasks,
        client_id=call.client_id,
        arrival=call.freshness.arrival,
    )
    return Prepared(request, task)


def adapter_name(call: Call) -> str | None:
    """Return the name of the request's adapter, None for the base model. Raises InvalidArgument."""
    name = call.sampling.get("lora_name")
    if name is not None and not isinstance(name, str):
        raise InvalidArgument(f"'lora_name' must be a string, not {json.dumps(name)}")
    return name


def _default_task(call: Call, info: AdapterInfo | None) -> str:
    if not call.ensemble:
        return "raw"
    if info is not None and len(info.tasks) == 1:
        return info.tasks[0]
    return DEFAULT_TASK
