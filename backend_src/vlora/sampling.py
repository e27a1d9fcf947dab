"""Sampling parameters: strict parsing of what a client sends, with vLLM's names.

Knows nothing of tensors or of how a token is drawn (`model/sampler.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from vlora.errors import InvalidArgument, Unsupported, nearest, shown
from vlora.strict_json import load_object

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16

MIN_TEMPERATURE = 0.01
"""Below it, but for 0, scores over temperature lose what tells them apart; vLLM's bound."""

RANDOM_SEED = -1
"""vLLM's other way to say that no seed is given."""

ADAPTER_KEY = "lora_name"
"""Travels among the sampling keys and names the adapter; it says nothing about sampling."""

MAX_STREAM_ID = 256
"""Characters of a stream's id."""

AS_WE_DO: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "detokenize": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "flat_logprobs": (False,),
    "stream_interval": (1,),
    "truncate_prompt_tokens": (-1,),
    "bad_words": ([],),
    "logits_processors": ([],),
    "logit_bias": ({},),
    "extra_args": ({},),
}
"""vLLM keys at values that say what is done here anyway; as null each refused key is accepted."""

REFUSED: dict[str, str] = {
    "n": "send several requests with different 'seed' instead",
    "best_of": "send several requests with different 'seed' instead",
    "use_beam_search": "decoding is greedy or sampled",
    "beam_width": "decoding is greedy or sampled",
    "length_penalty": "it belongs to beam search",
    "early_stopping": "it belongs to beam search",
    "prompt_logprobs": "'logprobs' covers generated tokens",
    "logprob_token_ids": "'logprobs' gives the best ones",
    "flat_logprobs": "'logprobs' come one object a token",
    "bad_words": "use 'choices' to restrict the answer",
    "allowed_token_ids": "use 'choices' to restrict the answer",
    "logit_bias": "use 'choices' to restrict the answer",
    "guided_json": "use 'choices' to restrict the answer",
    "guided_regex": "use 'choices' to restrict the answer",
    "guided_grammar": "use 'choices' to restrict the answer",
    "guided_json_object": "use 'choices' to restrict the answer",
    "repetition_detection": "use 'repetition_penalty'",
    "thinking_token_budget": "use 'max_tokens'",
    "truncate_prompt_tokens": "a prompt is never truncated; shorten it",
    "logits_processors": "the server runs no client code",
    "extra_args": "the server runs no client code",
    "skip_special_tokens": "special tokens never appear in text",
    "spaces_between_special_tokens": "special tokens never appear in text",
    "detokenize": "answers are text",
    "output_kind": "'stream' of the request says how the answer comes",
    "stream_interval": "a stream brings each token as it comes",
}
"""vLLM keys that are refused by name, each with what to do instead."""

CHOICE_KEYS = ("structured_outputs", "guided_decoding", "guided_choice")
"""vLLM's names for what is `choices` here: objects that hold `choice`, and the list itself."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn and when it ends.

    temperature: 0 is greedy; the least other is MIN_TEMPERATURE.
    top_k: 0 or -1 is off. top_p, min_p: in [0, 1].
    repetition_penalty: > 0, over prompt and output tokens, as in transformers and vLLM.
    presence_penalty, frequency_penalty: in [-2, 2], over output tokens.
    seed: draws are keyed by (seed, position), so batch, preemption and mode never change them;
        None takes one from the request's own id, and so does −1.
    stop: the answer ends before the first of these strings (or after it with
        `include_stop_str_in_output`).
    max_tokens: None means up to the context. min_tokens: end of text is masked before that.
    logprobs: None, or how many alternatives to report beside the sampled token (0–20).
    choices: the answer is exactly one of these strings; the longest sets the token limit.
    priority: lower goes first, as in vLLM. deadline_ms: milliseconds from acceptance after which
        the answer is of no use: the request ends with CANCELLED.
    stream_id, supersede: the chunks of one stream share an id, and one that supersedes ends the
        older ones that still wait.
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
    priority: int = 0
    deadline_ms: float | None = None
    stream_id: str | None = None
    supersede: bool = False

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
            if key in CHOICE_KEYS and value is not None:
                if "choices" in given or "choices" in values:
                    raise InvalidArgument(f"'{key}' gives choices once more; give them once")
                values["choices"] = _choices_of(key, value)
            elif key == ADAPTER_KEY:
                _optional(_text)(key, value)
            elif key in _READERS:
                values[key] = _READERS[key](key, value)
            elif value is not None or key not in (*REFUSED, *CHOICE_KEYS):
                _check_as_we_do(key, value)
        if "choices" in values:
            values.setdefault("max_tokens", None)
        params = replace(defaults or SamplingParams(), **values)
        if params.max_tokens is not None and params.min_tokens > params.max_tokens:
            raise InvalidArgument(
                f"'min_tokens' = {params.min_tokens} is above 'max_tokens' = {params.max_tokens}"
            )
        if params.supersede and params.stream_id is None:
            raise InvalidArgument("'supersede' needs 'stream_id': the chunks of which stream")
        clash = [key for key in _NOT_WITH_CHOICES if params.choices and getattr(params, key)]
        if clash:
            raise InvalidArgument(
                f"'choices' cannot be combined with '{clash[0]}': the answer is one whole choice"
            )
        return params


def is_known(key: str) -> bool:
    """Whether this is a sampling key, served or refused by name."""
    return key in KNOWN_KEYS or key in REFUSED or key in CHOICE_KEYS


def _check_as_we_do(key: str, value: Any) -> None:
    """Refuses a key that sets nothing, unless its value says what is done anyway."""
    if key not in REFUSED:
        raise InvalidArgument(
            f"unknown sampling parameter {shown(key)}{nearest(key, KNOWN_KEYS) or '.'}"
            f" Known: {', '.join(KNOWN_KEYS)}"
        )
    if not any(_says(value, right) for right in AS_WE_DO.get(key, ())):
        raise Unsupported(
            f"sampling parameter '{key}' = {shown(value)} is not supported: {REFUSED[key]}"
        )


def _says(value: Any, right: Any) -> bool:
    """Whether a client's value is this one; numbers and booleans may be text."""
    if isinstance(value, str):
        try:
            value = _BOOLEANS[value.lower()] if value.lower() in _BOOLEANS else float(value)
        except ValueError:
            return False
    return isinstance(value, bool) == isinstance(right, bool) and bool(value == right)


def _choices_of(key: str, value: Any) -> tuple[str, ...]:
    """The choices in vLLM's words: `{"choice": [...]}`, as an object or as JSON text."""
    if key == "guided_choice":
        return _choices(key, value)
    held = load_object(value, f"'{key}'") if isinstance(value, str) else value
    if not isinstance(held, dict):
        raise _wrong(key, value, 'an object {"choice": [...]}')
    for name, item in held.items():
        if name != "choice" and item not in (None, False):
            raise Unsupported(f"'{key}' serves 'choice' alone, not {shown(name)}")
    return _choices(f"choice' of '{key}", held.get("choice"))


def _wrong(key: str, value: Any, right: str) -> InvalidArgument:
    return InvalidArgument(f"'{key}' must be {right}, not {shown(value)}")


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
    if isinstance(value, str) and value.lower() in _BOOLEANS:
        return _BOOLEANS[value.lower()]
    raise _wrong(key, value, "true or false")


def _text(key: str, value: Any) -> str:
    if not _is_text(value):
        raise _wrong(key, value, "a string")
    return str(value)


def _is_text(value: Any) -> bool:
    """A string that can be written as UTF-8, which half a surrogate pair cannot."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _texts(key: str, value: Any, right: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise _wrong(key, value, right)
    if not all(_is_text(item) and item for item in value):
        raise _wrong(key, value, right)
    return tuple(dict.fromkeys(value))


def _choices(key: str, value: Any) -> tuple[str, ...]:
    return _texts(key, value, "a list of non-empty strings")


def _stop(key: str, value: Any) -> tuple[str, ...]:
    right = f"a string, or a list of at most {MAX_STOP_STRINGS} non-empty ones"
    if value is None or value == []:
        return ()
    if isinstance(value, list) and len(value) > MAX_STOP_STRINGS:
        raise _wrong(key, value, right)
    return _texts(key, [value] if isinstance(value, str) else value, right)


def _temperature(key: str, value: Any) -> float:
    number = _number(key, value, 0.0, 100.0, "a number between 0 and 100")
    return max(number, MIN_TEMPERATURE) if number else 0.0


def _seed(key: str, value: Any) -> int | None:
    if value is None:
        return None
    number = _wholes(-(2**63), 2**64 - 1, "a whole number of at most 64 bits")(key, value)
    return None if number == RANDOM_SEED else number


def _top_k(key: str, value: Any) -> int:
    number = _whole(key, value)
    if number < -1:
        raise _wrong(key, value, "a whole number ≥ 1, or 0 or -1 for off")
    return max(number, 0)


def _token_ids(key: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_STOP_STRINGS:
        raise _wrong(key, value, f"a list of at most {MAX_STOP_STRINGS} token ids")
    return tuple(_TOKEN_ID(key, item) for item in value)


def _stream_id(key: str, value: Any) -> str:
    if not _is_text(value) or not 0 < len(value) <= MAX_STREAM_ID:
        raise _wrong(key, value, f"a string of 1 to {MAX_STREAM_ID} characters")
    return str(value)


_BOOLEANS = {"true": True, "false": False}

_NOT_WITH_CHOICES = ("stop", "stop_token_ids", "min_tokens", "ignore_eos")

_TOKEN_ID = _wholes(0, 2**31 - 1, "a list of token ids")

_MOST = 2**31 - 1

_TOKENS = _wholes(1, _MOST, f"a whole number from 1 to {_MOST}")

_READERS: dict[str, Callable[[str, Any], Any]] = {
    "temperature": _temperature,
    "top_k": _top_k,
    "top_p": _floats(1e-9, 1.0, "a number above 0 and at most 1"),
    "min_p": _floats(0.0, 1.0, "a number between 0 and 1"),
    "repetition_penalty": _floats(1e-3, 100.0, "a number above 0 and at most 100"),
    "presence_penalty": _floats(-2.0, 2.0, "a number between -2 and 2"),
    "frequency_penalty": _floats(-2.0, 2.0, "a number between -2 and 2"),
    "seed": _seed,
    "stop": _stop,
    "stop_token_ids": _token_ids,
    "include_stop_str_in_output": _boolean,
    "max_tokens": _optional(_TOKENS),
    "min_tokens": _wholes(0, _MOST, f"a whole number from 0 to {_MOST}"),
    "ignore_eos": _boolean,
    "logprobs": _optional(_wholes(0, MAX_LOGPROBS, f"a whole number from 0 to {MAX_LOGPROBS}")),
    "choices": _choices,
    "priority": _wholes(-(2**31), 2**31 - 1, "a whole number of 32 bits; lower goes first"),
    "deadline_ms": _optional(_floats(1e-3, 1e9, "milliseconds above 0, at most 1e9")),
    "stream_id": _optional(_stream_id),
    "supersede": _boolean,
}

KNOWN_KEYS: tuple[str, ...] = (*(f.name for f in fields(SamplingParams)), ADAPTER_KEY)
