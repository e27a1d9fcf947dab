"""`python -m vlora.structured.worker`: the fork server of grammars, and their processes.

Each process compiles one grammar and computes the masks of its answers. The cost of the grammar
library's steps varies by orders of magnitude, so the operating system limits processor time, memory
and stack of each process (decision 86).
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import time
from operator import itemgetter
from pathlib import Path

import llguidance
import numpy as np
from tokenizers import Tokenizer

from vlora import fork_server
from vlora.structured import messages, schema

# llguidance's drawing of an error in an expression.
REGEX_ERROR = re.compile(r"regex parse error:\n *(.*)\n[ ^]*\nerror: (.*)")
# Literals and comments of llguidance's dialect of Lark. Elsewhere, `<` begins a special token.
LITERAL = re.compile(r'"(?:\\.|[^"\\])*"|/(?![/*])(?:\\.|[^/\\\n])+/|(?://|#)[^\n]*', re.DOTALL)
SCHEMA = re.compile(rf"{LITERAL.pattern}|(%json)\s*", re.DOTALL)
OPTIONS = re.compile(r"%llguidance(?!\s*\{\s*\})")  # Options; `{}` only names the dialect.
ENDLESS = "does a rule, or a '$ref', lead only to itself?"
STACK_BYTES = 8 * 1024**2  # A process whose recursion needs more is ended.


def main() -> None:
    given = json.loads(fork_server.given_data())
    tokens = [bytes.fromhex(token) for token in given["tokens"]]
    speller = Speller(Tokenizer.from_str(given["json"]), tokens, given["ends"])
    tokenizer = llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(speller), given["size"], given["ends"]
    )
    fork_server.serve(lambda connection: _Grammar(tokenizer, connection).run())


class Speller:
    """The model's tokens in the form that llguidance expects.

    llguidance's reader of tokenizers never allows tokens like `<box>`, which served models need.

    special_token_ids: tokens that no structure contains.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], ends: list[int]) -> None:
        self._tokenizer = tokenizer
        self._bytes_of = tokens
        self._token_of = {token: index for index, token in enumerate(tokens) if token}
        self._longest = max(map(len, tokens))
        self.eos_token_id = ends[0]
        self.special_token_ids = [index for index, token in enumerate(tokens) if not token]
        self.tokens = [token or b"<%d>" % index for index, token in enumerate(tokens)]

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokenizer's tokens of a text, or the longest ones if those do not spell it."""
        data = text if isinstance(text, bytes) else text.encode()
        # Some tokenizers put a space before a text. After a prefix, they do not.
        for prefix in ("", "\x02"):
            ids = self._tokenizer.encode(prefix + data.decode(), add_special_tokens=False).ids
            for start in range(len(ids) if prefix else 1):
                if self._spells(ids[start:], data):
                    return list(ids[start:])
        return self._longest_tokens(data)

    def _spells(self, ids: list[int], data: bytes) -> bool:
        pieces = [self._bytes_of[token] if token < len(self._bytes_of) else b"" for token in ids]
        return all(pieces) and b"".join(pieces) == data

    def _longest_tokens(self, data: bytes) -> list[int]:
        """Return the longest token at each position, up to a byte at which none can begin."""
        ids: list[int] = []
        while data:
            sizes = range(min(self._longest, len(data)), 0, -1)
            size = next((size for size in sizes if data[:size] in self._token_of), 0)
            if not size:
                break
            ids.append(self._token_of[data[:size]])
            data = data[size:]
        return ids


class _Grammar:
    """The process of one grammar, which answers the engine's requests."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, connection: socket.socket) -> None:
        self._tokenizer = tokenizer
        self._connection = connection
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._prototype: llguidance.LLMatcher | None = None
        self._matchers: dict[int, llguidance.LLMatcher] = {}
        self._mask = np.zeros((tokenizer.vocab_size + 31) // 32, dtype=np.int32)
        self._seconds = 0.0
        size = messages.QUEUED_MASKS * (messages.REPLY.size + self._mask.nbytes)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)

    def run(self) -> None:
        """Answer requests until the engine closes the connection."""
        try:
            while packet := self._connection.recv(messages.REQUEST.size):
                kind, number, value = messages.REQUEST.unpack(packet)
                signal.setitimer(signal.ITIMER_PROF, self._seconds)
                self._handle(kind, number, value)
                signal.setitimer(signal.ITIMER_PROF, 0)
        except ConnectionError:
            os._exit(0)
        except MemoryError:
            os._exit(fork_server.OUT_OF_MEMORY)

    def _handle(self, kind: bytes, number: int, value: int) -> None:
        # While a timer of the process's clock runs, that clock advances only at ticks.
        started = time.thread_time()
        if kind == messages.COMPILE:
            self._compile(value, started)
        elif kind == messages.OPEN:
            assert self._prototype is not None
            self._matchers[number] = self._prototype.deep_copy()
            self._send_mask(number, started)
        elif kind == messages.ADVANCE:
            self._matchers[number].consume_token(value)
            self._send_mask(number, started)
        else:
            self._matchers.pop(number, None)

    def _compile(self, size: int, started: float) -> None:
        text = b""
        while len(text) < size:
            text += self._connection.recv(messages.PACKET_BYTES)
        self._seconds, memory = messages.LIMITS.unpack_from(text)
        _limit_this_process(memory)
        signal.setitimer(signal.ITIMER_PROF, self._seconds)
        kind, content = json.loads(text[messages.LIMITS.size :])
        try:
            self._prototype = llguidance.LLMatcher(
                self._tokenizer, _grammar(kind, content), log_level=0, limits=self._limits
            )
            error = self._prototype.get_error()
        except ValueError as refused:
            error = str(refused)
        except RecursionError:
            error = "the schema is nested too deeply"
        reply = messages.REFUSED if error else messages.COMPILED
        self._reply(reply, 0, started, _one_line(error))

    def _send_mask(self, number: int, started: float) -> None:
        matcher = self._matchers[number]
        if not matcher.is_stopped():
            matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if matcher.is_error():
            self._reply(messages.REFUSED, number, started, _one_line(matcher.get_error()))
        elif matcher.is_stopped():
            self._reply(messages.STOPPED, number, started)
        else:
            self._reply(messages.MASK, number, started, self._mask.tobytes())

    def _reply(self, kind: bytes, number: int, started: float, data: bytes = b"") -> None:
        head = messages.REPLY.pack(kind, number, time.thread_time() - started)
        self._connection.sendall(head + data, socket.MSG_NOSIGNAL)


def _limit_this_process(memory: int) -> None:
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + memory
    for kind, soft in (
        (resource.RLIMIT_AS, limit),
        (resource.RLIMIT_STACK, STACK_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))


def _grammar(kind: str, text: str) -> str:
    if kind == "json":
        return llguidance.LLMatcher.grammar_from_json_schema(schema.prepared(text))
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(text)
    return llguidance.LLMatcher.grammar_from_lark(_prepared_lark(text))


def _prepared_lark(text: str) -> str:
    """Return a grammar, its JSON schemas made ready for the compiler (`schema.prepared`).

    Raises ValueError if the grammar can produce special tokens or sets options, and RecursionError
    for a schema that is nested too deeply.
    """
    if text.lstrip().startswith("{"):
        raise ValueError("a grammar must be Lark, not JSON")
    bare = LITERAL.sub(" ", text)
    if "<" in bare:
        raise ValueError("special tokens such as <[3]> cannot be in a grammar; quote a text")
    if OPTIONS.search(bare):
        raise ValueError("'%llguidance' would replace the server's options; leave it out")
    pieces, end = [], 0
    for found in filter(itemgetter(1), SCHEMA.finditer(text)):
        _, after = json.JSONDecoder().raw_decode(text, found.end())
        pieces += [text[end : found.end()], schema.prepared(text[found.end() : after])]
        end = after
    return "".join(pieces) + text[end:]


def _one_line(message: str) -> bytes:
    if "NoExtensionBias" in message:
        message = f"nothing may follow here; {ENDLESS}"
    if found := REGEX_ERROR.search(message):
        message = f"invalid regex: {found[2]} in /{found[1]}/"
    line = message.replace("<non-verbose/>", "").strip().split("\n")[0]
    return line[: messages.MAX_MESSAGE_CHARACTERS].encode(errors="replace")


if __name__ == "__main__":
    main()
