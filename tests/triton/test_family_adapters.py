"""Tests of adapters of one vision family that are added and replaced while a real server runs.

Among them are adapters of the vision tower, activated ones, and one that was converted from DoRA.
The oracle is transformers with PEFT. test_families.py tests all families.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import adapter_kinds as kinds
from tests.support.families import VISION_ADAPTERS, Family
from tests.support.polling import until
from tests.support.triton_client import Asker, Refused, asking, png
from vlora.generation.base_weights import BaseWeights
from vlora.generation.convert import ConversionLimits, convert
from vlora.launcher.server import ServerOptions, TritonServer
from vlora.model.decoder_config import load_config
from vlora.model.loader import adapter_shape
from vlora.vision.images import DecodedImage
from vlora.vision.prompts import ChatTemplate, render

MAX_TOKENS = 8
FULL_RANK = 96
"""Rank at which every change of the small checkpoint's weights is exact."""


@pytest.fixture(scope="module")
def family(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family("qwen3_vl", checkpoint, tmp_path_factory.mktemp("served-family"))


@pytest.fixture(scope="module")
def ask(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asker]:
    log = tmp_path_factory.mktemp("family-server") / "tritonserver.log"
    options = ServerOptions(model=family.checkpoint, adapters=family.adapters, log=log)
    with TritonServer(options) as server, asking(server) as asker:
        yield asker
        assert server.failure() is None, server.explain()
        # test_lifecycle.py tests a graceful end, which takes seconds.
        server.kill()


class Questions:
    """Asks the server about drawn images, and compares the answers with the stock model's."""

    def __init__(self, family: Family, ask: Asker) -> None:
        self.family, self.ask = family, ask
        self.template = ChatTemplate.from_checkpoint(family.checkpoint)
        rng = np.random.default_rng(2)
        sizes = rng.integers(12, 80, (2, 2))
        self.images = [DecodedImage(rng.integers(0, 256, (*size, 3), np.uint8)) for size in sizes]

    def text(self, adapter: str | None, images: int, model: str = "video_analytics") -> str:
        """Return the server's answer to a question about the first images."""
        sampling = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0}
        options = {"task": "vqa", "exclude_input_in_output": True} if model == "lmm_unary" else {}
        answer = self.ask.once(
            model,
            text_input="what is this?",
            image=[png(image.rgb) for image in self.images[:images]],
            sampling_parameters=sampling | ({"lora_name": adapter} if adapter else {}),
            **options,
        )
        return str(answer["text_output"]).strip()

    def expected(self, adapter: str | None, images: int) -> str:
        prompt = render("vqa", "what is this?", images, 0, self.template)
        tokens = self.family.greedy(prompt, self.images[:images], adapter, MAX_TOKENS)
        return str(self.family.tokenizer.decode(tokens, skip_special_tokens=True)).strip()


@pytest.fixture(scope="module")
def questions(family: Family, ask: Asker) -> Questions:
    return Questions(family, ask)


def test_adapters_of_the_vision_tower_are_added_and_replaced(
    family: Family, questions: Questions, tmp_path: Path
) -> None:
    def use(seed: int, name: str) -> None:
        """Replace the adapter `both` by random weights, which the stock model has as `name`."""
        torch.manual_seed(seed)
        family.make_adapter(tmp_path / name, VISION_ADAPTERS["both"])
        if (family.adapters / "both").exists():
            (family.adapters / "both").rename(tmp_path / f"before {name}")
        (tmp_path / name).rename(family.adapters / "both")
        family.model.load_adapter(family.adapters / "both", name)
        family.model.eval()

    def answer(model: str = "video_analytics") -> str | None:
        """Return the answer, or None while the processes see different versions."""
        try:
            return questions.text("both", 2, model)
        except Refused as refused:
            if any(code in refused.message for code in ("NOT_FOUND: ", "UNAVAILABLE: adapter")):
                return None
            raise

    base = questions.text(None, 2)
    use(11, "one")
    first = until(answer)
    assert first == questions.expected("one", 2)
    assert answer("lmm_unary") == first
    use(12, "two")
    second = until(lambda: text if (text := answer()) not in (None, first) else None)
    assert second == questions.expected("two", 2)
    assert len({base, first, second}) == 3
    assert questions.text(None, 2) == base


def test_activated_and_converted_adapters_are_served(
    family: Family, questions: Questions, tmp_path: Path
) -> None:
    prompt = render("vqa", "what is this?", 1, 0, questions.template)
    invocation = family.tokenizer(prompt, add_special_tokens=False)["input_ids"][-3:]
    activated = {"alora_invocation_tokens": invocation, "task_type": "CAUSAL_LM"}
    made = {"activated": activated, "dora": {"use_dora": True}}
    for name, options in made.items():
        kinds.save(kinds.lora(family.checkpoint, **options), tmp_path / name)
        family.model.load_adapter(tmp_path / name, name)
    family.model.eval()
    config = load_config(family.checkpoint)
    shape, weights = (
        adapter_shape(family.checkpoint, config),
        BaseWeights(family.checkpoint, config),
    )
    convert(
        tmp_path / "dora", tmp_path / "converted", shape, weights, ConversionLimits(FULL_RANK, 1e-4)
    )
    (tmp_path / "activated").rename(family.adapters / "activated")
    (tmp_path / "converted").rename(family.adapters / "dora")

    def answer(name: str) -> str | None:
        """Return the answer, or None while the server does not know the adapter."""
        try:
            return questions.text(name, 1)
        except Refused as refused:
            if "NOT_FOUND: " in refused.message:
                return None
            raise

    found = {name: until(partial(answer, name)) for name in made}
    assert found == {name: questions.expected(name, 1) for name in made}
    assert len({questions.text(None, 1), *found.values()}) == 3


def test_a_broken_part_of_the_vision_tower_is_the_error_of_its_adapter(
    family: Family, questions: Questions, tmp_path: Path
) -> None:
    base = questions.text(None, 1)
    family.make_adapter(tmp_path / "bad", VISION_ADAPTERS["tower"])
    file = tmp_path / "bad" / "adapter_model.safetensors"
    tensors = load_file(file)
    key = sorted(tensors)[0]
    tensors[key][0, 0] = float("nan")
    save_file(tensors, file)
    (tmp_path / "bad").rename(family.adapters / "bad")

    def refusal() -> str | None:
        with pytest.raises(Refused) as caught:
            questions.text("bad", 1)
        return None if "NOT_FOUND" in caught.value.message else caught.value.message

    assert f"NaN or Inf in '{key}'" in until(refusal)
    assert questions.text(None, 1) == base
