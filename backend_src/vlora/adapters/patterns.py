"""PEFT's patterns of module names, matched in bounded time and memory.

Python's `re` has no timeout, so patterns are matched by the package `regex`, which has one. A
pattern must be valid for both.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import regex

# Maximum length of one pattern. Compiling takes about 20 µs per character.
MAX_CHARACTERS = 16 * 1024
MAX_CHARACTERS_TOGETHER = 64 * 1024  # Maximum total length of all patterns of one adapter.
# Maximum product of all counted repetitions in a pattern. Their counts are multiplied because
# nested repetitions multiply the size of the compiled pattern.
MAX_REPETITIONS = 1000
# Maximum processor time in seconds for matching all patterns of one adapter. Typical adapters need
# milliseconds.
SECONDS = 5.0

# Maximum number of patterns in one object of the config. A model of 126 layers has 882 matrices
# that patterns can name.
MAX_PATTERNS = 2000

_PLAIN = re.compile(r"[A-Za-z0-9_.]+")


class PatternMatcher:
    """Matches the patterns of one adapter, within a budget of characters and seconds."""

    def __init__(self, invalid: Callable[[str], Exception]) -> None:
        self._invalid = invalid
        self._characters = MAX_CHARACTERS_TOGETHER
        self._seconds = SECONDS
        self._compiled = cache(self._compile)

    def fullmatch(self, pattern: str, path: str) -> bool:
        """Return whether the pattern matches the whole path, as `re.fullmatch` does."""
        return self._run("fullmatch", pattern, path) is not None

    def ends(self, pattern: str, path: str) -> bool:
        """Return whether `pattern` matches the whole path or the rest after one of its dots."""
        if _PLAIN.fullmatch(pattern):
            # Adapters may have hundreds of plain names, which need no regular expression.
            start = len(path) - len(pattern)
            return (start == 0 or (start > 0 and path[start - 1] == ".")) and all(
                expected in (".", actual)
                for expected, actual in zip(pattern, path[start:], strict=True)
            )
        return self._run("match", rf"(.*\.)?({pattern})$", path) is not None

    def layer(self, pattern: str, path: str) -> int | None:
        """Match the pattern at the start of the path; return the number in its group `idx`, or
        None.
        """
        match = self._run("match", pattern, path)
        return None if match is None or match["idx"] is None else int(match["idx"])

    def _run(self, method: str, pattern: str, path: str) -> Any:
        compiled = self._compiled(pattern)
        started = time.process_time()
        try:
            return getattr(compiled, method)(path, timeout=max(self._seconds, 1e-3))
        except TimeoutError:
            error = self._invalid(f"has the pattern {_shown(pattern)}, which takes too long")
            raise error from None
        finally:
            self._seconds -= time.process_time() - started

    def _compile(self, pattern: str) -> Any:
        self._characters -= len(pattern)
        if len(pattern) > MAX_CHARACTERS or self._characters < 0:
            limits = f"more than {MAX_CHARACTERS} characters, or patterns of more than"
            raise self._invalid(f"has a pattern of {limits} {MAX_CHARACTERS_TOGETHER} in total")
        problem = _unlike_re(pattern) or _too_many(pattern)
        if problem:
            raise self._invalid(f"has the pattern {_shown(pattern)}, which {problem}")
        try:
            re.compile(pattern)
            return regex.compile(pattern, regex.VERSION0)
        except (re.error, regex.error, RecursionError, OverflowError) as error:
            problem = f"which is not a regular expression: {error}"
            raise self._invalid(f"has the pattern {_shown(pattern)}, {problem}") from None


def _unlike_re(pattern: str) -> str | None:
    # `re` and `regex` interpret these constructs differently. Names of modules need none of them.
    if "[[" in pattern or "[:" in pattern:
        return "has a set within a set"
    for braces in _braces(pattern):
        if not re.fullmatch(r"\d+(,\d*)?|,\d+", braces):
            return f"has {{{braces}}}, which is not a repetition"
    return None


def _too_many(pattern: str) -> str | None:
    product = 1
    for braces in _braces(pattern):
        highest = braces.split(",")[-1] or braces.split(",")[0]
        product *= max(int(highest), 1) if len(highest) < 6 else MAX_REPETITIONS + 1
    if product > MAX_REPETITIONS:
        return f"repeats more than {MAX_REPETITIONS} times"
    return None


def _braces(pattern: str) -> list[str]:
    return re.findall(r"\{([^{}]*)\}", re.sub(r"\\.", "_", pattern, flags=re.DOTALL))


def _shown(pattern: str) -> str:
    return f"{pattern!r}" if len(pattern) <= 80 else f"{pattern[:77]!r}…"
