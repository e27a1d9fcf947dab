"""Tests of requests that the engine loop refuses."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, AutoTokenizer

from tests.support.engine_client import PATIENCE, Collector, request, run_together
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.engine.loop import EngineLoop
from vlora.errors import InvalidArgument, NotFound
from vlora.model.chunk import Prompt
from vlora.request import ImageFeatures
from vlora.sampling import SamplingParams

HIDDEN = 192


def images(layout: list[int], width: int = HIDDEN, value: float = 0.5) -> ImageFeatures:
    """Return four equal rows of features, and the layout of one image."""
    rows = np.full((4, width), value, np.float32)
    return ImageFeatures(rows, np.array([layout], dtype=np.int32))


WHOLE = [0, 4, 1, 2, 2, 0]
"""Layout of an image that covers all four rows."""
PICTURE = "<s><image> what?"

REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "empty prompt": ({"prompt": ""}, "prompt is empty"),
    "prompt too long": (
        {"prompt": "what " * 1200},
        r"too long: it has \d+ tokens; the context of 1024 tokens holds a .* at most 1023 tokens",
    ),
    "max_tokens too large": (
        {"max_tokens": 1024},
        r"'max_tokens' = 1024 with a prompt of \d+ tokens.*1024",
    ),
    "stop token out of range": (
        {"sampling": SamplingParams(stop_token_ids=(10**6,))},
        "'stop_token_ids' holds 1000000",
    ),
    "head of an adapter without one": (
        {"adapter": "all-r8", "use_head": True},
        "no vision task head",
    ),
    "image without placeholder": ({"images": images(WHOLE)}, "0 image placeholders for 1 image"),
    "placeholder without image": ({"prompt": PICTURE}, "1 image placeholder for 0 images"),
    "features of another model": (
        {"prompt": PICTURE, "images": images(WHOLE, width=7)},
        r"shape \[4, 7\]",
    ),
    "rows beyond the features": (
        {"prompt": PICTURE, "images": images([0, 5, 1, 2, 2, 0])},
        "covers 5 rows, 'image_features' has 4",
    ),
    "rows out of order": (
        {"prompt": PICTURE, "images": images([1, 3, 1, 2, 2, 0])},
        "must begin at row 0",
    ),
    "NaN features": (
        {"prompt": PICTURE, "images": images(WHOLE, value=np.nan)},
        "NaN or infinite",
    ),
    "too many choices": (
        {"sampling": SamplingParams(choices=tuple(map(str, range(257))))},
        "'choices' holds 257 choices; the limit is 256",
    ),
    "choices of too many bytes": (
        {"sampling": SamplingParams(choices=("é" * 8193,))},
        "'choices' holds 16386 bytes; the limit is 16384",
    ),
    "choices that need more tokens than are left": (
        {"sampling": SamplingParams(choices=("q" * 400,), max_tokens=3)},
        r"longest of 'choices' needs \d+ tokens; 3 are left",
    ),
}
"""Fields of a request, and the error that names what is wrong with them."""


@pytest.fixture(scope="module")
def wide_tokenizer(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint whose tokenizer has tokens that its embedding lacks."""
    folder = tmp_path_factory.mktemp("wide") / "checkpoint"
    shutil.copytree(checkpoint, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    size = len(tokenizer)
    assert tokenizer.add_tokens(["qqq", "zzz"]) == 2
    tokenizer.save_pretrained(folder)
    assert AutoConfig.from_pretrained(folder).text_config.vocab_size == size
    return folder


def test_a_token_beyond_the_embedding_is_refused_and_harms_no_other(wide_tokenizer: Path) -> None:
    engine = Engine(Options(model=wide_tokenizer))
    size = engine.config.vocabulary
    engine.add(engine.prepare(request("healthy")), arrival=0.0)
    message = f"the prompt has token {size + 1} \\('zzz'\\).* from 0 to {size - 1}"
    with pytest.raises(InvalidArgument, match=message):
        engine.prepare(request("x", prompt="<s>what zzz is it?"))
    outputs = [output for _ in range(4) for output in engine.step()]
    assert outputs[-1].finish_reason == "length"


def test_a_choice_is_never_spelled_with_tokens_beyond_the_embedding(wide_tokenizer: Path) -> None:
    engine = Engine(Options(model=wide_tokenizer))
    choices = {"choices": ["qqq", "zzz"], "temperature": 1, "seed": 3, "logprobs": 20}
    outputs = run_together(engine, request("x", sampling=SamplingParams.parse(choices)))["x"]
    assert outputs[-1].finish_reason == "stop"
    assert "".join(output.text for output in outputs) in choices["choices"]  # type: ignore[operator]


def test_penalties_skip_image_tokens_beyond_the_embedding(
    wide_tokenizer: Path, tmp_path: Path
) -> None:
    """An image's positions take features instead of embeddings, so its token may lie anywhere."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(wide_tokenizer, folder)
    config = json.loads((folder / "config.json").read_text())
    config["image_token_id"] = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("zzz")
    (folder / "config.json").write_text(json.dumps(config))
    engine = Engine(Options(model=folder))
    sampling = SamplingParams(temperature=0.0, max_tokens=2, repetition_penalty=1.3)
    asked = request("x", prompt="<s>zzz what?", images=images(WHOLE), sampling=sampling)
    assert run_together(engine, asked)["x"][-1].error is None


def test_an_end_of_text_beyond_the_embedding_is_not_masked(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, folder)
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(
        json.dumps(generation | {"eos_token_id": [generation["eos_token_id"], 10**6]})
    )
    engine = Engine(Options(model=folder))
    sampling = SamplingParams(temperature=0.0, max_tokens=3, min_tokens=2)
    outputs = run_together(engine, request("x", sampling=sampling))["x"]
    assert outputs[-1].error is None


@pytest.mark.parametrize("kept", [2, 3, 4])
def test_a_stop_string_counts_from_the_first_token_after_min_tokens(
    engine: Engine, kept: int
) -> None:
    greedy = SamplingParams(
        temperature=0.0, repetition_penalty=100.0, max_tokens=8, min_tokens=8, ignore_eos=True
    )
    free = run_together(engine, request("free", sampling=greedy))["free"]
    ends = list(itertools.accumulate(len(output.text) for output in free))
    text = "".join(output.text for output in free)
    # The first string ends with the last token of `min_tokens`, the second one character later.
    for end, length in ((ends[kept - 1], None), (ends[kept - 1] + 1, kept + 1)):
        stop = text[end - 3 : end]
        assert text.count(stop) == 1
        sampling = replace(greedy, min_tokens=kept, stop=(stop,))
        outputs = run_together(engine, request("x", sampling=sampling))["x"]
        assert sum(len(output.token_ids) for output in outputs) == (length or 8)
        assert "".join(output.text for output in outputs) == (text[: end - 3] if length else text)


def test_a_prompt_of_more_bytes_than_the_context_can_hold_is_not_tokenized(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizing the largest prompt takes seconds."""
    read: list[str] = []
    monkeypatch.setattr(engine.admission.reader, "read", lambda text, images: read.append(text))
    with pytest.raises(InvalidArgument, match=r"too long: it has \d+ bytes; the context of 1024 "):
        engine.prepare(request("x", prompt="what is it? " * 80_000))
    assert not read


def test_a_prompt_does_not_wait_for_another_one_to_be_tokenized(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizing, proceed = threading.Event(), threading.Event()
    read = engine.admission.reader.read

    def slowly(text: str, features: ImageFeatures | None) -> Prompt:
        if text == "slow":
            tokenizing.set()
            assert proceed.wait(PATIENCE)
        return read(text, features)

    monkeypatch.setattr(engine.admission.reader, "read", slowly)
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(engine.prepare, request("slow", prompt="slow"))
        assert tokenizing.wait(PATIENCE)
        quick = threads.submit(engine.prepare, request("quick"))
        done, _ = wait([quick], PATIENCE)
        proceed.set()
        assert done
        assert slow.result().sequence.prompt_length > 0


@pytest.mark.parametrize(("fields", "message"), REFUSALS.values(), ids=REFUSALS)
def test_an_invalid_request_is_refused_and_harms_no_other(
    loop: EngineLoop, engine: Engine, fields: dict[str, Any], message: str
) -> None:
    assert engine.config.hidden == HIDDEN
    sink = Collector()
    loop.submit(request("healthy"), sink)
    with pytest.raises(InvalidArgument, match=message):
        loop.submit(request("x", **fields), sink)
    assert sink.last("healthy").finish_reason == "length"
    assert "x" not in sink.outputs


def test_an_unknown_adapter_is_not_found_and_the_known_ones_are_named(engine: Engine) -> None:
    with pytest.raises(NotFound, match=r"'nope'.*Known: all-r8"):
        engine.prepare(request("x", adapter="nope"))
