"""Sampling parameters: strict parsing of what a client sends, with vLLM's names.

Knows nothing of tensors or of how a token is drawn (`model/sampler.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from vlora.errors import InvalidArgument, Unsupported, nearest

MAX_LOGPROBS = 20
MAX_CHOICES = 256
MAX_STOP_STRINGS = 16

ADAPTER_KEY = "lora_name"
"""Travels among the sampling keys and names the adapter; it says nothing about sampling."""

NOT_YET = ("priority", "deadline_ms", "stream_id", "supersede")
"""Keys of the contract that a later version brings; refused by name until then."""

REFUSED: dict[str, str] = {
    "best_of": "send several requests with different 'seed' instead",
    "use_beam_search": "decoding is greedy or sampled",
    "beam_width": "decoding is greedy or sampled",
    "length_penalty": "it belongs to beam search",
    "early_stopping": "it belongs to beam search",
    "prompt_logprobs": "'logprobs' covers generated tokens",
    "bad_words": "use 'choices' to restrict the answer",
    "allowed_token_ids": "use 'choices' to restrict the answer",
    "logit_bias": "use 'choices' to restrict the answer",
    "guided_decoding": "use 'choices' to restrict the answer",
    "structured_outputs": "use 'choices' to restrict the answer",
    "guided_choice": "use 'choices' to restrict the answer",
    "truncate_prompt_tokens": "a prompt is never truncated; shorten it",
    "logits_processors": "the server runs no client code",
    "skip_special_tokens": "special tokens never appear in text",
    "spaces_between_special_tokens": "special tokens never appear in text",
    "detokenize": "answers are text",
}
"""vLLM keys that are refused by name, each with what to do instead."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn and when it ends.

    temperature: 0 is greedy. top_k: 0 or -1 is off. top_p, min_p: in [0, 1].
    repetition_penalty: > 0, over prompt and output tokens, as in transformers and vLLM.
    presence_penalty, frequency_penalty: in [-2, 2], over output tokens.
    seed: draws are keyed by (seed, position), so batch, preemption and mode never change them;
        None takes one from the request's own id.
    stop: the answer ends before the first of these strings (or after it with
        `include_stop_str_in_output`).
    max_tokens: None means up to the context. min_tokens: end of text is masked before that.
    logprobs: None, or how many alternatives to report beside the sampled token (0–20).
    choices: the answer is exactly one of these strings; the longest sets the token limit.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    choices: tuple[str, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @staticmethod
    def parse(given: Mapping[str, Any], defaults: SamplingParams | None = None) -> SamplingParams:
        """Checked parameters from JSON-like values; numeric strings are coerced.

        Raises InvalidArgument naming the key, its value and what would be right; Unsupported for
        keys that are known but not served.
        """
        values: dict[str, Any] = {}
        for key, value in given.items():
            if key == "n":
                if _whole(key, value) != 1:
                    raise Unsupported(f"'n' = {value} is not supported; send {value} requests")
                continue
            if key == ADAPTER_KEY:
                _optional(_text)(key, value)
                continue
            if key in NOT_YET:
                raise Unsupported(f"sampling parameter '{key}' is not yet supported")
            if key in REFUSED:
                raise Unsupported(f"sampling parameter '{key}' is not supported: {REFUSED[key]}")
            if key not in _READERS:
                raise InvalidArgument(
                    f"unknown sampling parameter '{key}'{nearest(key, KNOWN_KEYS) or '.'}"
                    f" Known: {', '.join(KNOWN_KEYS)}"
                )
            values[key] = _READERS[key](key, value)
        if "choices" in values:
            values.setdefault("max_tokens", None)
        params = replace(defaults or SamplingParams(), **values)
        if params.max_tokens is not None and params.min_tokens > params.max_tokens:
            raise InvalidArgument(
                f"'min_tokens' = {params.min_tokens} is above 'max_tokens' = {params.max_tokens}"
            )
        clash = [key for key in _NOT_WITH_CHOICES if params.choices and getattr(params, key)]
        if clash:
            raise InvalidArgument(
                f"'choices' cannot be combined with '{clash[0]}': the answer is one whole choice"
            )
        return params


def _wrong(key: str, value: Any, right: str) -> InvalidArgument:
    return InvalidArgument(f"'{key}' must be {right}, not {value!r}")


def _number(key: str, value: Any, low: float, high: float, right: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _wrong(key, value, right)
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise _wrong(key, value, right) from None
    if not math.isfinite(number) or not low <= number <= high:
        raise _wrong(key, value, right)
    return number


def _whole(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _wrong(key, value, "a whole number")
    if isinstance(value, int):
        return value
    try:
        return int(value) if isinstance(value, str) else _integral(value)
    except (ValueError, OverflowError):
        raise _wrong(key, value, "a whole number") from None


def _integral(value: float) -> int:
    if value != int(value):
        raise ValueError(value)
    return int(value)


def _floats(low: float, high: float, right: str) -> Callable[[str, Any], float]:
    return lambda key, value: _number(key, value, low, high, right)


def _wholes(low: int, high: int, right: str) -> Callable[[str, Any], int]:
    def read(key: str, value: Any) -> int:
        number = _whole(key, value)
        if not low <= number <= high:
            raise _wrong(key, value, right)
        return number

    return read


def _optional(read: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda key, value: None if value is None else read(key, value)


def _boolean(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise _wrong(key, value, "true or false")


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(key, value, "a string")
    return value


def _texts(most: int, lone: bool) -> Callable[[str, Any], tuple[str, ...]]:
    right = f"a list of 1 to {most} non-empty strings"

    def read(key: str, value: Any) -> tuple[str, ...]:
        items = [value] if lone and isinstance(value, str) else value
        if not isinstance(items, list) or not 0 < len(items) <= most:
            raise _wrong(key, value, right)
        if not all(isinstance(item, str) and item for item in items):
            raise _wrong(key, value, right)
        return tuple(dict.fromkeys(items))

    return read


def _stop(key: str, value: Any) -> tuple[str, ...]:
    return () if value is None or value == [] else _texts(MAX_STOP_STRINGS, lone=True)(key, value)


def _top_k(key: str, value: Any) -> int:
    number = _whole(key, value)
    if number < -1:
        raise _wrong(key, value, "a whole number ≥ 1, or 0 or -1 for off")
    return max(number, 0)


def _token_ids(key: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_STOP_STRINGS:
        raise _wrong(key, value, f"a list of at most {MAX_STOP_STRINGS} token ids")
    return tuple(_whole(key, item) for item in value)


_NOT_WITH_CHOICES = ("stop", "stop_token_ids", "min_tokens", "ignore_eos")

_TOKENS = _wholes(1, 2**31 - 1, "a whole number ≥ 1")

_READERS: dict[str, Callable[[str, Any], Any]] = {
    "temperature": _floats(0.0, 100.0, "a number between 0 and 100"),
    "top_k": _top_k,
    "top_p": _floats(1e-9, 1.0, "a number above 0 and at most 1"),
    "min_p": _floats(0.0, 1.0, "a number between 0 and 1"),
    "repetition_penalty": _floats(1e-3, 100.0, "a number above 0 and at most 100"),
    "presence_penalty": _floats(-2.0, 2.0, "a number between -2 and 2"),
    "frequency_penalty": _floats(-2.0, 2.0, "a number between -2 and 2"),
    "seed": _optional(_wholes(-(2**63), 2**64 - 1, "a whole number of at most 64 bits")),
    "stop": _stop,
    "stop_token_ids": _token_ids,
    "include_stop_str_in_output": _boolean,
    "max_tokens": _optional(_TOKENS),
    "min_tokens": _wholes(0, 2**31 - 1, "a whole number ≥ 0"),
    "ignore_eos": _boolean,
    "logprobs": _optional(_wholes(0, MAX_LOGPROBS, f"a whole number from 0 to {MAX_LOGPROBS}")),
    "choices": _texts(MAX_CHOICES, lone=False),
}

KNOWN_KEYS: tuple[str, ...] = (*(f.name for f in fields(SamplingParams)), ADAPTER_KEY)
