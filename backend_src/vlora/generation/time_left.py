"""Estimate of the remaining time of a generation run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TimeLeft:
    """Estimates the remaining time from the time per step and the steps per item.

    The estimate uses only steps that this process has trained, so it also holds for a run that was
    killed and continued. Before the first item is packed, an item is assumed to take `max_steps`
    steps.

    items: number of items that are not packed yet.
    max_steps: maximum number of steps of an attempt.
    now: present time in seconds.
    packed: number of items that this process has packed.
    steps: number of steps that this process has trained.
    seconds: time of these steps.
    step, limit: number of steps of the present attempt so far, and maximum number.
    steps_of_item: number of steps that the present item has taken in all of its attempts.
    """

    items: int
    max_steps: int
    now: float
    packed: int = 0
    steps: int = 0
    seconds: float = 0.0
    step: int = 0
    limit: int = 0
    steps_of_item: int = 0

    def skip(self, now: float) -> None:
        """Do not count the time since the last call of `skip`, `add` or `pack` as training."""
        self.now = now

    def add(self, step: int, limit: int, now: float) -> None:
        """Count the training up to `step` of the present attempt, which has at most `limit` steps.

        A step that is not higher than the last one belongs to a new attempt.
        """
        trained = step - self.step if step > self.step else step
        self.step, self.limit = step, limit
        self.steps += trained
        self.steps_of_item += trained
        self.seconds += now - self.now
        self.now = now

    def pack(self, items: int, now: float) -> None:
        """Count the present item as packed, if it was trained.

        items: number of items that are not packed yet.
        """
        if self.steps_of_item:
            self.packed += 1
        self.items, self.now = items, now
        self.step = self.limit = self.steps_of_item = 0

    @property
    def estimate(self) -> float | None:
        """Seconds until all items are packed and the present attempt ends; None if no step was
        trained yet.
        """
        if not self.steps:
            return None
        finished = self.steps - self.steps_of_item
        per_item = finished / self.packed if self.packed else self.max_steps
        if self.items:
            steps = self.items * per_item - min(self.steps_of_item, per_item)
        else:  # Adapters are being merged.
            steps = self.limit - self.step
        return steps * self.seconds / self.steps

    def __str__(self) -> str:
        if (seconds := self.estimate) is None:
            return "time left not known yet"
        return f"about {seconds / 60:.0f} min left" if seconds >= 60 else "less than 1 min left"
