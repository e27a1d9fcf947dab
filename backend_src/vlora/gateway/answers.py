"""Answers in the form of OpenAI's API, whole or as streams of server-sent events."""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from vlora.gateway.backend import Piece
from vlora.gateway.requests import Ask

DONE = b"data: [DONE]\n\n"

# Placeholder for the text in the JSON of an event. `_text_event` replaces its last occurrence,
# because earlier fields may contain the same word.
TEXT_MARK = "text"


class CompletionWriter:
    """Writes the answer to one request from the pieces that the server sends."""

    def __init__(self, ask: Ask, id: str) -> None:
        self._ask = ask
        self._id = id
        self._created = int(time.time())
        self._started = False
        self._text_offset = 0
        # Counts the characters of an answer whose tokens may be parts of a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._around_text: tuple[bytes, bytes] | None = None
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: str | None = None

    def whole(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """Return the answer of a request that does not stream."""
        pieces = list(pieces)
        text = "".join(piece.text for piece in pieces)
        logprobs = self._logprobs([token for piece in pieces for token in piece.logprobs])
        for piece in pieces:
            self._count(piece)
        content: dict[str, Any] = {"text": text}
        if self._ask.chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        end = {"logprobs": logprobs, "finish_reason": self.finish_reason}
        return {
            **self._head("chat.completion" if self._ask.chat else "text_completion"),
            "choices": [{"index": 0, **content, **end}],
            "usage": self._usage(),
            "vlora": _extra(pieces[-1]),
        }

    def events(self, piece: Piece) -> bytes:
        """Return the events for one piece, with the start or the end of the stream if it has it."""
        self._count(piece)
        if self._started and piece.finish_reason is None and not self._ask.logprobs:
            return self._text_event(piece.text) if piece.text else b""
        chunks = []
        if self._ask.chat and not self._started:
            chunks.append(self._chunk({"role": "assistant", "content": ""}, None, None))
        self._started = True
        if piece.text or self._ask.logprobs:
            logprobs = self._logprobs(piece.logprobs)
            if piece.text or logprobs is not None:
                chunks.append(self._chunk({"content": piece.text}, logprobs, None))
        if piece.finish_reason is not None:
            chunks.append(self._chunk({}, None, piece))
            if self._ask.include_usage:
                head = self._head(self._chunk_kind)
                chunks.append({**head, "choices": [], "usage": self._usage()})
        events = b"".join(map(_event, chunks))
        return events + DONE if piece.finish_reason is not None else events

    def _text_event(self, text: str) -> bytes:
        # All such events of an answer are equal except for the text, so their JSON is made once.
        if self._around_text is None:
            event = _event(self._chunk({"content": TEXT_MARK}, None, None))
            before, _, after = event.rpartition(json.dumps(TEXT_MARK).encode())
            self._around_text = before, after
        before, after = self._around_text
        return b"%b%b%b" % (before, json.dumps(text).encode(), after)

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._ask.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._ask.model,
            "system_fingerprint": None,
        }

    def _chunk(
        self, delta: Mapping[str, str], logprobs: dict[str, Any] | None, last: Piece | None
    ) -> dict[str, Any]:
        content = {"delta": delta} if self._ask.chat else {"text": delta.get("content", "")}
        choice = {
            "index": 0,
            **content,
            "logprobs": logprobs,
            "finish_reason": None if last is None else last.finish_reason,
        }
        chunk = {**self._head(self._chunk_kind), "choices": [choice]}
        if self._ask.include_usage:
            chunk["usage"] = None
        if last is not None:
            chunk["vlora"] = _extra(last)
        return chunk

    def _count(self, piece: Piece) -> None:
        self.prompt_tokens = piece.num_input_tokens or self.prompt_tokens
        self.completion_tokens += piece.num_output_tokens
        if piece.finish_reason is not None:
            self.finish_reason = piece.finish_reason
            self.cached_tokens = piece.details.get("num_cached_tokens", 0)

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def _logprobs(self, tokens: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any] | None:
        top = self._ask.top_logprobs
        if top is None or not tokens:
            return None
        alternatives = [
            sorted(
                (entry for entry in token.values() if entry["rank"] <= top), key=itemgetter("rank")
            )
            for token in tokens
        ]
        sampled = [next(iter(token.values())) for token in tokens]
        if self._ask.chat:
            content = [
                {**_entry(one), "top_logprobs": [_entry(entry) for entry in others]}
                for one, others in zip(sampled, alternatives, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for one in sampled:
            offsets.append(self._text_offset)
            self._text_offset += len(self._decoder.decode(bytes(_bytes(one))))
        return {
            "tokens": [_name(one) for one in sampled],
            "token_logprobs": [one["logprob"] for one in sampled],
            "top_logprobs": [
                {_name(entry): entry["logprob"] for entry in others} for others in alternatives
            ],
            "text_offset": offsets,
        }


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: %b\n\n" % json.dumps(chunk).encode()


def _entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": _name(entry), "logprob": entry["logprob"], "bytes": _bytes(entry)}


def _bytes(entry: Mapping[str, Any]) -> list[int]:
    return entry.get("bytes") or list(entry["decoded_token"].encode())


def _name(entry: Mapping[str, Any]) -> str:
    """Return a token's text; as from OpenAI, the bytes of a part of a character."""
    if "bytes" not in entry:
        return str(entry["decoded_token"])
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry["bytes"])


def _extra(last: Piece) -> dict[str, Any]:
    return {**last.details, **({"scores": last.scores} if last.scores else {})}
