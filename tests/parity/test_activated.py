"""Parity of activated LoRA with PEFT. One prefill of an image serves the base and all such
adapters."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel

from tests.support import adapter_kinds as kinds
from tests.support.checkpoints import make_checkpoint
from tests.support.engine_client import request, run_questions
from tests.support.families import Family
from tests.support.modes import drive
from tests.support.oracle import NEAR_TIE
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.ids import BASE
from vlora.model.decoder_config import load_config
from vlora.model.inputs import PromptReader
from vlora.request import ImageFeatures
from vlora.vision.images import DecodedImage

MAX_TOKENS = 10
BLOCK = 4
INVOCATIONS = {"check": " check it", "count": " count them", "order": " please"}
"""Text that invokes each activated adapter."""
PLAIN = "always"
"""Name of an ordinary adapter."""
PROMPTS = (
    "<s> <image> what is there? check it now",
    "<s> <image> what is there? count them now",
    "<s> check it: <image> then check it and say so please check it",
    "<s> <image> what is there? count them, count them",
    "<s> check it now, count them please",
    "<s> <image> what is there?",
    " check it",
)


@pytest.fixture(scope="module", params=["llava_next", "qwen2_vl"])
def family(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Family:
    """Return a family with its activated adapters and an ordinary one."""
    folder = tmp_path_factory.mktemp(request.param)
    family = Family(make_checkpoint(request.param, checkpoint, folder), folder / "other-adapters")
    family.adapters = tmp_path_factory.mktemp("adapters")
    for seed, (name, text) in enumerate(INVOCATIONS.items()):
        tokens = family.tokenizer(text, add_special_tokens=False)["input_ids"]
        model = kinds.lora(
            family.checkpoint, alora_invocation_tokens=tokens, r=3 + seed, task_type="CAUSAL_LM"
        )
        kinds.save(model, family.adapters / name)
    kinds.save(kinds.lora(family.checkpoint), family.adapters / PLAIN)
    first, *others = (*INVOCATIONS, PLAIN)
    family.model = PeftModel.from_pretrained(
        kinds.stock(family.checkpoint), family.adapters / first, first
    )
    for name in others:
        family.model.load_adapter(family.adapters / name, name)
    family.model.eval()
    return family


def image() -> DecodedImage:
    return DecodedImage(np.random.default_rng(3).integers(0, 256, (40, 60, 3), np.uint8))


def engine_of(family: Family, **options: Any) -> Engine:
    options = {"block_size": BLOCK, "kv_cache_tokens": 8192, "max_num_seqs": 6} | options
    engine = Engine(Options(model=family.checkpoint, adapters=family.adapters, **options))
    assert not engine.adapters.table.broken
    return engine


def features(family: Family) -> ImageFeatures:
    (encoded,) = family.service.run([[image()]])
    return ImageFeatures(encoded.features, encoded.layout)


def run(engine: Engine, family: Family, *asked: tuple[str, str | None]) -> list[list[int]]:
    """Return the tokens of answers to prompts with their adapters, which arrive together."""
    own = [features(family) if "<image>" in prompt else None for prompt, _ in asked]
    questions = [(prompt_of(family, prompt), (), adapter) for prompt, adapter in asked]
    return [*run_questions(engine, questions, own, MAX_TOKENS)[0].values()]


def prompt_of(family: Family, prompt: str) -> str:
    """Return the prompt with the family's own mark of an image."""
    token = family.tokenizer.convert_ids_to_tokens(family.model.config.image_token_id)
    if token == "<image>":
        return prompt
    return prompt.replace("<image>", f"<|vision_start|>{token}<|vision_end|>")


@pytest.mark.parametrize("mode", ["unmerged", "mixed", "preempted", "chunked", "no prefix cache"])
def test_answers_equal_those_of_peft(family: Family, mode: str) -> None:
    reader = PromptReader(family.checkpoint, load_config(family.checkpoint))
    longest = max(
        len(reader.read(prompt_of(family, p), features(family) if "<image>" in p else None).ids)
        for p in PROMPTS
    )
    options: dict[str, Any] = {
        "preempted": {"kv_cache_tokens": longest + 4 * MAX_TOKENS},
        "chunked": {"max_num_batched_tokens": 8},
        "no prefix cache": {"enable_prefix_caching": False},
    }.get(mode, {})
    engine = engine_of(family, **options)
    if mode == "mixed":
        engine.adapters.slot(PLAIN)
        drive(engine, lambda i: engine.adapters.slot(PLAIN) if i % 3 else BASE)
    adapters = (None, *INVOCATIONS, PLAIN)
    cases = list(itertools.product(PROMPTS, adapters))
    answers = dict(zip(cases, run(engine, family, *cases), strict=True))
    if mode == "preempted":
        assert engine.stats().preemptions > 0
    changed = set()
    for (prompt, adapter), answer in answers.items():
        images = [image()] if "<image>" in prompt else []
        text = prompt_of(family, prompt)
        assert len(answer) == MAX_TOKENS
        assert family.gap(text, images, adapter, answer) <= NEAR_TIE, (prompt, adapter)
        invoked = adapter in INVOCATIONS and INVOCATIONS[adapter] in prompt
        if adapter in INVOCATIONS and not invoked:
            assert answer == answers[prompt, None]
        elif invoked and answer != answers[prompt, None]:
            changed.add(adapter)
    assert changed == set(INVOCATIONS)


def test_one_prefill_of_an_image_serves_the_base_and_every_activated_adapter(
    family: Family,
) -> None:
    engine = engine_of(family)
    question = "<s> <image> what is there?"
    run(engine, family, (question, None))
    asked = request("x", prompt=prompt_of(family, question), images=features(family))
    length = engine.prepare(asked).sequence.prompt_length
    before = engine.stats().cached_tokens
    for name, text in INVOCATIONS.items():
        run(engine, family, (question + text, name))
        cached, before = engine.stats().cached_tokens - before, engine.stats().cached_tokens
        assert cached >= length - 1 - BLOCK, (name, cached, length)
        run(engine, family, (question + text, PLAIN))
        first = name == next(iter(INVOCATIONS))
        assert (engine.stats().cached_tokens == before) == first, "ordinary ones share no blocks"
        before = engine.stats().cached_tokens


def test_a_later_invocation_shares_no_block_of_an_earlier_one(family: Family) -> None:
    """The longer prompt begins with the shorter one, but its adapter starts later."""
    engine = engine_of(family)
    once = "<s> check it what is there? check it"
    for prompt in (once, f"{once} and so on: check it", once):
        (answer,) = run(engine, family, (prompt, "check"))
        assert family.gap(prompt, [], "check", answer) <= NEAR_TIE


def test_an_activated_adapter_is_never_merged(family: Family) -> None:
    engine = engine_of(family, policy="predictive")
    slot = engine.adapters.slot("check")
    assert "does not act on all tokens" in str(engine.switcher.refusal(slot))
    assert not engine.costs.mergeable(slot)
    with pytest.raises(ValueError, match="activated"):
        engine.switcher.switch(slot)
    assert engine.costs.mergeable(engine.adapters.slot(PLAIN))


@pytest.mark.parametrize("family", ["llava_next"], indirect=True)
def test_answers_equal_those_that_peft_generates(family: Family) -> None:
    prompt = "<s> what is there? check it now"
    ids = torch.tensor([family.tokenizer(prompt, add_special_tokens=False)["input_ids"]])
    model = PeftModel.from_pretrained(
        kinds.stock(family.checkpoint), family.adapters / "check"
    ).eval()
    generated = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=MAX_TOKENS,
        max_new_tokens=MAX_TOKENS,
    )
    (answer,) = run(engine_of(family), family, (prompt, "check"))
    assert answer == generated[0, ids.shape[1] :].tolist()
