"""Precision, learning rate and averaging of the weights in one training attempt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from accelerate import Accelerator

from vlora.errors import InvalidArgument
from vlora.generation.spec import Training

WARMUP_STEPS = 20
FINAL_RATE = 0.05
"""Learning rate at the end of an attempt, as a share of the maximum."""
COOLING_SHARE = 0.2
"""Share of `max_steps` over which the rate falls if an attempt ends early."""
RESTART_RATE = 0.5
"""Learning rate with which a further round of an attempt begins, as a share of the maximum."""
AVERAGE_DECAY = 0.97


def make_accelerator(training: Training) -> Accelerator:
    """Return accelerate's object for this process, with the precision in the settings.

    Raises InvalidArgument for a precision that the device cannot use.
    """
    precision = training.mixed_precision
    if precision == "auto":
        precision = "bf16" if _bf16_is_fast() else "no"
    try:
        return Accelerator(mixed_precision=precision)
    except ValueError as error:  # Such as fp16 on a CPU.
        raise InvalidArgument(
            f"training.mixed_precision '{precision}' cannot be used here: {error}; use 'auto'"
        ) from error


def _bf16_is_fast() -> bool:
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported())
    instructions = torch.cpu.get_capabilities()
    return any(instructions.get(name) for name in ("avx512_bf16", "amx_bf16", "amx_tile"))


class WeightAverage:
    """Exponential moving average of the trained weights.

    The average is evaluated and saved instead of the weights. With a high learning rate, the
    weights fluctuate around a better point, to which their average is close.
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._values = [weight.detach().clone() for weight in weights]
        self._steps = 0

    def add(self, weights: Sequence[torch.Tensor]) -> None:
        """Include the weights after a step in the average.

        The first steps have equal weights. Later, a step has the weight 1 - AVERAGE_DECAY.
        """
        self._steps += 1
        share = max(1 - AVERAGE_DECAY, 1 / self._steps)
        for value, weight in zip(self._values, weights, strict=True):
            value.lerp_(weight.detach(), share)

    def restart(self, values: Sequence[torch.Tensor]) -> None:
        """Forget all steps and start from these values."""
        self._values = [value.clone() for value in values]
        self._steps = 0

    def values(self) -> list[torch.Tensor]:
        return [value.clone() for value in self._values]

    @contextmanager
    def applied(self, weights: Sequence[torch.Tensor]) -> Iterator[None]:
        """Set the weights to their average within the block, and restore them afterwards."""
        kept = [weight.detach().clone() for weight in weights]
        assign(weights, self._values)
        try:
            yield
        finally:
            assign(weights, kept)


def assign(weights: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for weight, value in zip(weights, values, strict=True):
            weight.copy_(value)


class Schedule:
    """Learning rate of an attempt as a share of the maximum, and the step at which it ends.

    A round consists of a linear warm-up and a cosine decay to FINAL_RATE. A round may end early,
    with a short linear decay. Another round may follow, which starts at a lower rate.
    """

    def __init__(self, steps: int) -> None:
        """Begin the first round.

        steps: number of steps in a round.
        """
        self._steps = steps
        self._start = 0
        self._peak = 1.0
        self._cooling: int | None = None
        self.end = steps

    @property
    def cooling(self) -> bool:
        """True if the round is ending early."""
        return self._cooling is not None

    def rate(self, step: int) -> float:
        """Return the learning rate in a step, as a share of the maximum. Steps count from 0."""
        if self._cooling is None:
            return self._cosine(step)
        left = 1 - (step - self._cooling) / self._cooling_steps
        falling = FINAL_RATE + (self._cosine(self._cooling) - FINAL_RATE) * left
        return min(self._cosine(step), falling)

    def end_early(self, step: int) -> None:
        """Decay the rate linearly from `step` on, so that the round ends soon."""
        self._cooling = step
        self.end = min(self.end, step + self._cooling_steps)

    def restart(self, step: int) -> None:
        """Begin another round at `step`."""
        self._start, self._peak, self._cooling = step, RESTART_RATE, None
        self.end = step + self._steps

    @property
    def _cooling_steps(self) -> int:
        return max(1, round(COOLING_SHARE * self._steps))

    def _cosine(self, step: int) -> float:
        done = step - self._start
        if done < WARMUP_STEPS:
            return self._peak * (done + 1) / WARMUP_STEPS
        share = (done - WARMUP_STEPS) / max(1, self._steps - WARMUP_STEPS)
        wave = (1 + float(np.cos(np.pi * share))) / 2
        return FINAL_RATE + (self._peak - FINAL_RATE) * wave
