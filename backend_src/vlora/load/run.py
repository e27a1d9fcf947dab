"""The open loop: each request is sent at its time, whatever became of those before it."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlora.errors import ServerError
from vlora.ids import BASE
from vlora.load.contents import WORDS, Content, TokenCount
from vlora.load.targets import Answer, Question, RequestFailed, Target
from vlora.load.trace import TracedRequest

LEAD_SECONDS = 0.1  # Time from the start of the loop to the first request.
TIMER_SECONDS = 0.002  # Time by which asyncio's timers are late, at most on an idle machine.
SHORT, LONG = 8, 72  # Words of the texts by which tokens per word are measured.


@dataclass
class Record:
    """One request and what became of it. All times are seconds from its scheduled time.

    lag: time until it was sent. first, end: time to its first token, and to its end or error.
    error: code of the error; "" for an answer, None while it runs.
    """

    adapter: str
    at: float
    lag: float | None = None
    first: float | None = None
    end: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


@dataclass
class Measurement:
    """Records of the requests of a run, in the order of their times.

    messages: text of the first error of each code.
    """

    records: list[Record]
    messages: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: Sequence[TracedRequest], adapters: Sequence[str]) -> Measurement:
        return cls([Record(_name(one, adapters) or "", one.at) for one in trace])


@dataclass(frozen=True)
class Asking:
    """Settings that all requests of a load have in common.

    adapters: names of the trace's adapters. sampling: keys that every request sends.
    stream_prefix: beginning of the ids of video streams, of which a newer chunk supersedes an older
        one that waits; None if chunks do not name their stream.
    timeout: seconds after which a request is given up.
    """

    adapters: Sequence[str] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    task: str | None = None
    stream_prefix: str | None = None
    timeout: float = 120.0

    def question(self, traced: TracedRequest, content: Content) -> Question:
        keys: dict[str, Any] = {"temperature": 0, "max_tokens": traced.limit, "ignore_eos": True}
        if traced.priority:
            keys["priority"] = traced.priority
        if traced.stream is not None and self.stream_prefix is not None:
            keys |= {"stream_id": f"{self.stream_prefix}-{traced.stream}", "supersede": True}
        return Question(content, _name(traced, self.adapters), keys | {**self.sampling}, self.task)


def _name(traced: TracedRequest, adapters: Sequence[str]) -> str | None:
    return None if traced.adapter == BASE else adapters[traced.adapter]


async def measure_tokens(target: Target, asking: Asking) -> TokenCount:
    """Ask two short questions of the base model; return how the server counts a text's tokens.

    Raises ServerError with the reason if one is refused.
    """
    counts = []
    for number in (SHORT, LONG):
        words = (WORDS * number)[:number]
        question = asking.question(TracedRequest(0.0, BASE, 0, 1, 1), Content(" ".join(words)))
        answer = Answer()
        try:
            async with asyncio.timeout(asking.timeout):
                await target.ask(question, answer)
        except RequestFailed as error:
            raise ServerError(f"a first request failed: {error}") from None
        except TimeoutError:
            raise ServerError(f"no answer to a first request within {asking.timeout:g} s") from None
        counts.append((number, answer.prompt_tokens))
    return TokenCount.of(*counts)


async def send(
    target: Target,
    asking: Asking,
    trace: Sequence[TracedRequest],
    contents: Sequence[Content],
    measurement: Measurement,
    watch: Callable[[Record], None] = lambda record: None,
) -> None:
    """Send all requests at their times and wait for their answers, noting them in `measurement`.

    If this is cancelled, the requests that run have no end. watch: called with each record when the
    request is sent, and when it has ended.
    """
    questions = [asking.question(*pair) for pair in zip(trace, contents, strict=True)]
    gc.freeze()  # To look through all contents for garbage would stop the loop for milliseconds.
    started = time.perf_counter() + LEAD_SECONDS
    try:
        async with asyncio.TaskGroup() as running:
            for question, record in zip(questions, measurement.records, strict=True):
                scheduled = started + record.at
                await asyncio.sleep(scheduled - time.perf_counter() - TIMER_SECONDS)
                while time.perf_counter() < scheduled:
                    await asyncio.sleep(0)
                running.create_task(
                    _ask(target, question, record, scheduled, asking.timeout, measurement, watch)
                )
    finally:
        gc.unfreeze()


async def _ask(
    target: Target,
    question: Question,
    record: Record,
    scheduled: float,
    timeout: float,
    measurement: Measurement,
    watch: Callable[[Record], None],
) -> None:
    answer, code = Answer(), ""
    record.lag = time.perf_counter() - scheduled
    watch(record)
    try:
        async with asyncio.timeout(timeout):
            await target.ask(question, answer)
    except RequestFailed as error:
        code = error.code
        measurement.messages.setdefault(code, str(error))
    except TimeoutError:
        code = "TIMEOUT"
        measurement.messages.setdefault(code, f"no complete answer within {timeout:g} s")
    record.end = time.perf_counter() - scheduled
    # An answer of a vision task head may have no text.
    record.first = (answer.first or scheduled + record.end) - scheduled if not code else None
    record.prompt_tokens, record.output_tokens = answer.prompt_tokens, answer.output_tokens
    record.error = code
    watch(record)
