"""Conversion of engine outputs to response tensors, in the format of the vLLM backend."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from vlora.request import Output, TokenLogprob
from vlora.serving.codec import Call
from vlora.serving.tensors import Array, strings

MIN_LOGPROB = -9999.0  # Replaces minus infinity, which JSON lacks, as in vLLM's server.


class AnswerWriter:
    """Converts the outputs of one request to its responses.

    If the request streams, every output becomes a response, or, within `interval` seconds after
    one, is sent with a later output. Otherwise the last output becomes the only response.
    """

    def __init__(
        self,
        call: Call,
        task: str,
        interval: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._call = call
        self._task = task
        self._interval = interval
        self._clock = clock
        self._sent_at = -math.inf
        self._text: list[str] = []
        self._num_tokens = 0
        self._logprobs: list[dict[str, dict[str, object]]] | None = None
        self._cumulative = 0.0
        # `cumulative_logprob` needs log probabilities, too. As in vLLM, they are listed in the
        # response only if the request asks for them.
        self._lists_logprobs = call.sampling.get("logprobs") is not None

    def write(self, output: Output) -> dict[str, Array] | None:
        """Return the next response, or None if the content of `output` is sent later."""
        self._collect(output)
        if not output.finished:
            if not self._call.stream:
                return None
            if self._interval:
                now = self._clock()
                if now < self._sent_at + self._interval:
                    return None
                self._sent_at = now
        response = self._response(output)
        self._text.clear()
        self._num_tokens = 0
        self._logprobs = None
        return response

    def _collect(self, output: Output) -> None:
        self._text.append(output.text or ("" if output.head is None else output.head.best))
        self._num_tokens += len(output.token_ids)
        if output.logprobs is None:
            return
        self._cumulative += sum(_finite(token[0].logprob) for token in output.logprobs)
        if self._lists_logprobs:
            self._logprobs = (self._logprobs or []) + [_listed(token) for token in output.logprobs]

    def _response(self, output: Output) -> dict[str, Array]:
        requested = self._call.outputs
        text = "".join(self._text)
        if self._call.prepend_input:
            text = self._call.text + text
        tensors = {"text_output": strings([text])}
        if "finish_reason" in requested:
            tensors["finish_reason"] = strings([str(output.finish_reason)])
        if "num_input_tokens" in requested:
            tensors["num_input_tokens"] = np.array([output.num_input_tokens], dtype=np.uint32)
        if "num_output_tokens" in requested:
            tensors["num_output_tokens"] = np.array([self._num_tokens], dtype=np.uint32)
        if "logprobs" in requested:
            tensors["logprobs"] = strings([json.dumps(self._logprobs, allow_nan=False)])
        if "cumulative_logprob" in requested:
            tensors["cumulative_logprob"] = np.array([self._cumulative], dtype=np.float32)
        metadata = self._call.metadata if output.finished else None
        if metadata is not None or "metadata" in requested:
            tensors["metadata"] = strings([metadata or b""])
        head = output.head
        if head is not None or "head" in requested:
            tensors["head_scores"] = np.array(head.scores if head else (), dtype=np.float32)
            tensors["head_labels"] = strings(head.labels if head else ())
        if output.finished:
            tensors["details"] = strings([self._details(output)])
        return tensors

    def _details(self, output: Output) -> str:
        adapter = None
        if output.adapter is not None:
            adapter = {"name": output.adapter, "digest": output.adapter_digest}
        words = output.word_probabilities
        return json.dumps(
            {
                "task": self._task,
                "adapter": adapter,
                "num_cached_tokens": output.num_cached_tokens,
                "timings": {name: round(t, 6) for name, t in output.timings._asdict().items()},
                "modes": dict(output.modes),
                **({"word_probabilities": words} if words else {}),
            },
            allow_nan=False,
        )


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def _listed(token: Sequence[TokenLogprob]) -> dict[str, dict[str, object]]:
    return {
        str(entry.token_id): {
            "logprob": _finite(entry.logprob),
            "rank": entry.rank,
            "decoded_token": entry.text,
            # vLLM's keys do not say which part of a character a token is.
            **({} if entry.text.encode() == entry.content else {"bytes": list(entry.content)}),
        }
        for entry in token
    }
