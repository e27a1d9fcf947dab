"""Sampling parameters: strict parsing of a client's keys, which have vLLM's names.

This module handles no tensors. `model/sampler.py` draws the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from vlora.errors import InvalidArgument, Unsupported, nearest, shown
from vlora.strict_json import (
    BOOLEANS,
    Range,
    Reader,
    is_text,
    optional,
    read_boolean,
    read_text,
    read_texts,
    wrong_value,
)
from vlora.structured.structure import STRUCTURE_KEYS, Structure, read_structure

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_WORDS, YES = 16, "yes"  # Maximum number of `word_probabilities` besides the word "yes".

MIN_TEMPERATURE = 0.01  # A lower one would lose precision of the scores. vLLM has the same limit.
RANDOM_SEED = -1  # Stands for no seed, as in vLLM.
ADAPTER_KEY = "lora_name"  # Sent with the sampling keys but does not affect sampling.
# vLLM's keys about images and videos, which only the vision encoder applies.
MEDIA_IO, PROCESSOR = MEDIA_KEYS = ("media_io_kwargs", "mm_processor_kwargs")
MAX_STREAM_ID = 256  # Maximum number of characters, also of a `cache_salt`.
MAX_INTEGER = 2**31 - 1  # Maximum value of token counts and token ids.

# Valid values of the numeric keys. The engine compares token counts with the context, and ids with
# the vocabulary. A `top_k` above the vocabulary has no effect, and is stored as MAX_INTEGER at
# most.
RANGES: dict[str, Range] = {
    "temperature": Range(0.0, 100.0, "a number from 0 to 100"),
    "top_k": Range(-1, math.inf, "a whole number ≥ 1, or 0 or -1 for off", whole=True),
    "top_p": Range(1e-9, 1.0, "a number from 1e-9 to 1"),
    "min_p": Range(0.0, 1.0, "a number from 0 to 1"),
    "repetition_penalty": Range(1e-3, 100.0, "a number from 0.001 to 100"),
    "presence_penalty": Range(-2.0, 2.0, "a number from -2 to 2"),
    "frequency_penalty": Range(-2.0, 2.0, "a number from -2 to 2"),
    "seed": Range(-(2**63), 2**64 - 1, "a whole number of at most 64 bits", whole=True),
    "stop_token_ids": Range(0, MAX_INTEGER, "a list of at most 16 token ids", whole=True),
    "max_tokens": Range(1, MAX_INTEGER, f"a whole number from 1 to {MAX_INTEGER}", whole=True),
    "min_tokens": Range(0, MAX_INTEGER, f"a whole number from 0 to {MAX_INTEGER}", whole=True),
    "logprobs": Range(0, MAX_LOGPROBS, f"a whole number from 0 to {MAX_LOGPROBS}", whole=True),
    "priority": Range(
        -(2**31), 2**31 - 1, "a whole number of 32 bits; lower numbers run first", whole=True
    ),
    "deadline_ms": Range(1e-3, 1e9, "milliseconds from 0.001 to 1e9"),
    "stream_interval_ms": Range(0, 1e4, "milliseconds from 0 to 10000"),
}

# Values of refused keys that describe what this server does. Null is accepted, too.
ACCEPTED_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "detokenize": (True,),
    "spaces_between_special_tokens": (True, False),
    "flat_logprobs": (False,),
    "stream_interval": (1,),
    "truncate_prompt_tokens": (-1,),
    "bad_words": ([],),
    "logits_processors": ([],),
    "logit_bias": ({},),
    "extra_args": ({},),
}

# vLLM keys that are refused by name, with the reason or the key to use instead.
REFUSED: dict[str, str] = {
    "n": "send several requests with different 'seed' instead",
    "best_of": "send several requests with different 'seed' instead",
    "use_beam_search": "decoding is greedy or sampled",
    "beam_width": "decoding is greedy or sampled",
    "length_penalty": "it applies to beam search only",
    "early_stopping": "it applies to beam search only",
    "prompt_logprobs": "'logprobs' covers generated tokens only",
    "logprob_token_ids": "'logprobs' reports the most probable tokens",
    "flat_logprobs": "'logprobs' has one object per token",
    "bad_words": "use 'structured_outputs' to restrict the answer",
    "allowed_token_ids": "use 'structured_outputs' to restrict the answer",
    "logit_bias": "use 'structured_outputs' to restrict the answer",
    "repetition_detection": "use 'repetition_penalty'",
    "thinking_token_budget": "use 'max_tokens'",
    "truncate_prompt_tokens": "a prompt is never truncated; shorten it",
    "logits_processors": "the server runs no client code",
    "extra_args": "the server runs no client code",
    "spaces_between_special_tokens": "text has no spaces that the tokens lack",
    "detokenize": "answers are text",
    "output_kind": "use the input 'stream' of the request",
    "stream_interval": "use 'stream_interval_ms', which counts milliseconds instead of tokens",
}


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request, its priority and its deadline.

    The keys have vLLM's meaning; docs/api.md describes them. In addition:

    temperature: 0 means greedy.
    top_k: 0 means off.
    seed: key of the random numbers, together with the position; by default from the request's id.
        Draws do not depend on batch, preemption or mode.
    max_tokens: None (default with `choices` and `structured_outputs`): only the context limits it.
    deadline_ms: milliseconds from arrival after which the request ends with CANCELLED.
    stream_interval_ms: minimum time between two responses. First and last token never wait.
    cache_salt: tenant, whose requests share caches and streams with those of no other.
    word_probabilities: words whose probability at the first token of the answer is reported.
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
    skip_special_tokens: bool = True
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    word_probabilities: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    structured_outputs: Structure | None = None
    priority: int = 0
    deadline_ms: float | None = None
    stream_id: str | None = None
    supersede: bool = False
    stream_interval_ms: float = 0.0
    cache_salt: str | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @staticmethod
    def parse(raw: Mapping[str, Any], defaults: SamplingParams | None = None) -> SamplingParams:
        """Return checked parameters from JSON-like values by key. Numbers may be given as text.

        defaults: parameters for the missing keys.

        Raises InvalidArgument, which names key and value, and Unsupported for keys that are known
        but not supported.
        """
        values: dict[str, Any] = {}
        restricted = ""
        for key, value in raw.items():
            if key in STRUCTURE_KEYS and value is not None:
                if restricted or "choices" in raw:
                    raise InvalidArgument(
                        f"'{key}' and '{restricted or 'choices'}' both restrict the answer; give"
                        " one of them"
                    )
                restricted = key
                structure = read_structure(key, value)
                name = "structured_outputs" if isinstance(structure, Structure) else "choices"
                values[name] = structure
            elif key == ADAPTER_KEY:
                optional(read_text)(key, value)
            elif key in MEDIA_KEYS:
                MediaOptions.parse(raw)
            elif key in _READERS:
                values[key] = _READERS[key](key, value)
            elif value is not None or key not in (*REFUSED, *STRUCTURE_KEYS):
                _check_refused(key, value)
        if "choices" in values or "structured_outputs" in values:
            values.setdefault("max_tokens", None)
        params = replace(defaults or SamplingParams(), **values)
        params._check_combinations()
        return params

    def _check_combinations(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidArgument(
                f"'min_tokens' = {self.min_tokens} is above 'max_tokens' = {self.max_tokens}"
            )
        if self.supersede and self.stream_id is None:
            raise InvalidArgument(
                "'supersede' needs 'stream_id', the id of the stream whose requests it cancels"
            )
        conflicts = [key for key in _NOT_WITH_CHOICES if getattr(self, key)]
        if self.choices and conflicts:
            raise InvalidArgument(
                f"'choices' cannot be combined with '{conflicts[0]}': the answer is a full choice"
            )
        conflicts = [key for key in conflicts if key in _NOT_WITH_STRUCTURE]
        if self.structured_outputs is not None and conflicts:
            raise InvalidArgument(
                f"'structured_outputs' cannot be combined with '{conflicts[0]}': the structure"
                " determines where the answer may end"
            )


@dataclass(frozen=True)
class MediaOptions:
    """How a request's images and videos are prepared. None leaves it to the checkpoint.

    num_frames, fps, do_sample_frames, max_frames: which frames of a video file are used, as in
        `vlora.vision.video.VideoSampling`.
    min_pixels, max_pixels: limits to which a picture is scaled, as those of its image processor.
    """

    num_frames: int | None = None
    fps: float | None = None
    do_sample_frames: bool | None = None
    max_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None

    @staticmethod
    def parse(raw: Mapping[str, Any]) -> MediaOptions:
        """Return the options in sampling keys. Raises InvalidArgument."""
        io = _known_keys(MEDIA_IO, raw.get(MEDIA_IO), ("video",))
        video = _known_keys(f"{MEDIA_IO}.video", io.get("video"), ("num_frames", "fps"))
        known = ("fps", "do_sample_frames", "max_frames", "min_pixels", "max_pixels")
        processor = _known_keys(PROCESSOR, raw.get(PROCESSOR), known)
        first, second = (
            {
                key: _MEDIA[key](key, value)
                # In vLLM, -1 stands for no limit of frames or rate.
                for key, value in given.items()
                if value is not None and (key not in ("num_frames", "fps") or value != -1)
            }
            for given in (video, processor)
        )
        if "fps" in first and first["fps"] != second.get("fps", first["fps"]):
            raise InvalidArgument(
                f"'{MEDIA_IO}.video.fps' = {first['fps']:g} and '{PROCESSOR}.fps' ="
                f" {second['fps']:g} differ; give one of them"
            )
        options = MediaOptions(**first | second)
        if (options.min_pixels or 0) > (options.max_pixels or math.inf):
            raise InvalidArgument(
                f"'min_pixels' = {options.min_pixels} is above 'max_pixels' = {options.max_pixels}"
            )
        return options


AS_CHECKPOINT = MediaOptions()


def _known_keys(name: str, value: Any, known: tuple[str, ...]) -> Mapping[str, Any]:
    """Return an object of a request, {} for null. Raises InvalidArgument for an unknown key."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong_value(name, value, f"an object with the keys {', '.join(known)}")
    for key in value:
        if key not in known:
            raise InvalidArgument(
                f"unknown key {shown(key)} of '{name}'{nearest(key, known) or '.'}"
                f" Known: {', '.join(known)}"
            )
    return value


_MEDIA: dict[str, Reader] = {
    "do_sample_frames": read_boolean,
    **{
        key: Range(1, MAX_INTEGER, f"a whole number from 1 to {MAX_INTEGER}", whole=True)
        for key in ("num_frames", "max_frames", "min_pixels", "max_pixels")
    },
    "fps": Range(1e-3, 1e3, "frames per second from 0.001 to 1000"),
}


def is_known(key: str) -> bool:
    """Return whether `key` is a sampling key, supported or refused by name."""
    return key in KNOWN_KEYS or key in REFUSED or key in STRUCTURE_KEYS


def _check_refused(key: str, value: Any) -> None:
    if key not in REFUSED:
        raise InvalidArgument(
            f"unknown sampling parameter {shown(key)}{nearest(key, KNOWN_KEYS) or '.'}"
            f" Known: {', '.join(KNOWN_KEYS)}"
        )
    if not any(_equals(value, accepted) for accepted in ACCEPTED_VALUES.get(key, ())):
        raise Unsupported(
            f"sampling parameter '{key}' = {shown(value)} is not supported: {REFUSED[key]}"
        )


def _equals(value: Any, accepted: Any) -> bool:
    if isinstance(value, str):
        try:
            value = BOOLEANS[value.lower()] if value.lower() in BOOLEANS else float(value)
        except ValueError:
            return False
    return isinstance(value, bool) == isinstance(accepted, bool) and bool(value == accepted)


def _stop(key: str, value: Any) -> tuple[str, ...]:
    expected = f"a string, or a list of at most {MAX_STOP_STRINGS} non-empty ones"
    if value is None or value == []:
        return ()
    if isinstance(value, list) and len(value) > MAX_STOP_STRINGS:
        raise wrong_value(key, value, expected)
    return read_texts(key, [value] if isinstance(value, str) else value, expected)


def _temperature(key: str, value: Any) -> float:
    number: float = RANGES[key](key, value)
    return max(number, MIN_TEMPERATURE) if number else 0.0


def _seed(key: str, value: Any) -> int | None:
    number: int = RANGES[key](key, value)
    return None if number == RANDOM_SEED else number


def _top_k(key: str, value: Any) -> int:
    number: int = RANGES[key](key, value)
    return min(max(number, 0), MAX_INTEGER)


def _words(key: str, value: Any) -> tuple[str, ...]:
    expected = f"a list of at most {MAX_WORDS} words besides '{YES}'"
    # `vlora watch` adds this word to those of a camera, which may be as many as those of others.
    if isinstance(value, list) and len(value) > MAX_WORDS + (YES in value):
        raise wrong_value(key, value, expected)
    return () if value is None or value == [] else read_texts(key, value, expected)


def _token_ids(key: str, value: Any) -> tuple[int, ...]:
    read = RANGES[key]
    if not isinstance(value, list) or len(value) > MAX_STOP_STRINGS:
        raise wrong_value(key, value, read.expected)
    return tuple(read(key, item) for item in value)


def _stream_id(key: str, value: Any) -> str:
    if not is_text(value) or not 0 < len(value) <= MAX_STREAM_ID:
        raise wrong_value(key, value, f"a string of 1 to {MAX_STREAM_ID} characters")
    return str(value)


_NOT_WITH_STRUCTURE = ("stop_token_ids", "min_tokens", "ignore_eos")
_NOT_WITH_CHOICES = ("stop", *_NOT_WITH_STRUCTURE)

_READERS: dict[str, Reader] = {
    **RANGES,
    "temperature": _temperature,
    "top_k": _top_k,
    "seed": optional(_seed),
    "stop": _stop,
    "stop_token_ids": lambda key, value: () if value is None else _token_ids(key, value),
    "include_stop_str_in_output": read_boolean,
    "skip_special_tokens": lambda key, value: value is None or read_boolean(key, value),
    "max_tokens": optional(RANGES["max_tokens"]),
    "ignore_eos": read_boolean,
    "logprobs": optional(RANGES["logprobs"]),
    "word_probabilities": _words,
    "choices": lambda key, value: read_texts(key, value, "a list of non-empty strings"),
    "deadline_ms": optional(RANGES["deadline_ms"]),
    "stream_id": optional(_stream_id),
    "cache_salt": optional(_stream_id),
    "supersede": read_boolean,
}

KNOWN_KEYS: tuple[str, ...] = (
    *(f.name for f in fields(SamplingParams)),
    ADAPTER_KEY,
    *MEDIA_KEYS,
)
