"""One request from the edge to its answer: what has been drawn, and what is told of it."""

from __future__ import annotations

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


class LogitsRow(NamedTuple):
    """logits: [V] of one row. token: what a plain sampler draws from them. finite: all of them
    are."""

    logits: torch.Tensor
    token: int
    finite: bool


def rows_of(logits: torch.Tensor, states: list[RequestState]) -> list[LogitsRow]:
    """logits: [rows, V], a row for each request → its rows, all looked at together."""
    largest, finite = ops.argmax(logits)
    tokens, told = largest.tolist(), finite.tolist()
    drawn = [
        (row, state.sampler, state.sequence.known)
        for row, state in enumerate(states)
        if told[row] and state.sampler.batchable and not state.sampler.greedy
    ]
    if drawn:
        for (row, _, _), token in zip(drawn, draw_rows(logits, drawn), strict=True):
            tokens[row] = token
    return [LogitsRow(*row) for row in zip(logits, tokens, told, strict=True)]


class RequestState:
    """All that is known of one live request; made at the edge, once it has passed every check.

    Owns the sequence that the scheduler sees, and its text and sampling state, which survive
    preemption unchanged.
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
        self._started: float | None = None
        self._first: float | None = None
        self._modes: Counter[str] = Counter()

    @property
    def _adapter(self) -> AdapterInfo | None:
        """Of the version that it runs with."""
        handle = self.sequence.adapter
        return None if handle is None else handle.info

    def scheduled(self, mode: Mode, now: float) -> None:
        """Rows of the request are about to be computed in this mode."""
        self._modes[mode.value] += 1
        if self._started is None:
            self._started = now

    def drawn(self, row: LogitsRow, now: float) -> Output:
        """The next token. Raises InvalidArgument or Internal where the logits are not finite."""
        if not row.finite:
            raise self._overflow()
        if self._first is None:
            self._first = now
        sequence, sampler = self.sequence, self.sampler
        logprobs = None
        token = row.token
        if not sampler.batchable:
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
        """(new text, finish reason) once `token` has been drawn."""
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
        """The vision task head's answer, from its values [classes]; no token is drawn.

        Raises InvalidArgument where they are not finite."""
        if not bool(torch.isfinite(values).all()):
            raise self._overflow()
        self._first = now
        assert self._adapter is not None, "a head belongs to an adapter"
        scores = torch.softmax(values, dim=0)
        head = HeadScores(self._adapter.head_labels, tuple(scores.tolist()))
        return self._output(now, text=head.best, head=head, finish_reason="stop")

    def _overflow(self) -> VLoraError:
        """The error of a row that is not finite: of the adapter, else of the features that came
        with the request, else of the model itself."""
        if self._adapter is not None:
            return InvalidArgument(
                f"adapter '{self._adapter.name}' produces values that are not finite for this"
                " prompt; its weights are too large"
            )
        if self.sequence.prompt.features is not None:
            return InvalidArgument("the image features lead to values that are not finite")
        return Internal("the model produces values that are not finite for this prompt")

    def ended(self, error: VLoraError, now: float) -> Output:
        """Ended from outside."""
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
                queued=(now if self._started is None else self._started) - arrival,
                first_token=0.0 if self._first is None else self._first - arrival,
                total=now - arrival,
            ),
            modes=dict(self._modes),
        )
