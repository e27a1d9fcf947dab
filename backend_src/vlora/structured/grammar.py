"""One compiled grammar as the engine uses it: its process, and the matchers of its answers.

The engine sends each token that is drawn to an answer's matcher in the process, which computes the
mask of the tokens that may follow, while the engine computes the next step.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

import numpy as np

from vlora.errors import Internal, InvalidArgument, Unavailable, VLoraError
from vlora.fork_server import OUT_OF_MEMORY, OUT_OF_TIME, processor_seconds
from vlora.metrics import GrammarCounters
from vlora.request import BoolArray
from vlora.structured import messages
from vlora.structured.structure import Structure

# A process that compiles for long gets about a tenth of the engine's share of a busy core.
LONG_NICENESS = 10
# Processes with slow masks, even many, get little of the engine's share of a busy core.
SLOW_NICENESS = 19
SLOW_SECONDS = 0.005  # Processor time of a slow mask. Ordinary masks take a fiftieth of it.
MAX_SLOW_MASKS = 3  # The first few masks may be slow before a process's priority is lowered.
VERY_SLOW_SECONDS = 0.05  # Processor time of one mask after which the priority is lowered at once.
# Function that ends a grammar's process by its id. The future has the error for its answers.
Stop = Callable[[int], "Future[VLoraError]"]


class Matcher:
    """State of a grammar after the tokens of one answer. Only for the engine's thread.

    seconds: processor time of its masks so far.
    stopped: whether the answer is complete, so that no token may follow.
    """

    def __init__(self, grammar: Grammar, number: int) -> None:
        self._grammar = grammar
        self._number = number
        self._mask: BoolArray | None = None
        self._error: VLoraError | None = None
        self.seconds = 0.0
        self.stopped = False
        self._was_slow = False
        self._waited = 0.0  # Seconds for which the answer has waited for slow masks.

    @property
    def grammar(self) -> Grammar:
        return self._grammar

    @property
    def ready(self) -> bool:
        """True if the engine need not wait for a mask: it has arrived, or none will come."""
        return self.stopped or self._mask is not None or self._error is not None

    @property
    def has_mask(self) -> bool:
        return self._mask is not None and self._error is None and not self.stopped

    @property
    def mask(self) -> BoolArray:
        """Flags of the tokens that may come next, [vocabulary] bool. The matcher must be ready.

        Raises InvalidArgument if the grammar is too expensive or allows no token.
        """
        if self._error is not None:
            raise self._error
        assert self._mask is not None
        return self._mask

    def advance(self, token: int) -> None:
        """Add a token that the mask allows, and ask the process for the next mask."""
        self._mask = None
        self._grammar._request(messages.ADVANCE, self._number, token)

    def count_wait(self, seconds: float) -> None:
        """Count a wait for a slow mask, which has arrived or not, and fail the answer at its limit.

        Processor time does not bound the wait: answers share the process, and it has little of a
        busy processor.
        """
        if not self._grammar.is_slow or (self.ready and not self._was_slow):
            return
        waited, limit = self._waited + seconds, self._grammar.max_answer_seconds
        if waited > limit:
            self._fail(
                InvalidArgument(
                    f"an answer waited {waited:.1f} s for slow token masks of 'structured_outputs';"
                    f" the limit is {limit:g} ('max_mask_seconds')"
                )
            )
        elif self.ready:
            self._waited = waited

    def close(self) -> None:
        self._grammar._close(self._number)

    def _receive(self, kind: bytes, data: bytes, seconds: float) -> None:
        self.seconds += seconds
        self._was_slow = seconds > SLOW_SECONDS
        limit, size = self._grammar.max_answer_seconds, self._grammar.vocabulary
        if self.seconds > limit:
            self._fail(
                InvalidArgument(
                    f"the token masks of 'structured_outputs' took {self.seconds:.1f} s of"
                    f" processor time; the limit of an answer is {limit:g} ('max_mask_seconds')"
                )
            )
        elif kind == messages.MASK:
            bits = np.unpackbits(np.frombuffer(data, np.uint8), count=size, bitorder="little")
            self._mask = bits.view(np.bool_)
            if not self._mask.any():
                self._fail(InvalidArgument("no token of this model continues the structure"))
        elif kind == messages.STOPPED:
            self.stopped = True
        else:
            message = data.decode(errors="replace")
            self._fail(InvalidArgument(f"'structured_outputs' failed: {message}"))

    def _fail(self, error: VLoraError) -> None:
        self._grammar.counters.failed += self._error is None
        self._error = self._error or error


class Grammar:
    """A compiled grammar and its process.

    Only the engine's thread may use it, except that any thread may call `start` and `compiled`.

    seconds, masks: processor time of all masks so far, and their number.
    counters: totals of all grammars. The engine's thread updates the totals about answers.
    max_answer_seconds: maximum processor time of the masks of one answer.
    late: whether the last mask that was needed did not arrive in time.
    """

    def __init__(
        self,
        process: int,
        connection: socket.socket,
        vocabulary: int,
        stop: Stop,
        max_answer_seconds: float,
        counters: GrammarCounters,
    ) -> None:
        self.process = process
        self.counters = counters
        self.vocabulary = vocabulary
        self.max_answer_seconds = max_answer_seconds
        self.compile_seconds = 0.0
        self.seconds = 0.0
        self.masks = 0
        self.late = False
        self._connection = connection
        self._stop = stop
        self._matchers: dict[int, Matcher] = {}
        self._next_number = 0
        self._niceness = 0
        self._slow_masks = 0
        self._ending: Future[VLoraError] | None = None
        self._end_reason: VLoraError | None = None

    # -- compiling ---------------------------------------------------------------------------

    def start(self, structure: Structure, seconds: float, memory: int) -> None:
        """Send a structure to the process, which compiles it within `memory` bytes of allocations.

        seconds: maximum processor time of compiling, and of each token mask.
        """
        text = json.dumps([structure.kind, structure.text]).encode()
        data = messages.LIMITS.pack(seconds, memory) + text
        self._send(messages.REQUEST.pack(messages.COMPILE, 0, len(data)))
        for start in range(0, len(data), messages.PACKET_BYTES):
            self._send(data[start : start + messages.PACKET_BYTES], socket.MSG_NOSIGNAL)

    def compiled(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds; return whether the grammar is compiled.

        Raises InvalidArgument if the structure is refused, and the error that `end` returns if the
        process has ended.
        """
        if not select.select([self._connection], [], [], timeout)[0]:
            return False
        reply = self._connection.recv(messages.MAX_REPLY_BYTES)
        if not reply:
            raise self.end().result()
        kind, _, self.compile_seconds = messages.REPLY.unpack_from(reply)
        if kind == messages.REFUSED:
            message = reply[messages.REPLY.size :].decode(errors="replace")
            raise InvalidArgument(f"'structured_outputs' is refused: {message}")
        return True

    @property
    def processor_seconds(self) -> float:
        return processor_seconds(self.process)

    @property
    def is_slow(self) -> bool:
        return self._niceness >= SLOW_NICENESS

    def lower_priority(self, niceness: int) -> None:
        """Set the niceness of the process to that of this process plus `niceness`."""
        if niceness > self._niceness:
            self._niceness = niceness
            # The process may have ended.
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self.process, os.nice(0) + niceness)

    # -- answers -----------------------------------------------------------------------------

    @property
    def file(self) -> int | None:
        """File descriptor on which replies arrive; None after the process has ended."""
        return self._connection.fileno() if self._ending is None else None

    def open(self) -> Matcher:
        """Return the matcher of a new answer, whose first mask is then computed."""
        self._next_number += 1
        matcher = Matcher(self, self._next_number)
        self._matchers[self._next_number] = matcher
        self._request(messages.OPEN, self._next_number, 0)
        return matcher

    def receive(self) -> None:
        """Pass the replies that have arrived to their matchers. Does not wait."""
        while self._ending is None:
            try:
                reply = self._connection.recv(messages.MAX_REPLY_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionError:
                reply = b""
            if not reply:
                self.end()
                break
            kind, number, seconds = messages.REPLY.unpack_from(reply)
            self.seconds += seconds
            self.masks += kind == messages.MASK
            self.counters.masks += kind == messages.MASK
            self.counters.mask_seconds += seconds
            self._slow_masks += seconds > SLOW_SECONDS
            if self._slow_masks >= MAX_SLOW_MASKS or seconds > VERY_SLOW_SECONDS:
                self.lower_priority(SLOW_NICENESS)
            matcher = self._matchers.get(number)
            if matcher is not None:
                matcher._receive(kind, reply[messages.REPLY.size :], seconds)
        # `end` may have given no reason. Then the reason is the result of `_ending`.
        if self._ending is not None and (self._end_reason or self._ending.done()):
            error = self._end_reason or self._ending.result()
            for matcher in self._matchers.values():
                matcher._fail(error)

    def end(self, reason: VLoraError | None = None) -> Future[VLoraError]:
        """End the process, and return a future of an error that says why it ended.

        The answers that need the process end with `reason`, or else with that error.
        """
        if self._ending is None:
            self._end_reason = reason
            self._connection.close()
            self._ending = self._stop(self.process)
        return self._ending

    @property
    def ended(self) -> bool:
        return self._ending is not None

    def _close(self, number: int) -> None:
        if self._matchers.pop(number, None) is not None and self._ending is None:
            self._request(messages.CLOSE, number, 0)

    def _request(self, kind: bytes, number: int, value: int) -> None:
        if self._ending is not None:
            return
        try:
            packet = messages.REQUEST.pack(kind, number, value)
            self._send(packet, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            # The process has ended, or its queue is full because of a slow mask.
            self.end()

    def _send(self, data: bytes, flags: int = socket.MSG_NOSIGNAL) -> None:
        self._connection.send(data, flags)


def error_of(exit_code: int | None, seconds: float, memory: int) -> VLoraError:
    """Return the error of answers whose process ended with this code, or None if unknown."""
    if exit_code is None:
        return Unavailable("the server is shutting down")
    if exit_code == OUT_OF_TIME:
        return InvalidArgument(
            f"'structured_outputs' needs more than {seconds:g} s of processor time at once; the"
            f" limit is {seconds:g} ('max_grammar_seconds')"
        )
    if exit_code == -signal.SIGKILL:
        return Unavailable("the process of a grammar was ended because it was too slow; try again")
    if exit_code >= 0 and exit_code != OUT_OF_MEMORY:
        return Internal(f"the process of a grammar ended unexpectedly, with {exit_code}")
    return InvalidArgument(
        f"'structured_outputs' needs more than {memory} bytes of memory, or is nested too deeply;"
        f" the limit is {memory} ('max_grammar_memory')"
    )
