"""Closed answer sets and plain decoders against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from tests.parity.questions import Case
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.request import Output, Request
from vlora.sampling import SamplingParams

CHOICES = ("red", "reddish brown", "blue", "a blue square", "漢字")


@pytest.fixture(scope="module")
def engine(checkpoint: Path, parity_adapters: Path) -> Engine:
    return Engine(Options(model=checkpoint, adapters=parity_adapters))


def answer(engine: Engine, request: Request) -> list[Output]:
    engine.add(engine.prepare(request), arrival=0.0)
    outputs = []
    while not engine.idle:
        outputs += engine.step()
    return outputs


def greedy_choice(case: Case, choices: tuple[str, ...]) -> str:
    """The oracle's answer: at each token, the best one that keeps some choice in reach.

    Written the slow way: every token of the vocabulary is tried against every choice as text.
    """
    tokenizer = case.oracle.tokenizer
    spellings = {text: choice for choice in choices for text in (choice, " " + choice)}
    eos = tokenizer.eos_token_id
    texts = {
        token: tokenizer.decode([token])
        for token in range(len(tokenizer))
        if token not in tokenizer.all_special_ids
    }
    tokens: list[int] = []
    while True:
        said = "".join(texts[token] for token in tokens)
        longer = [text for text in spellings if text.startswith(said) and text != said]
        if said in spellings and not longer:
            return spellings[said]
        allowed = [
            token
            for token, text in texts.items()
            if text and any(spelled.startswith(said + text) for spelled in longer)
        ] + [eos] * (said in spellings)
        logits = case.oracle.logits(case.question, tokens)[-1]
        best = max(allowed, key=lambda token: float(logits[token]))
        if best == eos:
            return spellings[said]
        tokens.append(best)


@pytest.mark.parametrize("choices", [CHOICES[:4], ("yes", "no"), ("no", "none", "not one")])
def test_the_choice_is_the_oracles(
    engine: Engine, cases: list[Case], choices: tuple[str, ...]
) -> None:
    for index, case in enumerate(cases[1::4]):
        if case.question.use_head:
            continue
        params = SamplingParams.parse({"temperature": 0, "choices": list(choices)})
        request = Request(
            id=f"c{index}",
            prompt=case.question.prompt,
            sampling=params,
            adapter=case.question.adapter,
            images=case.images,
        )
        outputs = answer(engine, request)
        assert "".join(output.text for output in outputs) == greedy_choice(case, choices)
        assert outputs[-1].finish_reason == "stop"


@pytest.mark.parametrize("seed", range(6))
def test_a_sampled_choice_is_always_one_of_the_set(engine: Engine, seed: int) -> None:
    params = SamplingParams.parse({"temperature": 3.0, "seed": seed, "choices": list(CHOICES)})
    outputs = answer(engine, Request(id="s", prompt="<s>which?", sampling=params))
    assert "".join(output.text for output in outputs) in CHOICES


def test_a_choice_fits_the_tokens_it_is_given(engine: Engine) -> None:
    least = len(engine._reader.tokenizer("reddish brown")["input_ids"])
    for seed in range(6):
        params = SamplingParams.parse(
            {"temperature": 3.0, "seed": seed, "choices": list(CHOICES), "max_tokens": least + 4}
        )
        outputs = answer(engine, Request(id="s", prompt="<s>which?", sampling=params))
        assert "".join(output.text for output in outputs) in CHOICES
        assert outputs[-1].num_output_tokens <= least + 4


def test_a_decoder_with_biases_and_no_images_equals_transformers(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Qwen2: biased q, k and v, tied embeddings, other rotary base."""
    torch.manual_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen2ForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = Engine(Options(model=tmp_path))
    text = "<s>how many red circles are there in the picture?"
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    tokens = [t for o in answer(engine, Request("q", text, params)) for t in o.token_ids]
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    with torch.inference_mode():
        forced = model(torch.cat([ids, torch.tensor([tokens])], dim=1)).logits[0]
    expected = forced[ids.shape[1] - 1 : -1]
    for position, token in enumerate(tokens):
        row = expected[position]
        assert float(row.max() - row[token]) <= 1e-4, position
