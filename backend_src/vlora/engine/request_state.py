"""The state of one in-flight request: its sequence, its sampler, and its output so far."""

from __future__ import annotations

import logging
from collections import Counter
from typing import NamedTuple

import torch

from vlora.engine.plan import Mode
from vlora.engine.sequence import Sequence
from vlora.errors import Internal, InvalidArgument, VLoraError
from vlora.kernels import ops
from vlora.lora.adapter import AdapterInfo
from vlora.model.sampler import TokenSampler, draw_rows
from vlora.model.vocabulary import TextStream, Vocabulary
from vlora.request import HeadScores, Output, Timings, TokenLogprob

log = logging.getLogger(__name__)


class LogitsRow(NamedTuple):
    """Logits of one row.

    finite: whether all of them are finite.
    token: the token drawn from them, None if the request's sampler must draw it alone.
    logits: [V] float32 if so, else None.
    """

    finite: bool
    token: int | None = None
    logits: torch.Tensor | None = None


def rows_of(logits: torch.Tensor, states: list[RequestState]) -> list[LogitsRow]:
    """Split the logits of a step into rows and draw the tokens of all batchable samplers at once.

    If that fails, because of any of the rows, each of them is left to its own sampler.

    logits: [rows, V], one row per request of `states`.
    """
    largest, all_finite = (column.tolist() for column in ops.argmax(logits))
    tokens: list[int | None] = [
        token if state.sampler.batchable and state.sampler.greedy else None
        for token, state in zip(largest, states, strict=True)
    ]
    together = [
        (row, state.sampler, state.sequence.known)
        for row, state in enumerate(states)
        if all_finite[row] and state.sampler.batchable and not state.sampler.greedy
    ]
    if together:
        try:
            for (row, _, _), token in zip(together, draw_rows(logits, together), strict=True):
                tokens[row] = token
        except Exception:
            log.exception("drawing %d rows together failed; each is drawn alone", len(together))
    return [
        LogitsRow(finite, token, logits[row] if token is None else None)
        for row, (finite, token) in enumerate(zip(all_finite, tokens, strict=True))
    ]


class RequestState:
    """Everything about one in-flight request; made once it has passed every check.

    Owns the sequence that the scheduler sees, and the text and sampling state, which preemption
    does not change.
    """

    def __init__(
        self,
        sequence: Sequence,
        sampler: TokenSampler,
        vocabulary: Vocabulary,
    ) -> None:
        params = sequence.request.sampling
        self.sequence = sequence
        self.sampler = sampler
        self._stream = TextStream(vocabulary, params.stop, params.include_stop_str_in_output)
        self._first_scheduled: float | None = None
        self._first_token: float | None = None
        self._modes: Counter[str] = Counter()

    @property
    def _adapter(self) -> AdapterInfo | None:
        """The adapter version that the request runs with."""
        handle = self.sequence.adapter
        return None if handle is None else handle.info

    def scheduled(self, mode: Mode, now: float) -> None:
        """Note that rows of the request are about to be computed in this mode."""
        self._modes[mode.value] += 1
        if self._first_scheduled is None:
            self._first_scheduled = now

    def drawn(self, row: LogitsRow, now: float) -> Output:
        """Append the next token and return its output.

        Raises InvalidArgument or Internal if the logits are not finite.
        """
        if not row.finite:
            raise self._not_finite()
        if self._first_token is None:
            self._first_token = now
        sequence, sampler = self.sequence, self.sampler
        logprobs = None
        token = row.token
        if token is None:
            assert row.logits is not None
            draw = sampler.draw(
                row.logits.numpy(),
                sequence.tokens[: sequence.prompt_length],
                sequence.output,
                budget=sequence.max_tokens - sequence.output_length,
            )
            token = draw.token
            logprobs = None if draw.logprobs is None else (draw.logprobs,)
        sequence.tokens.append(token)
        text, finish_reason = self._read(token)
        return self._output(
            now, text=text, token_ids=(token,), logprobs=logprobs, finish_reason=finish_reason
        )

    def _read(self, token: int) -> tuple[str, str | None]:
        """Return (new text, finish reason) after `token` was drawn."""
        choices = self.sampler.choices
        if choices is not None:
            if token not in self.sampler.ends:
                choices.advance(token)
                return (choices.finished, "stop") if choices.finished else ("", None)
            return choices.complete or "", "stop"
        if token in self.sampler.ends:
            return self._stream.flush(), "stop"
        length = self.sequence.output_length
        text, stopped = self._stream.push(
            token, check_stop=length > self.sequence.request.sampling.min_tokens
        )
        if stopped:
            return text, "stop"
        if length >= self.sequence.max_tokens:
            return text + self._stream.flush(), "length"
        return text, None

    def scored(self, values: torch.Tensor, now: float) -> Output:
        """Return the answer of the vision task head; no token is drawn.

        values: [classes] float32. Raises InvalidArgument if they are not finite.
        """
        if not bool(torch.isfinite(values).all()):
            raise self._not_finite()
        self._first_token = now
        assert self._adapter is not None, "a head belongs to an adapter"
        scores = torch.softmax(values, dim=0)
        head = HeadScores(self._adapter.head_labels, tuple(scores.tolist()))
        return self._output(now, text=head.best, head=head, finish_reason="stop")

    def _not_finite(self) -> VLoraError:
        """Return the error for a row that is not finite, and let no other request get blocks that
        led to it.

        It names the adapter, else the request's image features, else the model as the cause.
        """
        self.sequence.table.discard_shared()
        if self._adapter is not None:
            return InvalidArgument(
                f"adapter '{self._adapter.name}' produces values that are not finite for this"
                " prompt; its weights are too large"
            )
        if self.sequence.prompt.features is not None:
            return InvalidArgument("the image features lead to values that are not finite")
        return Internal("the model produces values that are not finite for this prompt")

    def ended(self, error: VLoraError, now: float) -> Output:
        """Return the last output of a request that is ended with an error."""
        return self._output(now, error=error)

    def _output(
        self,
        now: float,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None,
        finish_reason: str | None = None,
        error: VLoraError | None = None,
        head: HeadScores | None = None,
    ) -> Output:
        sequence = self.sequence
        arrival = sequence.arrival
        return Output(
            request_id=sequence.id,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=finish_reason,
            error=error,
            num_input_tokens=sequence.prompt_length,
            num_output_tokens=sequence.output_length,
            head=head,
            adapter=self._adapter.name if self._adapter else None,
            adapter_digest=self._adapter.digest if self._adapter else None,
            timings=Timings(
                queued=(now if self._first_scheduled is None else self._first_scheduled) - arrival,
                first_token=0.0 if self._first_token is None else self._first_token - arrival,
                total=now - arrival,
            ),
            modes=dict(self._modes),
        )
