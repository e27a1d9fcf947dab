"""The state of one in-flight request: its sequence, its sampler and its output so far."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from vlora.engine.sequence import Sequence
from vlora.errors import Internal, InvalidArgument, VLoraError
from vlora.lora.adapter import AdapterInfo
from vlora.model.sampler import TokenSampler
from vlora.model.vocabulary import TextStream, Vocabulary
from vlora.request import NO_MODES, HeadScores, Output, Timings, TokenLogprob
from vlora.structured.grammar import Grammar, Matcher


class LogitsRow(NamedTuple):
    """Logits of one row of a step.

    finite: whether all logits are finite.
    token: token drawn from the logits; None if the request's own sampler must draw it.
    logits: [vocabulary] float32 if `token` is None, else None.
    """

    finite: bool
    token: int | None = None
    logits: torch.Tensor | None = None


class RequestState:
    """Everything about one in-flight request that has passed all checks.

    It owns the sequence that the scheduler sees. It also holds the text and the sampling state,
    which preemption does not change.
    """

    def __init__(
        self,
        sequence: Sequence,
        sampler: TokenSampler,
        vocabulary: Vocabulary,
        grammar: Grammar | None = None,
    ) -> None:
        """Make the state of a request that is not queued yet.

        grammar: grammar that the answer must follow, or None. The engine releases it.
        """
        params = sequence.request.sampling
        self.grammar = grammar
        self.matcher: Matcher | None = None
        """State of the grammar after the answer's tokens so far; None before the first step."""
        self.sequence = sequence
        self.sampler = sampler
        self._stream = TextStream(vocabulary, params.stop, params.include_stop_str_in_output)
        self._first_scheduled: float | None = None
        self._first_token: float | None = None
        self._modes: Counter[str] = Counter()

    @property
    def _adapter(self) -> AdapterInfo | None:
        """Version of the adapter that the request uses."""
        handle = self.sequence.adapter
        return None if handle is None else handle.info

    def scheduled(self, mode: str, now: float) -> None:
        """Count a step of the request in this mode. If it is the first step, note its
        time, `now`.
        """
        self._modes[mode] += 1
        if self._first_scheduled is None:
            self._first_scheduled = now

    def drawn(self, row: LogitsRow, now: float) -> Output:
        """Append the next token and return its output.

        If a structured answer is complete already, no token is drawn, and the output ends the
        request. Otherwise the mask of a structured request must be ready.

        Raises InvalidArgument or Internal if the logits are not finite.
        """
        matcher = self.matcher
        if matcher is not None and matcher.stopped:
            return self._output(now, text=self._stream.flush(), finish_reason="stop")
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
                mask=None if matcher is None else matcher.mask,
            )
            token = draw.token
            logprobs = None if draw.logprobs is None else (draw.logprobs,)
        sequence.tokens.append(token)
        text, finish_reason = self._read(token)
        if matcher is not None and finish_reason is None:
            matcher.advance(token)
        return self._output(
            now, text=text, token_ids=(token,), logprobs=logprobs, finish_reason=finish_reason
        )

    def _read(self, token: int) -> tuple[str, str | None]:
        """Return (new text, finish reason or None) after `token` was drawn."""
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
        """Return the final output of a request that the adapter's vision task head answers.

        values: [classes] float32, the head's outputs before softmax.
        now: seconds on the engine's clock.

        Raises InvalidArgument if the values are not finite.
        """
        if not bool(torch.isfinite(values).all()):
            raise self._not_finite()
        self._first_token = now
        assert self._adapter is not None, "a head belongs to an adapter"
        scores = torch.softmax(values, dim=0)
        head = HeadScores(self._adapter.head_labels, tuple(scores.tolist()))
        return self._output(now, text=head.best, head=head, finish_reason="stop")

    def _not_finite(self) -> VLoraError:
        """Return the error for a row whose logits are not finite. Stop sharing the request's prefix
        blocks.

        The error names the cause: the adapter if there is one, else the image features if there are
        any, else the model.
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
        sequence, adapter = self.sequence, self._adapter
        arrival = sequence.arrival
        finished = finish_reason is not None or error is not None
        return Output(
            sequence.id,
            text,
            token_ids,
            logprobs,
            finish_reason,
            error,
            num_input_tokens=sequence.prompt_length,
            num_output_tokens=sequence.output_length,
            num_cached_tokens=min(sequence.cached, sequence.prompt_length),
            head=head,
            adapter=None if adapter is None else adapter.name,
            adapter_digest=None if adapter is None else adapter.digest,
            timings=Timings(
                queued=(now if self._first_scheduled is None else self._first_scheduled) - arrival,
                first_token=0.0 if self._first_token is None else self._first_token - arrival,
                total=now - arrival,
            ),
            modes=dict(self._modes) if finished else NO_MODES,
        )
