"""The structured benchmark: steps with constrained requests, compared with unconstrained ones.

Other processes compute the token masks while the engine computes the next step. A row whose mask is
late waits, and its time per token grows. A step of the demo model takes only a millisecond, so
masks weigh more than with any real model. The last cells measure the process of a grammar alone,
without an engine and a model, with a tokenizer as large as Qwen2's.
"""

from __future__ import annotations

import random
import select
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

import numpy as np
import psutil
from rich.console import RenderableType
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.driver import Driver, DriverRequest
from benchmarks.frame import DemoBenchmark, Row, medians_by, table
from vlora.config import Limits, Options
from vlora.engine.engine import Engine
from vlora.model.tokenizer import Vocabulary
from vlora.sampling import SamplingParams
from vlora.structured.grammar import Matcher
from vlora.structured.grammars import Grammars, tokenizer_data

OBJECT = {
    "type": "object",
    "properties": {
        "label": {"type": "string", "maxLength": 20},
        "box": {"type": "array", "items": {"type": "integer"}, "minItems": 4, "maxItems": 4},
        "kind": {"enum": ["red", "green", "blue"]},
    },
    "required": ["label", "box", "kind"],
    "additionalProperties": False,
}

FREE = "free"
STRUCTURES: Mapping[str, Mapping[str, Any]] = {
    FREE: {},
    "everything": {"structured_outputs": {"regex": "(?s:.{4000})"}},
    "json": {"structured_outputs": {"json": {"type": "array", "items": OBJECT, "minItems": 400}}},
    "regex": {"structured_outputs": {"regex": "([a-z]{2,9} ){400}"}},
}
"""Sampling parameters that request each structure, by name of the structure."""
SPECIAL, END = ("<|im_start|>", "<|image_pad|>"), "<|im_end|>"
SPACE = "Ġ"
"""Character that stands for a space in byte-level tokenizers."""
MAX_CHARACTERS = 12
"""Maximum length of a random token."""
DRAWN_AT_ONCE = 20_000
REPLY_SECONDS = 60.0
"""Time limit for one mask."""


@dataclass(kw_only=True)
class Structured(DemoBenchmark):
    """Times of the steps and tokens of constrained requests, and processor time of their masks.

    A cell is a structure, a number of requests that run together, and whether to measure only the
    grammar's process, with a large tokenizer in place of the checkpoint's.
    """

    name = "structured"
    bars: ClassVar = {"json_token_ratio": "≤ 2"}

    def cells(self) -> Sequence[tuple[str, int, bool]]:
        size = self.values["vocabulary"]
        self._grammars = grammars_of(make_tokenizer(size), size, Limits())
        self.stack.callback(self._grammars.close)
        self._driver = Driver(Engine(Options(model=self.model, merging="off")))
        self.stack.callback(self._driver.close)
        self.stack.callback(self._driver.engine.close)
        for one in STRUCTURES.values():
            run_load(self._driver, one, 2, 8)  # Warm up.
        loads = [
            (structure, requests, False)
            for requests in self.values["requests"]
            for _ in range(self.values["repeats"])
            for structure in STRUCTURES
        ]
        most = max(self.values["requests"])
        return loads + [(structure, most, True) for structure in STRUCTURES if structure != FREE]

    def measure(self, cell: tuple[str, int, bool]) -> Iterator[Row]:
        structure, requests, large = cell
        self.status(f"{requests} requests, {structure}")
        row: Row = {"structure": structure, "requests": requests}
        raw, tokens = STRUCTURES[structure], self.values["tokens"]
        if large:
            figures = measure_grammar(self._grammars, raw, requests, tokens)
            yield row | {"vocabulary": self.values["vocabulary"]} | figures
        else:
            yield row | run_load(self._driver, raw, requests, tokens)

    def summarize(self) -> dict[str, Any]:
        """Return the figures of the load with the most requests."""
        requests = max(row["requests"] for row in self.rows)

        def figure(structure: str, key: str) -> float:
            return self.median(key, structure=structure, requests=requests)

        return {
            "json_mask_us": figure("json", "mask_us"),
            "json_mask_share": figure("json", "mask_share"),
            "large_vocabulary_json_mask_us": figure("json", "large_mask_us"),
            **{
                f"{name}_token_ratio": figure(name, "token_ms") / figure(FREE, "token_ms")
                for name in ("json", "regex", "everything")
            },
        }

    def tables(self) -> Iterable[RenderableType]:
        loads = medians_by([r for r in self.rows if "step_ms" in r], "requests", "structure")
        title = "medians over the repeats; masks of all requests as a share of a step"
        keys = "requests structure step_ms token_ms mask_us mask_share"
        yield table(title, loads, keys)
        title = "processor times and private memory of a grammar's process, large vocabulary"
        keys = "structure vocabulary compile_ms large_mask_us"
        large = [row for row in self.rows if "vocabulary" in row]
        yield table(title, large, f"{keys} memory_mib")


def run_load(driver: Driver, structure: Mapping[str, Any], requests: int, tokens: int) -> Row:
    """Run one load to its end and return its times.

    These are the median of the steps, the duration of the run per generated token, the mean
    processor time of a mask (`mask_us`), and the number of rows that waited for their mask per
    generated token (`held_share`).
    """
    text = "<s>what is in the picture?"
    load = [
        DriverRequest(text, None, tokens, sampling={"temperature": 0.8, "seed": i, **structure})
        for i in range(requests)
    ]
    before = driver.engine.stats()
    outcome = driver.run(load)
    assert not outcome.failed
    after, step = driver.engine.stats(), median(outcome.steps)
    mask = (after.mask_seconds - before.mask_seconds) / max(1, after.masks - before.masks)
    return {
        "step_ms": step * 1e3,
        "token_ms": outcome.span / outcome.tokens * 1e3,
        "mask_us": mask * 1e6,
        "mask_share": mask * requests / step,
    }


def make_tokenizer(size: int) -> Any:
    """Return a byte-level tokenizer with `size` tokens, three of which are special.

    The merges are random. Half of the tokens are words of lower-case letters, most of them with a
    space before them, as in tokenizers that were trained on text.
    """
    rng = random.Random(0)
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
    tokens, ends = Vocabulary(tokenizer, rows).bytes_of, [tokenizer.eos_token_id]
    return Grammars(lambda: tokenizer_data(tokenizer, tokens, rows, ends), rows, limits)


def settle(matcher: Matcher) -> None:
    """Wait until a matcher's next mask has arrived, or no mask will come."""
    while not matcher.ready:
        if (file := matcher.grammar.file) is not None:
            ready = select.select([file], [], [], REPLY_SECONDS)[0]
            assert ready, f"no mask came within {REPLY_SECONDS:g} s"
        matcher.grammar.receive()


def measure_grammar(
    grammars: Grammars, structure: Mapping[str, Any], answers: int, tokens: int
) -> Row:
    """Compile a structure, then choose random answers that the structure allows.

    Return processor times of compiling and of masks, and the private memory of the grammar's
    process.
    """
    wanted = SamplingParams.parse(dict(structure)).structured_outputs
    assert wanted is not None
    rng = np.random.default_rng(0)
    grammar = grammars.acquire(wanted)
    matchers: Sequence[Matcher] = [grammar.open() for _ in range(answers)]
    later: list[float] = []
    for matcher in matchers:
        settle(matcher)
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
        "compile_ms": grammar.compile_seconds * 1e3,
        "large_mask_us": median(later) * 1e6,
        "memory_mib": memory / 2**20,
    }
