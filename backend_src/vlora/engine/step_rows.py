"""Sampling of a step's tokens. On a GPU, sampling runs while the engine's thread continues."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from vlora import backends
from vlora.engine.request_state import LogitsRow, RequestState
from vlora.kernels import ops
from vlora.memory.device import Device
from vlora.model.draws_gpu import draw_parameters, draw_placed
from vlora.model.sampler import MASKED, draw_rows

log = logging.getLogger(__name__)


class StepRows:
    """The rows of logits of a step, and the tokens drawn from them.

    The tokens of all requests with a batchable sampler (see `TokenSampler.batchable`) are drawn
    together. On a GPU, the tokens of requests without a structure are drawn and copied to host
    memory asynchronously, before the masks of structured requests are known. The parameters of
    these draws are uploaded together with the inputs of the forward pass.
    """

    def __init__(self, states: Sequence[RequestState], vocabulary: int, device: Device) -> None:
        """Collect the parameters of the draws, before the forward pass.

        states: request of each row, in the order of the rows of logits.
        vocabulary: number of logits of a row.
        """
        self.states, self._device = states, device
        self._early: list[int] = []
        """Rows whose tokens are drawn before it is known whether their logits are finite."""
        self.inputs: list[torch.Tensor] = []
        """Parameters of the draws, in host memory."""
        if backends.backend_of("kernels", device.torch_device.type) == "gpu":
            early = [
                (row, *state.sampler.parameters(state.sequence.known, vocabulary))
                for row, state in enumerate(states)
                if state.sampler.batchable and not state.sampler.greedy and state.matcher is None
            ]
            self._early = [row for row, *_ in early]
            self.inputs = draw_parameters(early)
        self._parameters: Sequence[torch.Tensor] = ()

    def place(self, uploaded: Sequence[torch.Tensor]) -> None:
        """Store the copies of `inputs` that were made on the device."""
        self._parameters = uploaded

    def draw(self, logits: torch.Tensor) -> None:
        """Start to draw the tokens of all rows.

        logits: [rows, vocabulary] float32. Rows of structured requests whose mask is ready are
            masked in place by `get`.
        """
        self._logits = logits
        columns = list(ops.argmax(logits))
        if self._early:
            columns.append(draw_placed(logits, self._parameters))
        self._readback = self._device.read_back(columns)

    @property
    def waited(self) -> float:
        """Seconds that `get` has waited for the device."""
        return self._readback.waited

    def get(self) -> list[LogitsRow]:
        """Return the rows with their tokens, in the order of the requests.

        A row has logits instead of a token if its request's own sampler must draw the token later.
        This is the case if the sampler is not batchable, if the mask of a structured request is not
        ready, or if drawing the rows together failed.
        """
        largest, all_finite, *early = (column.tolist() for column in self._readback.get())
        drawn = dict(zip(self._early, *early, strict=True)) if early else {}
        logits = self._logits
        tokens: list[int | None] = [None] * len(self.states)
        together = []
        for row, (state, token) in enumerate(zip(self.states, largest, strict=True)):
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
