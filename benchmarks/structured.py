"""The structured benchmark: steps with constrained requests, compared with unconstrained ones.

Other processes compute the token masks while the engine computes the next step. A row whose mask is
late waits, and its time per token grows. A step of the demo model takes only a millisecond, so
masks weigh more than with any real model. The last cells measure the process of a grammar alone,
without an engine and a model, with a tokenizer as large as Qwen2's.
"""

from __future__ import annotations

import random
import select
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, ClassVar

import numpy as np
import psutil
from rich.console import RenderableType
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks import frame
from benchmarks.frame import Bar, DemoBenchmark, Row, at_most
from benchmarks.timing import median_or_nan
from vlora.config import Limits, Options
from vlora.engine.engine import Engine
from vlora.model.tokenizer import Vocabulary
from vlora.request import Request
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

STRUCTURES: Mapping[str, Mapping[str, Any]] = {
    "free": {},
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


@dataclass(frozen=True)
class Cell:
    """One load: requests that run together with the same structure.

    vocabulary: number of tokens of a tokenizer that replaces the checkpoint's tokenizer. Then only
        the grammar's process is measured. None for the checkpoint's tokenizer.
    """

    structure: str
    requests: int
    vocabulary: int | None = None


@dataclass(kw_only=True)
class Structured(DemoBenchmark):
    """Times of the steps and tokens of constrained requests, and processor time of their masks."""

    name = "structured"
    bars: ClassVar[Mapping[str, Bar]] = {"json_token_ratio": at_most(2.0)}

    def prepare(self) -> None:
        super().prepare()
        self._engine: Engine | None = None
        self._grammars: Grammars | None = None

    def cells(self) -> Sequence[Cell]:
        loads = [
            Cell(structure, requests)
            for requests in self.values["requests"]
            for _ in range(self.values["repeats"])
            for structure in STRUCTURES
        ]
        most, tokens = max(self.values["requests"]), self.values["vocabulary"]
        return loads + [Cell(name, most, tokens) for name in STRUCTURES if name != "free"]

    def measure(self, cell: Cell) -> Iterator[Row]:
        self.status(f"{cell.requests} requests, {cell.structure}")
        row: Row = {"structure": cell.structure, "requests": cell.requests}
        structure, tokens = STRUCTURES[cell.structure], self.values["tokens"]
        if (size := cell.vocabulary) is not None:
            if self._grammars is None:
                self._grammars = grammars_of(make_tokenizer(size), size, Limits())
            figures = measure_grammar(self._grammars, structure, cell.requests, tokens)
            yield row | {"vocabulary": size} | figures
            return
        if self._engine is None:
            self._engine = Engine(Options(model=self.model, merging="off"))
            for one in STRUCTURES.values():
                run_load(self._engine, one, 2, 8)  # Warm up.
        yield row | run_load(self._engine, structure, cell.requests, tokens)

    def _median(self, structure: str, requests: int, key: str) -> float:
        return median_or_nan(
            float(row[key])
            for row in self.rows
            if (row["structure"], row["requests"]) == (structure, requests) and key in row
        )

    def summarize(self) -> dict[str, Any]:
        """Return the figures of the load with the most requests."""
        requests = max(row["requests"] for row in self.rows)

        def figure(structure: str, key: str) -> float:
            return self._median(structure, requests, key)

        free = figure("free", "token_ms")
        ratios = {
            f"{name}_token_ratio": round(figure(name, "token_ms") / free, 3)
            for name in ("json", "regex", "everything")
        }
        return {
            "json_mask_us": figure("json", "mask_us"),
            "json_mask_share": figure("json", "mask_share"),
            "large_vocabulary_json_mask_us": figure("json", "large_mask_us"),
        } | ratios

    def tables(self) -> Iterable[RenderableType]:
        keys = ("step_ms", "token_ms", "mask_us", "mask_share", "held_share")
        loads = [
            {"load": f"{requests} {structure}"}
            | {key: self._median(structure, requests, key) for key in keys}
            for requests in self.values["requests"]
            for structure in STRUCTURES
        ]
        title = "medians over the repeats; masks of all requests as a share of a step"
        columns = {"requests, structure": "load"} | {key.replace("_", ", "): key for key in keys}
        yield frame.table(title, loads, columns)
        size = self.values["vocabulary"]
        title = f"processor times and private memory of a grammar's process with {size} tokens"
        large = [row for row in self.rows if "vocabulary" in row]
        keys = ("structure", "compile_ms", "first_mask_us", "large_mask_us", "highest_mask_us")
        columns = {key.replace("_", " "): key for key in (*keys, "memory_mib")}
        yield frame.table(title, large, columns)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine.adapters.close()
        if self._grammars is not None:
            self._grammars.close()


def run_load(engine: Engine, structure: Mapping[str, Any], requests: int, tokens: int) -> Row:
    """Run one load to its end and return its times.

    These are the median of the steps, the duration of the run per generated token, the mean
    processor time of a mask (`mask_us`), and the number of rows that waited for their mask per
    generated token (`held_share`).
    """
    raw = {"temperature": 0.8, "max_tokens": tokens, **structure}
    params = replace(SamplingParams.parse(raw), ignore_eos=True)
    states = [
        engine.prepare(Request(f"r{i}", "<s>what is in the picture?", replace(params, seed=i)))
        for i in range(requests)
    ]
    before = engine.stats()
    steps: list[float] = []
    started = time.perf_counter()
    for index, state in enumerate(states):
        engine.add(state, float(index))
    while not engine.idle:
        step_started = time.perf_counter()
        outputs = engine.step()
        steps.append(time.perf_counter() - step_started)
        errors = [output.error for output in outputs if output.error is not None]
        assert not errors, errors
    span, after = time.perf_counter() - started, engine.stats()
    drawn = after.generated_tokens - before.generated_tokens
    mask = (after.mask_seconds - before.mask_seconds) / max(1, after.masks - before.masks)
    return {
        "step_ms": round(median(steps) * 1e3, 4),
        "token_ms": round(span / drawn * 1e3, 4),
        "mask_us": round(mask * 1e6, 2),
        "mask_share": round(mask * requests / median(steps), 4),
        "held_share": round((after.rows_held - before.rows_held) / drawn, 4),
    }


def make_tokenizer(size: int, seed: int = 0) -> Any:
    """Return a byte-level tokenizer with `size` tokens, three of which are special.

    The merges are random. Half of the tokens are words of lower-case letters, most of them with a
    space before them, as in tokenizers that were trained on text.
    """
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
    grammars: Grammars, structure: Mapping[str, Any], answers: int, tokens: int, seed: int = 0
) -> Row:
    """Compile a structure, then choose random answers that the structure allows.

    Return processor times of compiling and of masks, and the private memory of the grammar's
    process.
    """
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
