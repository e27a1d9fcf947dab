"""A byte-level tokenizer as large as Qwen2's, and the cost of grammars with it.

The merges are random. Half of the tokens are words of lower-case letters, most of them with a space
before them, as in tokenizers that were trained on text. The grammar's process computes the masks,
as it does for an engine, but there is no engine and no model.
"""

from __future__ import annotations

import random
import select
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.benchmark import Row

if TYPE_CHECKING:
    from vlora.config import Limits
    from vlora.structured.grammar import Matcher
    from vlora.structured.grammars import Grammars

SPACE = "Ġ"
"""Character that stands for a space in byte-level tokenizers."""

MAX_CHARACTERS = 12
"""Maximum length of a random token."""

SPECIAL = ("<|im_start|>", "<|image_pad|>")
END = "<|im_end|>"
DRAWN_AT_ONCE = 20_000
REPLY_SECONDS = 60.0
"""Time limit for one mask."""


def make_tokenizer(size: int, seed: int = 0) -> Any:
    """Return a tokenizer of transformers with `size` tokens, three of which are special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(seed)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [character for character in alphabet if character.isascii() and character.islower()]
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    words, others = [SPACE] * len(letters) + letters, list(alphabet)
    ends = list(letters)
    wanted = size - len(SPECIAL) - 1
    while len(vocabulary) < wanted:
        for starts in (words, others):
            drawn = rng.choices(starts, k=DRAWN_AT_ONCE)
            last = rng.choices(ends if starts is words else alphabet, k=DRAWN_AT_ONCE)
            for pair in zip(drawn, last, strict=True):
                token = "".join(pair)
                if token in vocabulary or len(token) > MAX_CHARACTERS or len(vocabulary) == wanted:
                    continue
                vocabulary[token] = len(vocabulary)
                merges.append(pair)
                starts.append(token)
                if starts is words and SPACE not in token:
                    ends.append(token)
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token=END, additional_special_tokens=list(SPECIAL)
    )


def grammars_of(tokenizer: Any, rows: int, limits: Limits) -> Grammars:
    """Return the grammars of a model with this tokenizer.

    rows: number of rows of the model's LM head.
    """
    from vlora.model.tokenizer import Vocabulary
    from vlora.structured.grammars import Grammars, tokenizer_data

    tokens, ends = Vocabulary(tokenizer, rows).bytes_of, [tokenizer.eos_token_id]
    return Grammars(lambda: tokenizer_data(tokenizer, tokens, rows, ends), rows, limits)


def settle(matcher: Matcher) -> None:
    """Wait until a matcher's next mask has arrived, or no mask will come."""
    while not matcher.ready:
        if (file := matcher.grammar.file) is not None:
            ready = select.select([file], [], [], REPLY_SECONDS)[0]
            assert ready, f"no mask came within {REPLY_SECONDS:g} s"
        matcher.grammar.receive()


def measure(
    grammars: Grammars, structure: Mapping[str, Any], answers: int, tokens: int, seed: int = 0
) -> Row:
    """Compile a structure, then choose random answers that the structure allows.

    Return processor times of compiling and of masks, and the private memory of the grammar's
    process.
    """
    import numpy as np
    import psutil

    from vlora.sampling import SamplingParams

    wanted = SamplingParams.parse(dict(structure)).structured_outputs
    assert wanted is not None
    rng = np.random.default_rng(seed)
    grammar = grammars.acquire(wanted)
    matchers: Sequence[Matcher] = [grammar.open() for _ in range(answers)]
    first: list[float] = []
    later: list[float] = []
    for matcher in matchers:
        settle(matcher)
        first.append(matcher.seconds)
    for _ in range(tokens):
        for matcher in matchers:
            if not matcher.stopped:
                before = matcher.seconds
                matcher.advance(int(rng.choice(np.flatnonzero(matcher.mask))))
                settle(matcher)
                later.append(matcher.seconds - before)
    memory = psutil.Process(grammar.process).memory_full_info().uss
    grammars.release(wanted, grammar)
    return {
        "compile_ms": round(grammar.compile_seconds * 1e3, 2),
        "first_mask_us": round(median(first) * 1e6, 1),
        "large_mask_us": round(median(later) * 1e6, 1),
        "highest_mask_us": round(max(first + later) * 1e6, 1),
        "memory_mib": round(memory / 2**20, 1),
    }
