"""Tensors of the wire ↔ values of the engine. Pure: numpy in, values out, and back.

Names, shapes and defaults follow the vLLM backend, so that its clients work unchanged; a request
that carries `image_layout` came through the vision encoder (the ensembles' first step always
sends it) and gets the ensembles' defaults instead.

Not known here: Triton, threads, the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vlora.config import Limits
from vlora.errors import InvalidArgument, nearest, shown
from vlora.request import ImageFeatures, IntArray, Request
from vlora.sampling import KNOWN_KEYS, SamplingParams, is_known
from vlora.serving.tensors import Inputs, Tensors
from vlora.strict_json import load_object
from vlora.vision.prompts import TASKS, ChatTemplate, render

if TYPE_CHECKING:
    from vlora.lora.adapter import AdapterInfo

TRITONS_OWN_PARAMETERS = frozenset(
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
"""Request parameters that Triton's protocols define; never sampling keys."""

TRITONS_OWN_PREFIXES = ("triton_", "x-")
"""Reserved by Triton, and headers forwarded by its HTTP front end."""

IMAGE_INPUTS = ("image", "frames", "frames_raw")
INPUTS = ("text_input", *IMAGE_INPUTS, "task", "metadata", "sampling_parameters")
"""What every model that answers takes."""

FEATURE_INPUTS = ("image_features", "image_layout", "image_size")

DEFAULT_TASK = "vqa"
"""The ensembles' task where neither the request nor its adapter says which."""


@dataclass(frozen=True)
class OutputOptions:
    """What the client asked to be told beside the text, and how."""

    stream: bool
    prepend_input: bool
    finish_reason: bool
    num_input_tokens: bool
    num_output_tokens: bool
    logprobs: bool
    cumulative_logprob: bool
    everything: bool
    """Every output is set in every response: an ensemble's step must not leave one out."""


@dataclass(frozen=True)
class Call:
    """One `lmm` request as read from the wire, before adapter, task and template are applied.

    images: features that came with the request; None when there are no images, or when
        `raw_images` still has to go through the vision encoder.
    counts: images and frames, in the order of the prompt's placeholders.
    """

    text: str
    task: str | None
    sampling: Mapping[str, Any]
    wanted: OutputOptions
    client_id: str
    images: ImageFeatures | None
    counts: tuple[int, int]
    raw_images: Tensors
    metadata: bytes | None
    ensemble: bool

    def with_images(self, images: ImageFeatures) -> Call:
        return replace(self, images=images, counts=count_images(images.layout), raw_images={})


def is_cancel(tensors: Tensors) -> bool:
    """Whether this request only asks to end another one (`cancel: true`)."""
    return bool(Inputs(tensors).flag("cancel"))


def read_call(
    tensors: Tensors, parameters: Mapping[str, Any], client_id: str, limits: Limits
) -> Call:
    """The request in `tensors`, every field checked that needs no engine to be.

    Raises InvalidArgument (or Unsupported) naming the field and what would fit.
    """
    inputs = Inputs(tensors)
    ensemble = "image_layout" in tensors
    text = inputs.required_text("text_input", limits.max_prompt_bytes)
    images = _read_features(inputs)
    raw_images = {name: tensors[name] for name in IMAGE_INPUTS if inputs.has_rows(name)}
    if raw_images and "image_features" in tensors:
        raise InvalidArgument(
            f"'{next(iter(raw_images))}' and 'image_features' were both given;"
            " send images, or the encoder's features of them"
        )
    return Call(
        text=text,
        task=inputs.text("task") or None,
        sampling=read_sampling(inputs, parameters, limits),
        wanted=_read_wanted(inputs, ensemble),
        client_id=client_id,
        images=images,
        counts=(0, 0) if images is None else count_images(images.layout),
        raw_images=raw_images,
        metadata=inputs.blob("metadata", limits.max_metadata_bytes),
        ensemble=ensemble,
    )


def read_sampling(
    inputs: Inputs, parameters: Mapping[str, Any], limits: Limits
) -> Mapping[str, Any]:
    """Sampling keys: those of `sampling_parameters`, or, without it, the request's parameters."""
    given = inputs.blob("sampling_parameters", limits.max_json_bytes)
    if given is not None:
        text = inputs.decode("sampling_parameters", given)
        return load_object(text, "'sampling_parameters'")
    return sampling_keys(parameters)


def sampling_keys(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The request's parameters without Triton's own.

    Raises InvalidArgument for one that is no sampling key: at `generate`, where inputs and
    parameters are one object, it may have been meant as either.
    """
    keys = {
        key: value
        for key, value in parameters.items()
        if key not in TRITONS_OWN_PARAMETERS and not key.lower().startswith(TRITONS_OWN_PREFIXES)
    }
    for key in keys:
        if not is_known(key):
            hint = nearest(key, (*INPUTS, *KNOWN_KEYS)) or "."
            raise InvalidArgument(
                f"unknown input or sampling parameter {shown(key)}{hint}"
                f" Known inputs: {', '.join(INPUTS)}; sampling parameters: {', '.join(KNOWN_KEYS)}"
            )
    return keys


def _read_wanted(inputs: Inputs, ensemble: bool) -> OutputOptions:
    stream = inputs.flag("stream")
    if stream is None:
        stream = ensemble
    exclude = inputs.flag("exclude_input_in_output")
    if exclude is None:
        exclude = ensemble or stream
    if stream and not exclude:
        raise InvalidArgument(
            "'exclude_input_in_output' = false is not possible while streaming;"
            " leave it out or send 'stream' = false"
        )

    def asked(name: str) -> bool:
        return bool(inputs.flag(name))

    return OutputOptions(
        stream=stream,
        prepend_input=not exclude,
        finish_reason=asked("return_finish_reason") or ensemble,
        num_input_tokens=asked("return_num_input_tokens") or ensemble,
        num_output_tokens=asked("return_num_output_tokens") or ensemble,
        logprobs=asked("return_logprobs"),
        cumulative_logprob=asked("return_cumulative_logprob"),
        everything=ensemble,
    )


def count_images(layout: IntArray) -> tuple[int, int]:
    """Images and frames in a layout; frames are its video rows."""
    frames = int((layout[:, 5] != 0).sum())
    return int(layout.shape[0]) - frames, frames


def _read_features(inputs: Inputs) -> ImageFeatures | None:
    layout = inputs.array("image_layout", np.int32, (None, 6))
    features = inputs.array("image_features", np.float32, (None, None))
    sizes = inputs.array("image_size", np.int32, (None, 2))
    if layout is None:
        if features is not None:
            raise InvalidArgument(
                "'image_features' came without 'image_layout'; send both as the encoder gave them"
            )
        return None
    if features is None:
        if layout.shape[0]:
            raise InvalidArgument("'image_layout' describes images but 'image_features' is absent")
        return None
    if sizes is not None and sizes.shape[0] != layout.shape[0]:
        raise InvalidArgument(
            f"'image_size' has {sizes.shape[0]} rows but 'image_layout' has {layout.shape[0]};"
            " there must be one for each image"
        )
    return ImageFeatures(features, layout) if layout.shape[0] else None


@dataclass(frozen=True)
class Prepared:
    """A request ready for the engine, with the task that was chosen for it."""

    request: Request
    task: str


def prepare(
    call: Call, request_id: str, info: AdapterInfo | None, template: ChatTemplate
) -> Prepared:
    """Choose the task, render the prompt and parse the sampling parameters.

    info: of the adapter that `call` names, None for the base model.
    """
    task = call.task or _default_task(call, info)
    prompt = render(task, call.text, *call.counts, template)
    defaults = SamplingParams()
    if call.ensemble:
        defaults = SamplingParams(temperature=0.0, max_tokens=TASKS[task].max_tokens)
    sampling = SamplingParams.parse(call.sampling, defaults)
    if call.wanted.cumulative_logprob and sampling.logprobs is None:
        sampling = replace(sampling, logprobs=0)
    request = Request(
        id=request_id,
        prompt=prompt,
        sampling=sampling,
        adapter=None if info is None else info.name,
        images=call.images,
        use_head=info is not None and task in info.head_tasks,
        client_id=call.client_id,
    )
    return Prepared(request, task)


def adapter_name(call: Call) -> str | None:
    """The adapter that the request names, checked to be a string."""
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
