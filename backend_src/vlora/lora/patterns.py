"""PEFT's patterns of module names, matched in bounded time and memory.

An adapter's config may hold any regular expression, and Python's `re` can neither be interrupted
nor bounded. So the language is `re`'s (what it refuses is refused here), the matching is done by
`regex`, which can be told when to stop, and what would blow up while it is compiled is refused.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import regex

MAX_CHARACTERS = 16 * 1024
"""Of one pattern; compiling takes about 20 µs a character."""
MAX_CHARACTERS_TOGETHER = 64 * 1024
MAX_REPETITIONS = 1000
"""Product of all counted repetitions of a pattern: nested, they multiply while it is compiled."""
SECONDS = 5.0
"""Of processor time, which is what `regex` counts, for all matching of one adapter; a usual one
needs milliseconds."""

MAX_PATTERNS = 2000
"""In one object of the config: a model of 126 layers has 882 matrices that can be named."""

_PLAIN = re.compile(r"[A-Za-z0-9_.]+")


def suffixes(path: str) -> Iterator[str]:
    """All that names the module at `path`: the whole of it, and what follows each dot."""
    yield path
    while "." in path:
        path = path.split(".", 1)[1]
        yield path


class Matcher:
    """Matches the patterns of one adapter, whose budget of characters and seconds it keeps.

    refuse: makes the error for a pattern that is none, that is too long, or takes too long.
    """

    def __init__(self, refuse: Callable[[str], Exception]) -> None:
        self._refuse = refuse
        self._characters = MAX_CHARACTERS_TOGETHER
        self._seconds = SECONDS
        self._compiled = cache(self._compile)

    def fullmatch(self, pattern: str, path: str) -> bool:
        """As `re.fullmatch`."""
        return self._run("fullmatch", pattern, path) is not None

    def ends(self, pattern: str, path: str) -> bool:
        """Whether `pattern` matches the whole path or what follows one of its dots."""
        if _PLAIN.fullmatch(pattern):  # the usual case, hundreds of them: no regular expression
            rest = len(path) - len(pattern)
            return (rest == 0 or (rest > 0 and path[rest - 1] == ".")) and all(
                ours in (".", theirs) for ours, theirs in zip(pattern, path[rest:], strict=True)
            )
        return self._run("match", rf"(.*\.)?({pattern})$", path) is not None

    def layer(self, pattern: str, path: str) -> int | None:
        """The number that the pattern's group `idx` matches, from the path's beginning on."""
        match = self._run("match", pattern, path)
        return None if match is None or match["idx"] is None else int(match["idx"])

    def _run(self, how: str, pattern: str, path: str) -> Any:
        compiled = self._compiled(pattern)
        started = time.process_time()
        try:
            return getattr(compiled, how)(path, timeout=max(self._seconds, 1e-3))
        except TimeoutError:
            raise self._refuse(f"has the pattern {_shown(pattern)}, which takes too long") from None
        finally:
            self._seconds -= time.process_time() - started

    def _compile(self, pattern: str) -> Any:
        self._characters -= len(pattern)
        if len(pattern) > MAX_CHARACTERS or self._characters < 0:
            raise self._refuse(
                f"has patterns of more than {MAX_CHARACTERS} characters"
                f" ({MAX_CHARACTERS_TOGETHER} all together)"
            )
        problem = _unlike_re(pattern) or _too_many(pattern)
        if problem:
            raise self._refuse(f"has the pattern {_shown(pattern)}, which {problem}")
        try:
            re.compile(pattern)
            return regex.compile(pattern, regex.VERSION0)
        except (re.error, regex.error, RecursionError, OverflowError) as error:
            raise self._refuse(
                f"has the pattern {_shown(pattern)}, which is no regular expression: {error}"
            ) from None


def _unlike_re(pattern: str) -> str | None:
    """What `re` and `regex` read differently; no name of a module needs it."""
    if "[[" in pattern or "[:" in pattern:
        return "has a set within a set"
    for braces in _braces(pattern):
        if not re.fullmatch(r"\d+(,\d*)?|,\d+", braces):
            return f"has {{{braces}}}, which is no repetition"
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
