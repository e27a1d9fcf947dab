"""The compiled grammars of an engine, each in a process forked from a server with the tokenizer.

The thread of a request waits until its grammar is compiled. PLACES ordinary grammars are compiled
at the same time, and as many that take long, for which ordinary ones do not wait.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from vlora.config import Limits
from vlora.errors import InvalidArgument, Unavailable, Unsupported, VLoraError
from vlora.fork_server import ForkServer
from vlora.metrics import GrammarCounters
from vlora.structured.grammar import LONG_NICENESS, Grammar, error_of
from vlora.structured.messages import TokenizerData
from vlora.structured.structure import Structure

WORKER = "vlora.structured.worker"

PLACES = 2  # Maximum number of ordinary grammars compiled at once, and of those that take long.
# Processor time above which compiling is long. Ordinary grammars take a hundredth of it.
LONG_SECONDS = 0.1
POLL_SECONDS = 0.02  # Interval of checking whether compiling takes long.
# Time limit of compiling. On a busy machine, it can be reached before `max_grammar_seconds`.
MAX_WAIT_SECONDS = 20.0
MAX_IDLE = 8  # Grammars that are kept while no request uses them.


@dataclass
class _SharedGrammar:
    """A grammar that is compiled or being compiled, and the number of requests that use it."""

    compiled: Future[Grammar] = field(default_factory=Future)
    users: int = 0

    @property
    def grammar(self) -> Grammar | None:
        """The grammar; None if it is being compiled or was refused."""
        done = self.compiled.done() and self.compiled.exception() is None
        return self.compiled.result() if done else None

    @property
    def ended(self) -> bool:
        """True if it was refused, or if its process has ended."""
        grammar = self.grammar
        return self.compiled.done() and (grammar is None or grammar.ended)


class Grammars:
    """Compiles grammars, shares them among requests, and ends their processes. Thread-safe."""

    def __init__(self, tokenizer: Callable[[], TokenizerData], vocabulary: int, limits: Limits):
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._limits = limits
        self.counters = GrammarCounters()
        self._lock = threading.Lock()
        # Entries by structure and tenant, least recently used first.
        self._entries: dict[tuple[Structure, str | None], _SharedGrammar] = {}
        self._regular = threading.Semaphore(PLACES)
        self._long = threading.Semaphore(PLACES)
        self._ends = ThreadPoolExecutor(1, thread_name_prefix="grammar-ends")
        self._server: ForkServer | None = None
        self._closed = False

    def acquire(self, structure: Structure, tenant: str | None = None) -> Grammar:
        """Return the compiled grammar of a structure, to be released. A new one is compiled first.

        tenant: requests of other tenants do not share the grammar.

        Raises InvalidArgument for a structure that is invalid or too expensive, Unsupported if this
        server cannot compile grammars, and Unavailable if too many are in use.
        """
        self.check(structure)
        key = structure, tenant
        with self._lock:
            entry = self._entries.pop(key, None)
            is_new = entry is None or entry.ended
            if entry is None or is_new:
                self._make_room(tenant)
                entry = _SharedGrammar()
            self._entries[key] = entry
            entry.users += 1
        if is_new:
            self._compile_into(entry, structure)
        try:
            return entry.compiled.result()
        except BaseException:
            with self._lock:
                if self._entries.get(key) is entry:
                    del self._entries[key]
            raise

    def release(self, structure: Structure, grammar: Grammar, tenant: str | None = None) -> None:
        with self._lock:
            entry = self._entries.get((structure, tenant))
            if entry is None or entry.grammar is not grammar:
                return  # The grammar has ended and was replaced.
            entry.users -= 1
            if entry.users == 0 and grammar.ended:
                del self._entries[structure, tenant]
            idle = [key for key, other in self._entries.items() if not other.users]
            for key in idle[: max(0, len(idle) - MAX_IDLE)]:
                self._entries.pop(key).compiled.result().end()

    def __len__(self) -> int:
        return len(self._entries)

    def check(self, structure: Structure) -> None:
        """Check a structure before compiling it. Raises Unsupported or InvalidArgument."""
        if importlib.util.find_spec("llguidance") is None:
            raise Unsupported(
                "'structured_outputs' needs the package llguidance, which this server does not"
                " have; install it with: pip install 'vlora[structured]'"
            )
        limit = self._limits.max_grammar_bytes
        if structure.bytes > limit:
            raise InvalidArgument(
                f"'structured_outputs' has {structure.bytes} bytes; the limit is {limit}"
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            server, self._server = self._server, None
            entries = list(self._entries.values())
        for entry in entries:
            if entry.grammar is not None:
                entry.grammar.end()
        if server is not None:
            server.close()
        self._ends.shutdown()

    def _make_room(self, tenant: str | None) -> None:
        """End the least recently used idle grammar at the limit, or raise Unavailable."""
        if self._closed:
            raise Unavailable("the server is shutting down")
        count, limit = len(self._entries), self._limits.max_grammars
        used = [owner for (_, owner), entry in self._entries.items() if entry.users]
        # A tenant may use as many as are left for all others.
        if tenant is not None and (own := used.count(tenant)) >= limit - len(used):
            raise Unavailable(f"the tenant's share of 'max_grammars' is full: {own} structures")
        if count < limit:
            return
        idle = next((key for key, entry in self._entries.items() if not entry.users), None)
        if idle is None:
            raise Unavailable(
                f"{count} different structures are in use; the limit is {limit} ('max_grammars')"
            )
        self._entries.pop(idle).compiled.result().end()

    def _compile_into(self, entry: _SharedGrammar, structure: Structure) -> None:
        try:
            grammar = self._compile(structure)
        except BaseException as error:
            with self._lock:
                self.counters.refused += 1
            entry.compiled.set_exception(error)
            return
        with self._lock:
            self.counters.compiled += 1
            self.counters.compile_seconds += grammar.compile_seconds
        entry.compiled.set_result(grammar)

    def _compile(self, structure: Structure) -> Grammar:
        place = self._regular
        place.acquire()
        try:
            process, connection = self._fork()
            limits = self._limits
            settings = (self._vocabulary, self._stop, limits.max_mask_seconds, self.counters)
            grammar = Grammar(process, connection, *settings)
            deadline = time.monotonic() + MAX_WAIT_SECONDS
            try:
                grammar.start(structure, limits.max_grammar_seconds, limits.max_grammar_memory)
                while not grammar.compiled(POLL_SECONDS):
                    if time.monotonic() > deadline:
                        raise Unavailable(
                            "compiling 'structured_outputs' took more than"
                            f" {MAX_WAIT_SECONDS:g} s; the server is busy"
                        )
                    if place is self._long or grammar.processor_seconds < LONG_SECONDS:
                        continue
                    if not self._long.acquire(blocking=False):
                        raise Unavailable(
                            f"{PLACES} other large grammars are being compiled; try again"
                        )
                    place.release()
                    place = self._long
                    grammar.lower_priority(LONG_NICENESS)
            except BaseException:
                grammar.end()
                raise
            return grammar
        finally:
            place.release()

    def _fork(self) -> tuple[int, socket.socket]:
        with self._lock:
            if self._closed:
                raise Unavailable("the server is shutting down")
            if self._server is None:
                data = json.dumps(asdict(self._tokenizer())).encode()
                self._server = ForkServer(WORKER, {}, data, socket.SOCK_SEQPACKET)
            server = self._server
        try:
            return server.fork()
        except ConnectionError:
            raise Unavailable("the process that compiles grammars cannot be started") from None

    def _stop(self, process: int) -> Future[VLoraError]:
        limits = self._limits

        def stop() -> VLoraError:
            server = self._server
            code = None if server is None else server.stop(process)
            return error_of(code, limits.max_grammar_seconds, limits.max_grammar_memory)

        try:
            return self._ends.submit(stop)
        except RuntimeError:
            ended: Future[VLoraError] = Future()
            ended.set_result(error_of(None, 0.0, 0))
            return ended


def tokenizer_data(
    tokenizer: Any, tokens: Sequence[bytes], size: int, ends: Iterable[int]
) -> TokenizerData:
    """Return the description of a transformers tokenizer, with the bytes of each token.

    size: number of rows of the LM head.
    ends: ids of the tokens that end a text.
    """
    json = tokenizer.backend_tokenizer.to_str()
    return TokenizerData(json, tuple(token.hex() for token in tokens), size, tuple(ends))
