"""The state of one in-flight request: its sequence, its sampler and its output so far."""

from __future__ import annotations

import bisect
import math
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vlora.adapters.files import AdapterInfo
from vlora.adapters.store import AdapterStore
from vlora.config import Limits
from vlora.engine.checks import admissible, check_choices
from vlora.engine.memory import EngineMemory
from vlora.engine.sequence import Sequence
from vlora.errors import (
    Cancelled,
    Internal,
    InvalidArgument,
    VLoraError,
)
from vlora.memory.prefix import BlockDigests
from vlora.model.decoder_config import DecoderConfig
from vlora.model.inputs import PromptReader
from vlora.model.sampler import TokenSampler
from vlora.model.tokenizer import TextStream, Vocabulary
from vlora.request import (
    MIN_STOPPABLE_ID,
    NO_MODES,
    HeadScores,
    Output,
    OutputSink,
    Request,
    Timings,
    TokenLogprob,
)
from vlora.structured.grammar import Grammar, Matcher
from vlora.structured.grammars import Grammars, tokenizer_data

# Checks of a request: its lengths, its `choices`, and whether its adapter can serve it.
#
# An error about a limit states the value and the limit.


# Cancellations that arrive before their request.
#
# A client can cancel a request of an ensemble while its images are still being encoded, before the
# engine has seen it. Such a cancellation is stored for a while. This module handles only ids and a
# clock. It is not thread-safe.


PATIENCE_SECONDS = 30.0
"""Seconds for which a cancellation is stored. The cancelled request arrives once its images are
encoded, which takes far less time.
"""

MAX_IDS = 4096
"""Maximum number of stored cancellations, and of stored ids of ended requests."""


class PendingCancels:
    """Stores cancellations by client id, and the client ids of requests that ended recently.

    A cancellation of a request that ended recently came too late. It is not stored, because it
    would cancel a new request with the same id.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pending: OrderedDict[str, float] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()

    def ended(self, client_id: str) -> None:
        """Record that the request with this id has ended."""
        self._ended[client_id] = None
        self._ended.move_to_end(client_id)
        _evict_oldest(self._ended)

    def add(self, client_id: str) -> None:
        """Store a cancellation, unless a request with this id ended recently.

        The caller has checked that no live request has the id.
        """
        if client_id not in self._ended:
            self._pending[client_id] = self._clock()
            _evict_oldest(self._pending)

    def take(self, client_id: str) -> bool:
        """Remove the cancellation of a new request. Return True if there was one and it was at most
        PATIENCE_SECONDS old.
        """
        since = self._pending.pop(client_id, None)
        return since is not None and self._clock() - since <= PATIENCE_SECONDS


def _evict_oldest(entries: OrderedDict[str, Any]) -> None:
    if len(entries) > MAX_IDS:
        entries.popitem(last=False)


# Requests that were admitted and have not ended, by request id and by the client's id.


@dataclass
class Client:
    """A request that was admitted and has not ended.

    id: id that the client gave; may be empty.
    sink: function that receives the outputs; None until the request is submitted.
    ended: error that `submit` must raise because the request was cancelled before `submit` was
        called; else None.
    """

    id: str
    sink: OutputSink | None = None
    ended: VLoraError | None = None


class Clients:
    """Admitted requests by request id and by client id. Not thread-safe: the callers hold the lock
    of `EngineLoop`.

    preparing: number of requests that were admitted and not yet submitted.
    """

    def __init__(self) -> None:
        self.preparing = 0
        self._clients: dict[str, Client] = {}
        self._by_client_id: defaultdict[str, set[str]] = defaultdict(set)
        self._pending_cancels = PendingCancels()

    def __len__(self) -> int:
        return len(self._clients)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._clients

    def get(self, request_id: str) -> Client | None:
        return self._clients.get(request_id)

    @property
    def request_ids(self) -> list[str]:
        return list(self._clients)

    def admit(self, request_id: str, client_id: str) -> None:
        """Add a request that is being prepared.

        Raises InvalidArgument if the request id is in use, or if the client id is in use and has at
        least MIN_STOPPABLE_ID characters. Raises Cancelled if the client has cancelled the request
        already.
        """
        if request_id in self._clients:
            raise InvalidArgument(f"the id '{request_id}' is in use by another request")
        if len(client_id) >= MIN_STOPPABLE_ID:
            if self._by_client_id.get(client_id):
                raise InvalidArgument(f"the id '{client_id}' is in use by another request")
            if self._pending_cancels.take(client_id):
                raise Cancelled(f"the request '{client_id}' was cancelled")
        self._clients[request_id] = Client(client_id)
        self._by_client_id[client_id].add(request_id)
        self.preparing += 1

    def submit(self, request_id: str, sink: OutputSink) -> None:
        """Set the sink of an admitted request."""
        self._clients[request_id].sink = sink
        self.preparing -= 1

    def remove(self, request_id: str) -> None:
        """Remove a request that has ended or that will never be submitted."""
        client = self._clients.pop(request_id)
        if client.sink is None:
            self.preparing -= 1
        request_ids = self._by_client_id[client.id]
        request_ids.discard(request_id)
        if not request_ids:
            del self._by_client_id[client.id]
            if len(client.id) >= MIN_STOPPABLE_ID:
                self._pending_cancels.ended(client.id)

    def requests_to_cancel(self, client_id: str) -> list[str]:
        """Return the ids of the requests with this client id.

        If there are none, and none has ended recently, the cancellation is stored for a while (see
        `PendingCancels`). A request that arrives with this client id meanwhile is cancelled.
        """
        request_ids = sorted(self._by_client_id.get(client_id, ()))
        if not request_ids:
            self._pending_cancels.add(client_id)
        return request_ids


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
                sequence.tokens[sequence.prompt_length :],
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


# Checks of a request before it is queued. They run on the thread that submits the request.


class Admission:
    """Checks requests and creates the `RequestState` objects that the engine queues. Thread-safe.

    merge_is_lossy: whether merged weights are rounded to a type of 16 bits (see
        `engine.sequence.mode_of`).
    """

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
        """Check a request, tokenize its prompt and return its state, which holds no pages yet.

        If the request restricts its answer by a grammar, the grammar is compiled here, which may
        take some seconds. Raises a VLoraError if the request is refused.
        """
        params = request.sampling
        handle = None if request.adapter is None else self._adapters.handle(request.adapter)
        vocabulary = self._config.vocabulary
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
        prompt = self.reader.read(request.prompt, request.images)
        sampler = TokenSampler(params, request.id, self._config.eos_tokens, self._vocabulary)
        longest_choice = 0 if sampler.choices is None else sampler.choices.required_tokens
        context = self._memory.context(handle)
        max_tokens = admissible(request, handle, context, len(prompt.ids), longest_choice)
        digests = None
        if self._memory.prefix is not None:
            digests = BlockDigests(self._memory.block_size, prompt.feature_row, prompt.features)
            # Hash the prompt on this thread instead of the engine's.
            digests.up_to(prompt.ids, len(prompt.ids))
        structure = params.structured_outputs
        grammar = None if structure is None else self.grammars.acquire(structure)
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


# The in-flight requests of an engine: those that were added and have not ended.


class InFlightRequests:
    """Request states by id, and the requests' ids by deadline."""

    def __init__(self) -> None:
        self._states: dict[str, RequestState] = {}
        self._by_deadline: list[tuple[float, str]] = []
        """(deadline, id) of the requests that have a deadline, in ascending order."""

    def __getitem__(self, request_id: str) -> RequestState:
        return self._states[request_id]

    def get(self, request_id: str) -> RequestState | None:
        return self._states.get(request_id)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self._states)

    def add(self, state: RequestState) -> None:
        """Add a request; raise ValueError if its id is in use."""
        sequence = state.sequence
        if sequence.id in self._states:
            raise ValueError(f"request id {sequence.id!r} is in use already")
        self._states[sequence.id] = state
        if sequence.deadline < math.inf:
            bisect.insort(self._by_deadline, (sequence.deadline, sequence.id))

    def remove(self, state: RequestState) -> None:
        sequence = state.sequence
        del self._states[sequence.id]
        if sequence.deadline < math.inf:
            entry = (sequence.deadline, sequence.id)
            del self._by_deadline[bisect.bisect_left(self._by_deadline, entry)]

    def expired(self, now: float) -> list[RequestState]:
        """Return the requests whose deadline has passed, earliest deadline first."""
        end = bisect.bisect_right(self._by_deadline, now, key=lambda entry: entry[0])
        return [self._states[request_id] for _, request_id in self._by_deadline[:end]]

    def check_integrity(self, scheduled_ids: set[str]) -> None:
        """Raise AssertionError unless the ids equal `scheduled_ids` and all deadlines
        are listed.
        """
        assert scheduled_ids == set(self._states), scheduled_ids ^ set(self._states)
        sequences = (state.sequence for state in self._states.values())
        with_deadline = ((s.deadline, s.id) for s in sequences if s.deadline < math.inf)
        assert self._by_deadline == sorted(with_deadline)
