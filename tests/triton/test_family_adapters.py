"""Tests of adapters of the vision tower that are added, replaced and removed, or broken, while a
real server of one family runs. The oracle is transformers with PEFT.

test_families.py tests further families.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.families import TOWER, VISION_ADAPTERS, Family
from tests.support.polling import until
from tests.support.triton_client import Asker, Refused, asking, png, serving
from vlora.launcher.repository import ServerOptions
from vlora.vision.images import DecodedImage
from vlora.vision.prompts import ChatTemplate, render

MAX_TOKENS = 8

Seen = dict[str | None, set[str | Refused]]
"""Answers and refusals by adapter."""


@pytest.fixture(scope="module")
def family(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family("qwen3_vl", checkpoint, tmp_path_factory.mktemp("served-family"))


@pytest.fixture(scope="module")
def ask(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asker]:
    log = tmp_path_factory.mktemp("family-server") / "tritonserver.log"
    options = ServerOptions(model=family.checkpoint, adapters=family.adapters, log=log)
    with serving(options) as server, asking(server) as asker:
        yield asker


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


def refusal_of(ask: Callable[[], str]) -> str:
    """Return the message with which a request is refused; "" if it is answered."""
    try:
        ask()
    except Refused as refused:
        return refused.message
    return ""


@contextmanager
def asking_all_the_time(questions: Questions, adapters: Sequence[str | None]) -> Iterator[Seen]:
    """Ask with each adapter in turn until the context ends. Yield the answers and the refusals by
    adapter."""
    seen: Seen = {adapter: set() for adapter in adapters}
    ended = threading.Event()

    def ask(adapter: str | None) -> None:
        while not ended.wait(0.02):
            try:
                seen[adapter].add(questions.text(adapter, 2))
            except Refused as refused:
                seen[adapter].add(refused)

    with ThreadPoolExecutor(len(adapters)) as pool:
        asking = [pool.submit(ask, adapter) for adapter in adapters]
        try:
            yield seen
        finally:
            ended.set()
        for one in asking:
            one.result()


def test_adapters_of_the_vision_tower_are_changed_under_load(
    family: Family, questions: Questions, tmp_path: Path
) -> None:
    """Each answer is that of one version: its weights in the decoder, and its image features."""
    known = family.adapters / "both"

    def make(seed: int, name: str) -> Path:
        torch.manual_seed(seed)
        family.make_adapter(tmp_path / name, VISION_ADAPTERS["both"])
        return tmp_path / name

    def rescaled(source: Path, name: str) -> Path:
        """Return a copy of an adapter whose files differ only in `lora_alpha`."""
        shutil.copytree(source, tmp_path / name)
        file = tmp_path / name / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 16}))
        return tmp_path / name

    def use(source: Path) -> None:
        """Replace the adapter `both` by a copy of another, and wait for its answer."""
        shutil.copytree(source, tmp_path / "next")
        if known.exists():
            known.rename(tmp_path / f"before {source.name}")
        (tmp_path / "next").rename(known)
        until(lambda: expected[source] in seen["both"])

    def is_passing(refused: Refused) -> bool:
        return any(code in refused.message for code in ("NOT_FOUND: ", "UNAVAILABLE: adapter"))

    one = make(11, "one")
    versions = [one, make(12, "two"), rescaled(one, "three")]
    for version in versions:
        family.model.load_adapter(version, version.name)
    family.model.eval()
    expected = {version: questions.expected(version.name, 2) for version in versions}
    of_others = {name: questions.expected(name, 2) for name in (None, "first")}
    assert len({*expected.values(), *of_others.values()}) == 5
    with asking_all_the_time(questions, (None, "first", "both")) as seen:
        for version in versions:
            use(version)
            assert questions.text("both", 2, "lmm_unary") == expected[version]
        known.rename(tmp_path / "removed")
        until(lambda: "NOT_FOUND: " in refusal_of(partial(questions.text, "both", 2)))
        use(versions[1])
    assert {one for one in seen["both"] if isinstance(one, str)} == {*expected.values()}
    assert all(is_passing(one) for one in seen["both"] if isinstance(one, Refused))
    for name, own in of_others.items():
        assert seen[name] == {own}


def renamed(old: str, new: str, tensors: dict[str, torch.Tensor], key: str) -> None:
    """Move A and B of a module to another module."""
    for one in (key, key.replace("lora_A", "lora_B")):
        tensors[one.replace(old, new)] = tensors.pop(one)


BROKEN: dict[str, tuple[str, Callable[[dict[str, torch.Tensor], str], object]]] = {
    "not finite": ("NaN or Inf in", lambda tensors, key: tensors[key].fill_(torch.nan)),
    "wrong shape": ("they must be", lambda tensors, key: tensors.update({key: torch.ones(4, 3)})),
    "unknown layer": ("not a linear layer", partial(renamed, "blocks.0", "blocks.9")),
    "table": ("not a linear layer", partial(renamed, "blocks.0.attn.qkv", "pos_embed")),
}
"""Reason of the refusal, and change of the tensors, by name of a fault of the tower's weights."""


def test_a_broken_part_of_the_vision_tower_is_the_error_of_its_adapter(
    family: Family, questions: Questions, tmp_path: Path
) -> None:
    """Requests of healthy and broken adapters are encoded together."""
    healthy = {name: questions.text(name, 1) for name in (None, "first")}
    for name, (_, change) in BROKEN.items():
        folder = tmp_path / name
        family.make_adapter(folder, TOWER)
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        change(tensors, next(key for key in sorted(tensors) if "blocks.0.attn.qkv.lora_A" in key))
        save_file(tensors, file)
        folder.rename(family.adapters / name)

    def refusal(name: str) -> str:
        return refusal_of(partial(questions.text, name, 1))

    def is_refused(name: str, reason: str) -> bool:
        return reason in refusal(name)

    for name, (reason, _) in BROKEN.items():
        until(partial(is_refused, name, reason))
    with ThreadPoolExecutor(12) as pool:
        refusals = [pool.submit(refusal, name) for name in BROKEN]
        texts = [pool.submit(questions.text, name, 1) for name in [*healthy] * 4]
        for (reason, _), refused in zip(BROKEN.values(), refusals, strict=True):
            assert reason in refused.result()
        assert [text.result() for text in texts] == [*healthy.values()] * 4
