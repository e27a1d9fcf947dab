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
from tests.support.families import Family
from tests.support.modes import drive
from tests.support.oracle import NEAR_TIE
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.ids import BASE
from vlora.model.decoder_config import load_config
from vlora.model.inputs import PromptReader
from vlora.request import ImageFeatures, Request
from vlora.sampling import SamplingParams
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
    family = Family(request.param, checkpoint, tmp_path_factory.mktemp(request.param))
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


def ask(engine: Engine, family: Family, prompt: str, adapter: str | None, name: str) -> None:
    own = features(family) if "<image>" in prompt else None
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    request = Request(name, prompt_of(family, prompt), params, adapter=adapter, images=own)
    engine.add(engine.prepare(request), arrival=0.0)


def run(engine: Engine) -> dict[str, list[int]]:
    answers: dict[str, list[int]] = {}
    while not engine.idle:
        for output in engine.step():
            assert output.error is None
            answers.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check_integrity()
    return answers


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
    for number, (prompt, adapter) in enumerate(cases):
        ask(engine, family, prompt, adapter, str(number))
    answers = run(engine)
    if mode == "preempted":
        assert engine.stats().preemptions > 0
    changed = set()
    for number, (prompt, adapter) in enumerate(cases):
        images = [image()] if "<image>" in prompt else []
        answer, text = answers[str(number)], prompt_of(family, prompt)
        assert len(answer) == MAX_TOKENS
        assert family.gap(text, images, adapter, answer) <= NEAR_TIE, (prompt, adapter)
        invoked = adapter in INVOCATIONS and INVOCATIONS[adapter] in prompt
        if adapter in INVOCATIONS and not invoked:
            assert answer == answers[str(cases.index((prompt, None)))]
        elif invoked and answer != answers[str(cases.index((prompt, None)))]:
            changed.add(adapter)
    assert changed == set(INVOCATIONS)


def test_one_prefill_of_an_image_serves_the_base_and_every_activated_adapter(
    family: Family,
) -> None:
    engine = engine_of(family)
    prompts = {name: f"<s> <image> what is there?{text}" for name, text in INVOCATIONS.items()}
    ask(engine, family, "<s> <image> what is there?", None, "base")
    run(engine)
    before = engine.stats().cached_tokens
    for name, prompt in prompts.items():
        ask(engine, family, prompt, name, name)
        run(engine)
        asked = Request(
            "x",
            prompt_of(family, "<s> <image> what is there?"),
            SamplingParams(),
            images=features(family),
        )
        ids = engine.prepare(asked).sequence.prompt_length
        cached, before = engine.stats().cached_tokens - before, engine.stats().cached_tokens
        assert cached >= ids - 1 - BLOCK, (name, cached, ids)
        ask(engine, family, prompt, PLAIN, f"{name} {PLAIN}")
        run(engine)
        first = name == next(iter(prompts))
        assert (engine.stats().cached_tokens == before) == first, "ordinary ones share no blocks"
        before = engine.stats().cached_tokens
    ask(engine, family, prompts["check"], "check", "again")
    assert run(engine)


def test_a_later_invocation_shares_no_block_of_an_earlier_one(family: Family) -> None:
    """The longer prompt begins with the shorter one, but its adapter starts later."""
    engine = engine_of(family)
    once = "<s> check it what is there? check it"
    for number, prompt in enumerate((once, f"{once} and so on: check it", once)):
        ask(engine, family, prompt, "check", str(number))
        answer = run(engine)[str(number)]
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
    engine = engine_of(family)
    ask(engine, family, prompt, "check", "x")
    assert run(engine)["x"] == generated[0, ids.shape[1] :].tolist()
