"""The drawing of a step's tokens, which a GPU does while the engine goes on."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from vlora import backends
from vlora.engine.request_state import LogitsRow, RequestState
from vlora.kernels import ops
from vlora.memory.device import Device
from vlora.model.draws_gpu import draw_on_gpu
from vlora.model.sampler import MASKED, draw_rows

log = logging.getLogger(__name__)


class StepRows:
    """The rows of logits of a step, and the tokens drawn from them.

    Tokens are drawn for all batchable samplers together. On a GPU, the tokens of all requests
    without a structure are drawn and copied to host memory asynchronously, before the masks of
    structured requests are known.
    """

    def __init__(
        self, logits: torch.Tensor, states: Sequence[RequestState], device: Device
    ) -> None:
        """Start to draw.

        logits: [rows, vocabulary] float32, one row per request of `states`. Rows of structured
            requests whose mask is ready are masked in place by `get`.
        """
        self._logits, self._states = logits, states
        self._early: list[int] = []
        """Rows whose tokens are drawn before it is known whether their logits are finite."""
        columns = list(ops.argmax(logits))
        if backends.backend_of("kernels", logits.device.type) == "gpu":
            width = logits.shape[1]
            early = [
                (row, *state.sampler.parameters(state.sequence.known, width))
                for row, state in enumerate(states)
                if state.sampler.batchable and not state.sampler.greedy and state.matcher is None
            ]
            if early:
                columns.append(draw_on_gpu(logits, early))
            self._early = [row for row, *_ in early]
        self._readback = device.read_back(columns)

    @property
    def waited(self) -> float:
        """Seconds that `get` has waited for the device."""
        return self._readback.waited

    def get(self) -> list[LogitsRow]:
        """Return the rows with their tokens, in the order of the requests.

        If drawing together fails, each request's own sampler draws later. The same holds for
        structured requests whose mask is not ready.
        """
        largest, all_finite, *early = (column.tolist() for column in self._readback.get())
        drawn = dict(zip(self._early, *early, strict=True)) if early else {}
        logits = self._logits
        tokens: list[int | None] = [None] * len(self._states)
        together = []
        for row, (state, token) in enumerate(zip(self._states, largest, strict=True)):
            sampler, matcher = state.sampler, state.matcher
            if not (all_finite[row] and sampler.batchable):
                continue
            if matcher is not None:
                if not matcher.has_mask:
                    continue
                barred = torch.from_numpy(~matcher.mask).to(logits.device)
                with torch.inference_mode():
                    logits[row].masked_fill_(barred, float(MASKED))
                token = int(logits[row].argmax()) if sampler.greedy else token
            if sampler.greedy:
                tokens[row] = token
            elif row in drawn:
                tokens[row] = drawn[row]
            else:
                together.append((row, sampler, state.sequence.known))
        if together:
            try:
                for (row, _, _), token in zip(together, draw_rows(logits, together), strict=True):
                    tokens[row] = token
            except Exception:
                log.exception("drawing %d rows together failed; each is drawn alone", len(together))
        return [
            LogitsRow(finite, token, logits[row].cpu() if token is None else None)
            for row, (finite, token) in enumerate(zip(all_finite, tokens, strict=True))
        ]
