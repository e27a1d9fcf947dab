"""One request from the edge to its answer: what has been drawn, and what is told of it."""

from __future__ import annotations

import torch

from vlora.engine.sequence import Sequence
from vlora.errors import VLoraError
from vlora.lora.adapter import AdapterInfo
from vlora.model.sampler import TokenSampler
from vlora.model.vocabulary import TextStream, Vocabulary
from vlora.request import HeadScores, Output, Timings, TokenLogprob


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
        adapter: AdapterInfo | None,
    ) -> None:
        params = sequence.request.sampling
        self.sequence = sequence
        self._sampler = sampler
        self._stream = TextStream(vocabulary, params.stop, params.include_stop_str_in_output)
        self._adapter = adapter
        self._started: float | None = None
        self._first: float | None = None

    def started(self, now: float) -> None:
        """The request's first row is about to be computed."""
        if self._started is None:
            self._started = now

    def drawn(self, logits: torch.Tensor, largest: int, now: float) -> Output:
        """The next token from logits [V]; `largest` is their argmax."""
        if self._first is None:
            self._first = now
        sequence, sampler = self.sequence, self._sampler
        logprobs = None
        token = largest
        if not sampler.plain_greedy:
            draw = sampler.draw(
                logits.numpy(),
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
        choices = self._sampler.choices
        if choices is not None:
            if token not in self._sampler.ends:
                choices.advance(token)
                return (choices.finished, "stop") if choices.finished else ("", None)
            return choices.complete or "", "stop"
        if token in self._sampler.ends:
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

    def scored(self, scores: torch.Tensor, now: float) -> Output:
        """The vision task head's answer: scores [classes]; no token is drawn."""
        self._first = now
        assert self._adapter is not None, "a head belongs to an adapter"
        head = HeadScores(self._adapter.head_labels, tuple(scores.tolist()))
        return self._output(now, text=head.best, head=head, finish_reason="stop")

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
        )
