"""Sampling of a step's tokens, and the rows that wait for a token mask.

A grammar's process computes the mask of a structured request during the forward pass. If it is
late, the row is held with its logits until the mask arrives, and other requests continue.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from vlora import backends
from vlora.device.device import Device
from vlora.engine.plan import StepPlan
from vlora.engine.requests import LogitsRow, RequestState
from vlora.errors import Unavailable
from vlora.kernels import ops
from vlora.model.sampler import MASKED, draw_parameters, draw_placed, draw_rows
from vlora.structured.grammar import SLOW_NICENESS, VERY_SLOW_SECONDS, Grammar

log = logging.getLogger(__name__)

GRACE_SECONDS = 0.001  # A step's wait for masks, except of grammars whose last mask was late.
IDLE_SECONDS = 0.005  # Sleep at a time while held rows are the only work.
MAX_WAIT_SECONDS = 10.0  # A row's wait for its mask, after which the process is ended.
COMPLETE = LogitsRow(finite=True)  # Row of a request whose grammar allows no further token.


class _Held(NamedTuple):
    """A row that waits for its mask.

    since: start of the wait, on the clock `time.monotonic`.
    processor_seconds: processor time that the grammar's process had used at the start.
    """

    state: RequestState
    row: LogitsRow
    since: float
    processor_seconds: float


class HeldRows:
    """The matchers of structured requests, and the rows that wait for a mask."""

    def __init__(self, vocabulary: int, device: Device) -> None:
        self._vocabulary, self._device = vocabulary, device
        self._states: dict[str, RequestState] = {}  # Requests with an open matcher, by id.
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def begin(self, plan: StepPlan, states: Sequence[RequestState]) -> StepRows:
        """Return the rows of a step, and request the first masks of structured requests.

        states: the request of each chunk of the plan.
        """
        for state in states:
            if state.grammar is not None and state.matcher is None:
                state.matcher = state.grammar.open()
                self._states[state.sequence.id] = state
        chunks = zip(plan.chunks, states, strict=True)
        drawn = [state for chunk, state in chunks if chunk.completes and not chunk.use_head]
        return StepRows(drawn, self._vocabulary, self._device, self)

    def end(self, state: RequestState) -> None:
        if self._states.pop(state.sequence.id, None) is not None:
            self._held.pop(state.sequence.id, None)
            assert state.matcher is not None
            state.matcher.close()

    def wait_for(self, states: Iterable[RequestState]) -> None:
        """Wait up to GRACE_SECONDS for the masks of these requests."""
        if not self._states:
            return
        expected = [state for state in states if state.matcher is not None]
        _receive(expected)
        deadline = time.monotonic() + GRACE_SECONDS
        while True:
            grammars = {
                state.grammar
                for state in expected
                if not _ready(state) and state.grammar and not state.grammar.late
            }
            left = deadline - time.monotonic()
            if not grammars or left <= 0:
                return
            _wait(grammars, left)
            _receive(expected)

    def hold(self, state: RequestState, row: LogitsRow) -> bool:
        """Hold the row of a request if its mask is late; return whether it is held."""
        grammar, request_id = state.grammar, state.sequence.id
        if grammar is None:
            return False
        grammar.late = not _ready(state)
        earlier = self._held.pop(request_id, None)
        if grammar.late:
            # The step's logits are overwritten by the next step.
            logits = None if row.logits is None else row.logits.clone()
            since, seconds = time.monotonic(), grammar.processor_seconds
            if earlier is not None:
                since, seconds = earlier.since, earlier.processor_seconds
            self._held[request_id] = _Held(state, row._replace(logits=logits), since, seconds)
        return grammar.late

    def answerable(self) -> list[tuple[RequestState, LogitsRow]]:
        """Return the requests with a complete answer or an arrived mask, each with its row."""
        if not self._states:
            return []
        _receive(self._states.values())
        answers = []
        for request_id, state in self._states.items():
            held = self._held.get(request_id)
            if state.matcher is not None and state.matcher.stopped:
                answers.append((state, COMPLETE))
            elif held is not None:
                _check_speed(held)
                if _ready(state):
                    answers.append((state, held.row))
        for state, _ in answers:
            self._held.pop(state.sequence.id, None)
        return answers

    def sleep(self) -> None:
        """Wait up to IDLE_SECONDS for the mask of a held row."""
        _wait({h.state.grammar for h in self._held.values() if h.state.grammar}, IDLE_SECONDS)


def _check_speed(held: _Held) -> None:
    grammar, matcher = held.state.grammar, held.state.matcher
    assert grammar is not None
    assert matcher is not None
    waited = time.monotonic() - held.since
    matcher.count_wait(waited)
    if matcher.ready:
        return
    if grammar.processor_seconds - held.processor_seconds > VERY_SLOW_SECONDS:
        grammar.lower_priority(SLOW_NICENESS)
    if waited > MAX_WAIT_SECONDS:
        grammar.end(
            Unavailable(
                "a token mask of 'structured_outputs' took more than"
                f" {MAX_WAIT_SECONDS:g} s; simplify the structure, or try again"
            )
        )


def _ready(state: RequestState) -> bool:
    return state.matcher is None or state.matcher.ready


def _receive(states: Iterable[RequestState]) -> None:
    for grammar in {state.grammar for state in states if state.grammar is not None}:
        grammar.receive()


def _wait(grammars: Iterable[Grammar], seconds: float) -> None:
    poll = select.poll()
    for grammar in grammars:
        if (file := grammar.file) is not None:
            poll.register(file, select.POLLIN)
    poll.poll(seconds * 1e3)


class StepRows:
    """The rows of logits of a step whose requests need a token, and the tokens drawn from them.

    Tokens of requests with a batchable sampler are drawn together. On a GPU, those of requests
    without a structure are drawn and copied asynchronously, before masks are known; the parameters
    of these draws are uploaded with the inputs of the forward pass.
    """

    def __init__(
        self, states: Sequence[RequestState], vocabulary: int, device: Device, held: HeldRows
    ) -> None:
        self._states, self._device, self._held = states, device, held
        # Rows whose tokens are drawn before it is known whether their logits are finite.
        self._early: list[int] = []
        self.inputs: list[torch.Tensor] = []  # Parameters of the draws, in host memory.
        if backends.backend_of("kernels", device.torch_device.type) == "gpu":
            early = [
                (row, *state.sampler.parameters(state.sequence.known, vocabulary))
                for row, state in enumerate(states)
                if state.sampler.batchable and not state.sampler.greedy and state.matcher is None
            ]
            self._early = [row for row, *_ in early]
            self.inputs = draw_parameters(early)
        self._parameters: Sequence[torch.Tensor] = ()

    def place(self, uploaded: Sequence[torch.Tensor]) -> None:
        self._parameters = uploaded

    def take(self, logits: torch.Tensor) -> list[LogitsRow | None]:
        """Draw the tokens of all rows from logits, [rows, vocabulary] float32.

        Returns the row of each request, in order, or None if it is held until its mask arrives.
        """
        self._logits = logits
        columns = list(ops.argmax(logits))
        if self._early:
            columns.append(draw_placed(logits, self._parameters))
        # On a GPU, tokens are drawn during the wait for masks.
        self._readback = self._device.read_back(columns)
        self._held.wait_for(self._states)
        drawn = zip(self._states, self._drawn(), strict=True)
        return [None if self._held.hold(state, row) else row for state, row in drawn]

    @property
    def waited(self) -> float:
        """Seconds that `take` has waited for the device."""
        return self._readback.waited

    def _drawn(self) -> list[LogitsRow]:
        """Return the rows with their tokens, in the order of the requests.

        A row has logits instead if its request's own sampler must draw later: if the sampler is not
        batchable, its mask is not ready, or drawing together failed.
        """
        largest, all_finite, *early = (column.tolist() for column in self._readback.get())
        drawn = dict(zip(self._early, *early, strict=True)) if early else {}
        logits = self._logits
        tokens: list[int | None] = [None] * len(self._states)
        together = []
        for row, (state, token) in enumerate(zip(self._states, largest, strict=True)):
            sampler, matcher = state.sampler, state.matcher
            if not (all_finite[row] and sampler.batchable):
                continue
            if matcher is not None:
                if not matcher.has_mask:
                    continue
                barred = torch.from_numpy(~matcher.mask).to(logits.device)
                with torch.inference_mode():
                    logits[row].masked_fill_(barred, float(MASKED))
                token = int(logits[row].argmax()) if sampler.greedy else token
            if sampler.greedy:
                tokens[row] = token
            elif row in drawn:
                tokens[row] = drawn[row]
            else:
                together.append((row, sampler, state.sequence.known))
        if together:
            try:
                for (row, _, _), token in zip(together, draw_rows(logits, together), strict=True):
                    tokens[row] = token
            except Exception:
                log.exception("drawing %d rows together failed; each is drawn alone", len(together))
        return [
            LogitsRow(finite, token, logits[row].cpu() if token is None else None)
            for row, (finite, token) in enumerate(zip(all_finite, tokens, strict=True))
        ]
