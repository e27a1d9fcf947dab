"""The `task_head` model without Triton: converts an answer of `lmm_unary` to `result` JSON."""

from __future__ import annotations

import numpy as np

from vlora.config import Limits
from vlora.serving.codec import MAX_VIDEOS_BYTES, VIDEOS, read_videos
from vlora.serving.tensors import Inputs, Tensors, strings
from vlora.strict_json import load_object
from vlora.vision.results import build_result


def to_result(tensors: Tensors, limits: Limits, pixels_per_patch: int = 0) -> Tensors:
    """Return the `result` of one answer. Raises InvalidArgument for an invalid input.

    pixels_per_patch: see `build_result`.
    """
    inputs = Inputs(tensors)
    layout = inputs.array("image_layout", np.int32, (None, 6))
    size = inputs.array("image_size", np.int32, (None, 2))
    scores = inputs.array("head_scores", np.float32, (None,))
    metadata = inputs.blob("metadata", limits.max_metadata_bytes) or b""
    details = inputs.required_text("details", limits.max_answer_bytes)
    result = build_result(
        text=inputs.required_text("text_output", limits.max_answer_bytes),
        details=load_object(details, "'details'"),
        layout=np.zeros((0, 6), np.int32) if layout is None else layout,
        size=np.zeros((0, 2), np.int32) if size is None else size,
        labels=[inputs.decode("head_labels", label) for label in inputs.strings("head_labels")],
        scores=[] if scores is None else scores.tolist(),
        metadata=inputs.decode("metadata", metadata),
        pixels_per_patch=pixels_per_patch,
        videos=read_videos(inputs.text(VIDEOS, MAX_VIDEOS_BYTES)),
    )
    return {"result": strings([result])}
