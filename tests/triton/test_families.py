"""Parity of vision families behind a real server with transformers and PEFT, over gRPC, also while
adapters of one are added, replaced, removed or broken.

Each family has one server with few KV pages and a policy that merges whichever adapter most of the
ready requests use. So the tests force merged, mixed and unmerged steps, preemption, and reuse of
prefixes by what they ask, not by when they ask it.

parity/test_families.py tests all families without a server. What a server adds is the way of images
and features between its models, so each way that it can differ has one family here.
"""

from __future__ import annotations

import itertools
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

from tests.support.families import (
    ADAPTERS,
    FAMILY_NAMES,
    VISION_ADAPTERS,
    OracleFamily,
    make_family,
)
from tests.support.gateway import running
from tests.support.polling import until
from tests.support.served_family import (
    INVOCATION,
    MAX_TOKENS,
    Question,
    Served,
    add_kinds,
    check_conversations,
    differ,
    draw_questions,
    encoded_images,
    longest_prompt,
    preemptions,
)
from tests.support.triton_client import Refused, asking, serving
from vlora.launcher.repository import ServerOptions
from vlora.vision.images import DecodedImage
from vlora.vision.prompts import render

BLOCK = 4
"""Tokens of a KV page."""
SHORT = 8
"""Tokens of answers while adapters change."""
ROUNDS = 40
"""Maximum number of times that questions are asked at once until all modes have been seen."""
MERGED, MIXTURE, UNMERGED = "merged", "mixture", "unmerged"
FIRST, SECOND = ADAPTERS
USED = (FIRST, SECOND, None, FIRST, FIRST, SECOND, FIRST, None, FIRST, FIRST)
"""Adapters of the questions. Most questions use the first adapter, so a step with all of them
merges it. A step with one question of each kind merges none."""
BOTH, TOWER, CONNECTOR = VISION_ADAPTERS
USED_FOR_PAIRS = (BOTH, TOWER, None, BOTH, BOTH, CONNECTOR, BOTH, FIRST, BOTH, BOTH)
"""Adapters of questions of which each two have the same images and a clip. As in USED, most
questions use the first adapter, and a step with one question of each kind merges none."""


SERVED_FAMILIES = (
    "qwen_vl",  # a clip as separate images, a tower of its own
    "llava_next",  # several tiles of an image
    "llava_onevision",  # a clip as a video, pooled
    "qwen3_vl",  # positions in three dimensions, time stamps, features at several depths
)


@pytest.fixture(scope="module", params=SERVED_FAMILIES)
def family(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> OracleFamily:
    folder = tmp_path_factory.mktemp(request.param)
    made = make_family(request.param, checkpoint, folder, official=True)
    made.add_vision_adapters()
    return made


@pytest.fixture(scope="module")
def kinds(family: OracleFamily) -> tuple[str, ...]:
    """Return the names of further adapters of the family."""
    return add_kinds(family)


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return draw_questions(USED)


@pytest.fixture(scope="module")
def served(
    family: OracleFamily,
    kinds: tuple[str, ...],
    questions: list[Question],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("family-server")
    options = ServerOptions(
        model=family.checkpoint,
        adapters=family.adapters,
        model_json={
            "policy": "paper",
            # Every request counts as starved, so only the adapters of the requests choose the mode.
            "max_wait_seconds": 1e-9,
            "max_num_seqs": len(questions),
            "block_size": BLOCK,
            # The pages hold one answer to any question, but not the answers to all of them.
            "kv_cache_tokens": longest_prompt(family, questions) + MAX_TOKENS + BLOCK,
        },
        environment={"XDG_CACHE_HOME": str(folder / "cache")},
        log=folder / "tritonserver.log",
    )
    with serving(options) as server, asking(server) as asker:
        yield Served(family, asker)


def test_answers_to_lone_questions_are_those_of_the_stock_model(
    served: Served, questions: list[Question]
) -> None:
    for question in questions[:6]:
        answer = served.answer(question)
        assert set(answer.modes) == {MERGED if question.adapter else UNMERGED}
        text = served.ask.once("video_analytics", **served.inputs(question))["text_output"]
        assert text == answer.text


@pytest.mark.parametrize("family", FAMILY_NAMES, indirect=True)
def test_conversations_with_the_gateway_are_those_of_the_stock_model(
    served: Served, tmp_path: Path
) -> None:
    pytest.importorskip("openai", reason="the package openai is not installed")
    with running(served.ask.grpc_url, tmp_path) as gateway:
        check_conversations(gateway, served.family)


def test_a_repeated_prefix_is_computed_once(served: Served, questions: list[Question]) -> None:
    for question in questions[:6]:
        first = served.answer(question)
        again = served.answer(question)
        assert again.tokens == first.tokens
        assert again.cached >= again.inputs - BLOCK
        other = served.answer(question._replace(text=question.text.replace("in ", "")))
        assert other.cached >= other.inputs // 2


def test_a_prefix_of_another_adapter_is_not_reused(
    served: Served, questions: list[Question]
) -> None:
    for question, other in zip(questions[:3], (SECOND, None, FIRST), strict=True):
        own = question._replace(text=f"whose is {question.text}")
        served.answer(own)
        answer = served.answer(own._replace(adapter=other))
        assert answer.cached < answer.inputs // 2


@pytest.mark.parametrize("pictures", [1, 4])
def test_adapters_of_the_vision_tower_and_the_connector_see_features_of_their_own(
    served: Served, questions: list[Question], pictures: int
) -> None:
    """An image of the base model is encoded again for each adapter of the tower or the connector.
    Afterwards, its features and the prompt's prefix are cached. The questions have two images, and
    an image with a clip."""
    images, frames = (
        # No other test asks about these pixels.
        tuple(DecodedImage(255 - one.rgb, one.is_video) for one in drawn)
        for drawn in (questions[pictures].images, questions[pictures].frames)
    )
    question = Question(f"in {pictures}?", images, frames, adapter=None)
    answers = [served.answer(question)]
    for adapter in (FIRST, *VISION_ADAPTERS):
        asked = question._replace(adapter=adapter)
        before = encoded_images(served)
        first = served.answer(asked)
        encoded = encoded_images(served)
        if adapter == FIRST:
            assert encoded == before
        else:
            assert before < encoded <= before + len(asked.images) + len(asked.frames)
            assert first.cached < first.inputs // 2
        again = served.answer(asked)
        assert again.tokens == first.tokens
        assert again.cached >= again.inputs - BLOCK
        assert encoded_images(served) == encoded
        answers.append(first)
    assert all(differ(one, other) for one, other in itertools.combinations(answers, 2))


def test_adapters_of_every_kind_answer_as_the_stock_model(
    served: Served, kinds: tuple[str, ...], questions: list[Question]
) -> None:
    """An activated adapter reuses the base model's prefix up to its invocation."""
    base = questions[4]._replace(adapter=None, text="is 4?")
    for adapter in kinds:
        of_base = served.answer(base)
        answer = served.answer(base._replace(adapter=adapter))
        assert differ(answer, of_base)
        is_activated = adapter == "activated"
        assert set(answer.modes) == {UNMERGED if is_activated else MERGED}
        shared = answer.inputs - INVOCATION - BLOCK if is_activated else 0
        assert shared <= answer.cached < max(shared + 2 * BLOCK, answer.inputs // 2)
    asked = [
        question._replace(adapter=adapter) for adapter in kinds for question in (base, questions[1])
    ]
    served.together(asked)


@pytest.mark.parametrize("used", [USED, USED_FOR_PAIRS], ids=["decoder", "tower"])
def test_answers_in_mixed_steps_and_after_preemption_are_those_of_the_stock_model(
    served: Served, questions: list[Question], used: tuple[str | None, ...]
) -> None:
    """All questions at once need more pages than there are, and most of them use one adapter. Two
    questions with different adapters have no majority, so neither adapter is merged."""
    if used is USED_FOR_PAIRS:
        questions = [
            questions[number // 2]._replace(adapter=adapter, text=f"what {number}?")
            for number, adapter in enumerate(used)
        ]
    before = preemptions(served)
    modes: dict[str | None, set[str]] = {adapter: set() for adapter in used}

    def all_seen() -> bool:
        """Ask, and return whether each mode has been seen."""
        for asked in (questions, questions[:2]):
            for question, answer in zip(asked, served.together(asked), strict=True):
                modes[question.adapter].update(answer.modes)
        return (
            preemptions(served) > before
            and modes[used[0]] == {MERGED, MIXTURE, UNMERGED}
            and modes[used[1]] >= {MIXTURE, UNMERGED}
            and MIXTURE in modes[None]
        )

    # Requests that do not overlap, which no server can force, are asked again.
    assert any(all_seen() for _ in range(ROUNDS)), (preemptions(served) - before, modes)


class Asked:
    """A question about images: the answers of a server and of the oracle, by adapter."""

    def __init__(self, served: Served) -> None:
        self._served = served
        rng = np.random.default_rng(2)
        sizes = rng.integers(12, 80, (2, 2))
        self._images = tuple(
            DecodedImage(rng.integers(0, 256, (*size, 3), np.uint8)) for size in sizes
        )

    def text(self, adapter: str | None, images: int, model: str = "video_analytics") -> str:
        """Return the server's answer to a question about the first images."""
        inputs = self._served.inputs(self._question(adapter, images))
        inputs["sampling_parameters"]["max_tokens"] = SHORT
        if model == "lmm_unary":
            inputs["exclude_input_in_output"] = True
        return str(self._served.ask.once(model, **inputs)["text_output"]).strip()

    def expected(self, adapter: str | None, images: int) -> str:
        """Return the stock model's answer."""
        family, question = self._served.family, self._question(adapter, images)
        prompt = render("vqa", question.text, images, 0, self._served.template)
        tokens = family.greedy(prompt, question.images, adapter, SHORT)
        return str(family.tokenizer.decode(tokens, skip_special_tokens=True)).strip()

    def _question(self, adapter: str | None, images: int) -> Question:
        return Question("what is this?", self._images[:images], (), adapter)


def refusal_of(ask: Callable[[], str]) -> str:
    """Return the message with which a request is refused; "" if it is answered."""
    try:
        ask()
    except Refused as refused:
        return refused.message
    return ""


Seen = dict[str | None, set[str | Refused]]
"""Answers and refusals by adapter."""


@contextmanager
def asking_all_the_time(asked: Asked, adapters: Sequence[str | None]) -> Iterator[Seen]:
    """Ask with each adapter in turn until the context ends. Yield the answers and the refusals by
    adapter."""
    seen: Seen = {adapter: set() for adapter in adapters}
    ended = threading.Event()

    def ask(adapter: str | None) -> None:
        while not ended.wait(0.02):
            try:
                seen[adapter].add(asked.text(adapter, 2))
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


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_adapters_of_the_vision_tower_are_changed_under_load(
    family: OracleFamily, served: Served, tmp_path: Path
) -> None:
    """Each answer is that of one version: its weights in the decoder, and its image features."""
    asked = Asked(served)
    known = family.adapters / "changing"

    def make(seed: int, name: str) -> Path:
        torch.manual_seed(seed)
        family.make_adapter(tmp_path / name, VISION_ADAPTERS[BOTH])
        return tmp_path / name

    def rescaled(source: Path, name: str) -> Path:
        """Return a copy of an adapter whose files differ only in `lora_alpha`."""
        shutil.copytree(source, tmp_path / name)
        file = tmp_path / name / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 16}))
        return tmp_path / name

    def use(source: Path) -> None:
        """Replace the adapter `changing` by a copy of another, and wait for its answer."""
        shutil.copytree(source, tmp_path / "next")
        if known.exists():
            known.rename(tmp_path / f"before {source.name}")
        (tmp_path / "next").rename(known)
        until(lambda: expected[source] in seen["changing"])

    def is_passing(refused: Refused) -> bool:
        return any(code in refused.message for code in ("NOT_FOUND: ", "UNAVAILABLE: adapter"))

    one = make(11, "one")
    versions = [one, make(12, "two"), rescaled(one, "three")]
    for version in versions:
        family.model.load_adapter(version, version.name)
    family.model.eval()
    expected = {version: asked.expected(version.name, 2) for version in versions}
    of_others = {name: asked.expected(name, 2) for name in (None, FIRST)}
    assert len({*expected.values(), *of_others.values()}) == 5
    with asking_all_the_time(asked, (None, FIRST, "changing")) as seen:
        for version in versions:
            use(version)
            assert asked.text("changing", 2, "lmm_unary") == expected[version]
        known.rename(tmp_path / "removed")
        until(lambda: "NOT_FOUND: " in refusal_of(partial(asked.text, "changing", 2)))
        use(versions[1])
    assert {one for one in seen["changing"] if isinstance(one, str)} == {*expected.values()}
    assert all(is_passing(one) for one in seen["changing"] if isinstance(one, Refused))
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


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_a_broken_part_of_the_vision_tower_is_the_error_of_its_adapter(
    family: OracleFamily, served: Served, tmp_path: Path
) -> None:
    """Requests of healthy and broken adapters are encoded together."""
    asked = Asked(served)
    healthy = {name: asked.text(name, 1) for name in (None, FIRST)}
    for name, (_, change) in BROKEN.items():
        folder = tmp_path / name
        family.make_adapter(folder, VISION_ADAPTERS[TOWER])
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        change(tensors, next(key for key in sorted(tensors) if "blocks.0.attn.qkv.lora_A" in key))
        save_file(tensors, file)
        folder.rename(family.adapters / name)

    def refusal(name: str) -> str:
        return refusal_of(partial(asked.text, name, 1))

    def is_refused(name: str, reason: str) -> bool:
        return reason in refusal(name)

    for name, (reason, _) in BROKEN.items():
        until(partial(is_refused, name, reason))
    with ThreadPoolExecutor(12) as pool:
        refusals = [pool.submit(refusal, name) for name in BROKEN]
        texts = [pool.submit(asked.text, name, 1) for name in [*healthy] * 4]
        for (reason, _), refused in zip(BROKEN.values(), refusals, strict=True):
            assert reason in refused.result()
        assert [text.result() for text in texts] == [*healthy.values()] * 4
