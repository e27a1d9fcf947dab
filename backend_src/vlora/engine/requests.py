"""Requests of the engine: their checks on arrival, and their state until their last output."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

import torch

from vlora.adapters.files import AdapterInfo
from vlora.adapters.store import AdapterStore
from vlora.config import Limits
from vlora.engine.checks import admissible, check_choices
from vlora.engine.memory import EngineMemory
from vlora.engine.sequence import Sequence
from vlora.errors import Internal, InvalidArgument, VLoraError
from vlora.memory.prefix import BlockDigests
from vlora.model.decoder_config import DecoderConfig
from vlora.model.inputs import PromptReader
from vlora.model.sampler import TokenSampler
from vlora.model.tokenizer import TextStream, Vocabulary
from vlora.request import NO_MODES, HeadScores, Output, Request, Timings, TokenLogprob
from vlora.structured.grammar import Grammar, Matcher
from vlora.structured.grammars import Grammars, tokenizer_data


class LogitsRow(NamedTuple):
    """Logits of one row of a step: the token drawn from them, or [vocabulary] float32.

    finite: whether all logits are finite.
    """

    finite: bool
    token: int | None = None
    logits: torch.Tensor | None = None


class RequestState:
    """An in-flight request that has passed all checks: its sequence, text and sampling state."""

    def __init__(
        self,
        sequence: Sequence,
        sampler: TokenSampler,
        vocabulary: Vocabulary,
        grammar: Grammar | None = None,
    ) -> None:
        params = sequence.request.sampling
        self.grammar = grammar
        # State of the grammar after the answer's tokens so far; None before the first step.
        self.matcher: Matcher | None = None
        self.sequence = sequence
        self.sampler = sampler
        self._stream = TextStream(
            vocabulary, params.stop, params.include_stop_str_in_output, params.skip_special_tokens
        )
        self._first_scheduled: float | None = None
        self._first_token: float | None = None
        self._modes: Counter[str] = Counter()
        self._word_probabilities: dict[str, float] | None = None

    @property
    def _adapter(self) -> AdapterInfo | None:
        handle = self.sequence.adapter
        return None if handle is None else handle.info

    def scheduled(self, mode: str, now: float) -> None:
        """Count a step of the request, which begins at `now` in this mode."""
        self._modes[mode] += 1
        if self._first_scheduled is None:
            self._first_scheduled = now

    def drawn(self, row: LogitsRow, now: float) -> Output:
        """Append the next token and return its output, or the last one of a complete structure.

        The mask of a structured request must be ready. Raises InvalidArgument or Internal if the
        logits are not finite.
        """
        matcher = self.matcher
        if matcher is not None and matcher.stopped:
            return self._output(now, text=self._stream.flush(), finish_reason="stop")
        if not row.finite:
            raise self._not_finite()
        if self._first_token is None:
            self._first_token = now
        token, logprobs = (row.token, None) if row.token is not None else self._draw(row)
        self.sequence.tokens.append(token)
        text, finish_reason = self._read(token)
        if matcher is not None and finish_reason is None:
            matcher.advance(token)
        return self._output(
            now, text=text, token_ids=(token,), logprobs=logprobs, finish_reason=finish_reason
        )

    def _draw(self, row: LogitsRow) -> tuple[int, tuple[tuple[TokenLogprob, ...], ...] | None]:
        assert row.logits is not None
        sequence, logits = self.sequence, row.logits.numpy()
        if sequence.request.sampling.word_probabilities and not sequence.output_length:
            self._word_probabilities = self.sampler.word_probabilities(logits)
        draw = self.sampler.draw(
            logits,
            sequence.tokens[: sequence.prompt_length],
            sequence.tokens[sequence.prompt_length :],
            budget=sequence.max_tokens - sequence.output_length,
            mask=None if self.matcher is None else self.matcher.mask,
        )
        return draw.token, None if draw.logprobs is None else (draw.logprobs,)

    def _read(self, token: int) -> tuple[str, str | None]:
        """Return (new text, finish reason or None) after `token` was drawn."""
        choices = self.sampler.choices
        if choices is not None:
            if token not in self.sampler.ends:
                choices.advance(token)
                return (choices.finished, "stop") if choices.finished else ("", None)
            return choices.complete or "", "stop"
        params, length = self.sequence.request.sampling, self.sequence.output_length
        ended = token in self.sampler.ends
        # As in vLLM, the token that ends an answer counts as a stop string.
        if ended and not params.include_stop_str_in_output:
            return self._stream.flush(), "stop"
        text, stopped = self._stream.push(token, check_stop=length > params.min_tokens)
        if stopped:
            return text, "stop"
        if ended or length >= self.sequence.max_tokens:
            return text + self._stream.flush(), "stop" if ended else "length"
        return text, None

    def scored(self, values: torch.Tensor, now: float) -> Output:
        """Return the last output of a request that the vision task head answers.

        values: [classes] float32, before softmax.

        Raises InvalidArgument if the values are not finite.
        """
        if not bool(torch.isfinite(values).all()):
            raise self._not_finite()
        self._first_token = now
        assert self._adapter is not None, "a head belongs to an adapter"
        head = HeadScores(self._adapter.head_labels, tuple(torch.softmax(values, dim=0).tolist()))
        return self._output(now, text=head.best, head=head, finish_reason="stop")

    def _not_finite(self) -> VLoraError:
        # Other requests must not compute with these keys and values.
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

    def _output(self, now: float, **content: Any) -> Output:
        sequence, adapter = self.sequence, self._adapter
        arrival = sequence.arrival
        finished = "error" in content or content.get("finish_reason") is not None
        return Output(
            sequence.id,
            **content,
            num_input_tokens=sequence.prompt_length,
            num_output_tokens=sequence.output_length,
            num_cached_tokens=min(sequence.cached, sequence.prompt_length),
            adapter=None if adapter is None else adapter.name,
            adapter_digest=None if adapter is None else adapter.digest,
            timings=Timings(
                queued=(now if self._first_scheduled is None else self._first_scheduled) - arrival,
                first_token=0.0 if self._first_token is None else self._first_token - arrival,
                total=now - arrival,
            ),
            modes=dict(self._modes) if finished else NO_MODES,
            word_probabilities=self._word_probabilities if finished else None,
        )


class Admission:
    """Checks requests and creates the `RequestState`s that the engine queues. Thread-safe."""

    def __init__(
        self,
        config: DecoderConfig,
        reader: PromptReader,
        adapters: AdapterStore,
        memory: EngineMemory,
        limits: Limits,
        max_model_len: int,
        merge_is_lossy: bool,
    ) -> None:
        self.reader = reader
        self._config = config
        self._adapters = adapters
        self._memory = memory
        self._limits = limits
        self._max_model_len = max_model_len
        self._merge_is_lossy = merge_is_lossy
        self._vocabulary = Vocabulary(reader.tokenizer, config.vocabulary)
        tokens = self._vocabulary.bytes_of
        self.grammars = Grammars(
            lambda: tokenizer_data(reader.tokenizer, tokens, config.vocabulary, config.eos_tokens),
            config.vocabulary,
            limits,
        )

    def prepare(self, request: Request) -> RequestState:
        """Check a request, tokenize its prompt, and return its state, which holds no pages yet.

        Raises a VLoraError if the request is refused. Compiling its grammar may take seconds.
        """
        handle = None if request.adapter is None else self._adapters.handle(request.adapter)
        self._check(request)
        prompt = self.reader.read(request.prompt, request.images)
        params = request.sampling
        sampler = TokenSampler(params, request.id, self._config.eos_tokens, self._vocabulary)
        longest_choice = 0 if sampler.choices is None else sampler.choices.required_tokens
        context = self._memory.context(handle)
        max_tokens = admissible(request, handle, context, len(prompt.ids), longest_choice)
        digests = None
        if self._memory.prefix is not None:
            digests = BlockDigests(
                self._memory.block_size,
                prompt.feature_row,
                prompt.all_features,
                prompt.positions,
                params.cache_salt,
            )
            # Hash the prompt on this thread instead of the engine's.
            digests.up_to(prompt.ids, len(prompt.ids))
        structure = params.structured_outputs
        grammar = None if structure is None else self.grammars.acquire(structure, params.cache_salt)
        sequence = Sequence(
            request,
            prompt,
            handle,
            max_tokens,
            self._memory.table(),
            digests,
            longest_choice=longest_choice,
            merge_is_lossy=self._merge_is_lossy,
        )
        return RequestState(sequence, sampler, self._vocabulary, grammar)

    def _check(self, request: Request) -> None:
        params, vocabulary = request.sampling, self._config.vocabulary
        invalid = [t for t in params.stop_token_ids if not 0 <= t < vocabulary]
        if invalid:
            raise InvalidArgument(
                f"'stop_token_ids' holds {invalid[0]}; ids run from 0 to {vocabulary - 1}"
            )
        check_choices(params.choices, self._limits)
        if params.structured_outputs is not None:
            if request.use_head:
                raise InvalidArgument(
                    "'structured_outputs' cannot be combined with a vision task head, which answers"
                    " with a label"
                )
            self.grammars.check(params.structured_outputs)
        if not request.prompt:
            raise InvalidArgument("the prompt is empty; give a text")
        self.reader.check_length(request.prompt, self._max_model_len)


class InFlightRequests:
    """The requests that were added to an engine and have not ended: their states by id."""

    def __init__(self) -> None:
        self._states: dict[str, RequestState] = {}
        self._next_deadline = math.inf  # Time before which no deadline of these requests passes.

    def __getitem__(self, request_id: str) -> RequestState:
        return self._states[request_id]

    def get(self, request_id: str) -> RequestState | None:
        return self._states.get(request_id)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self._states)

    def add(self, state: RequestState) -> None:
        """Add a request whose id is not in use."""
        sequence = state.sequence
        self._states[sequence.id] = state
        self._next_deadline = min(self._next_deadline, sequence.deadline)

    def remove(self, state: RequestState) -> None:
        # `_next_deadline` may then be too early, which costs one search.
        del self._states[state.sequence.id]

    def expired(self, now: float) -> list[RequestState]:
        """Return the requests whose deadline has passed, earliest deadline first."""
        if now < self._next_deadline:
            return []
        by_deadline = sorted(self._states.values(), key=lambda state: state.sequence.deadline)
        late = [state for state in by_deadline if state.sequence.deadline <= now]
        following = by_deadline[len(late) :]
        # The caller ends the late requests.
        self._next_deadline = following[0].sequence.deadline if following else math.inf
        return late

    def check_integrity(self, scheduled_ids: set[str]) -> None:
        """Raise AssertionError unless the ids equal `scheduled_ids` and no deadline is missed."""
        assert scheduled_ids == set(self._states), scheduled_ids ^ set(self._states)
        deadlines = (state.sequence.deadline for state in self._states.values())
        assert self._next_deadline <= min(deadlines, default=math.inf)
