"""Tests of the requests that the loop refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.engine_client import Collector, request
from vlora.engine.loop import EngineLoop
from vlora.errors import InvalidArgument, NotFound, VLoraError
from vlora.request import ImageFeatures, Request
from vlora.sampling import SamplingParams


def features(rows: int, hidden: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).normal(size=(rows, hidden)).astype(np.float32)


def images(layout: list[list[int]], rows: int, hidden: int) -> ImageFeatures:
    return ImageFeatures(features(rows, hidden), np.array(layout, dtype=np.int32))


REFUSALS: list[tuple[str, Callable[[EngineLoop], Request], type[VLoraError], str]] = [
    ("unknown adapter", lambda _: request("x", adapter="nope"), NotFound, "'nope'.*Known: all-r8"),
    ("empty prompt", lambda _: request("x", prompt=""), InvalidArgument, "prompt is empty"),
    (
        "prompt too long",
        lambda _: request("x", prompt="what " * 1200),
        InvalidArgument,
        r"prompt has \d+ tokens.*context of 1024",
    ),
    (
        "max_tokens too large",
        lambda _: request("x", max_tokens=1024),
        InvalidArgument,
        r"'max_tokens' = 1024 with a prompt of \d+ tokens.*1024",
    ),
    (
        "stop token out of range",
        lambda _: request("x", sampling=SamplingParams(stop_token_ids=(10**6,))),
        InvalidArgument,
        "'stop_token_ids' holds 1000000",
    ),
    (
        "head of an adapter without one",
        lambda _: request("x", adapter="all-r8", use_head=True),
        InvalidArgument,
        "no vision task head",
    ),
    (
        "image without placeholder",
        lambda loop: request("x", images=images([[0, 4, 1, 2, 2, 0]], 4, loop.hidden_size)),
        InvalidArgument,
        "0 image placeholders for 1 image",
    ),
    (
        "placeholder without image",
        lambda _: request("x", prompt="<s><image> what?"),
        InvalidArgument,
        "1 image placeholder for 0 images",
    ),
    (
        "features of another model",
        lambda _: request(
            "x", prompt="<s><image> what?", images=images([[0, 4, 1, 2, 2, 0]], 4, 7)
        ),
        InvalidArgument,
        r"shape \[4, 7\]",
    ),
    (
        "rows beyond the features",
        lambda loop: request(
            "x",
            prompt="<s><image> what?",
            images=images([[0, 5, 1, 2, 2, 0]], 4, loop.hidden_size),
        ),
        InvalidArgument,
        "covers 5 rows, 'image_features' has 4",
    ),
    (
        "rows out of order",
        lambda loop: request(
            "x",
            prompt="<s><image> what?",
            images=images([[1, 3, 1, 2, 2, 0]], 4, loop.hidden_size),
        ),
        InvalidArgument,
        "must begin at row 0",
    ),
    (
        "NaN features",
        lambda loop: request(
            "x",
            prompt="<s><image> what?",
            images=ImageFeatures(
                np.full((4, loop.hidden_size), np.nan, dtype=np.float32),
                np.array([[0, 4, 1, 2, 2, 0]], dtype=np.int32),
            ),
        ),
        InvalidArgument,
        "NaN or infinite",
    ),
    (
        "too many choices",
        lambda _: request(
            "x", sampling=SamplingParams.parse({"choices": [str(i) for i in range(257)]})
        ),
        InvalidArgument,
        "'choices' holds 257 choices; the limit is 256",
    ),
    (
        "choices of too many bytes",
        lambda _: request("x", sampling=SamplingParams.parse({"choices": ["é" * 8193]})),
        InvalidArgument,
        "'choices' holds 16386 bytes; the limit is 16384",
    ),
    (
        "choices that need more tokens than are left",
        lambda _: request(
            "x", sampling=SamplingParams.parse({"choices": ["q" * 400], "max_tokens": 3})
        ),
        InvalidArgument,
        r"longest of 'choices' needs \d+ tokens; 3 are left",
    ),
]


@pytest.mark.parametrize(
    ("make", "kind", "message"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
def test_an_invalid_request_is_refused_and_harms_no_other(
    loop: EngineLoop, make: Callable[[EngineLoop], Request], kind: type[VLoraError], message: str
) -> None:
    sink = Collector()
    loop.submit(request("healthy"), sink)
    with pytest.raises(kind, match=message):
        loop.submit(make(loop), sink)
    assert sink.last("healthy").finish_reason == "length"
    assert "x" not in sink.outputs
