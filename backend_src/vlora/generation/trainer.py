"""Training and evaluation of attempts, by PEFT and accelerate.

Every random number depends on the run's seed and the attempt's number alone, so an attempt that was
killed is repeated exactly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from vlora.generation.examples import Example, Splits
from vlora.generation.fusion import Attempt, Packed, broken_promises
from vlora.generation.learner import Base, Learner, Row
from vlora.generation.metrics import METRICS
from vlora.generation.spec import Item, Options, Spec

WARMUP_STEPS = 20
FINAL_RATE = 0.05
"""Share of the learning rate at the end of the cosine."""
EVALUATION_ROWS = 64
MAX_GRADIENT_NORM = 1.0


@dataclass(frozen=True)
class Progress:
    """Progress of an attempt, for a progress bar. scores: of the last evaluation."""

    item: str
    adapter: int | None
    step: int
    max_steps: int
    loss: float
    scores: Mapping[str, float]


class PeftTrainer:
    """Trainer of attempts; the weights of attempt N are in the folder `work/attempt-N`."""

    def __init__(
        self,
        spec: Spec,
        options: Options,
        splits: Mapping[str, Splits],
        work: Path,
        report: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self._spec = spec
        self._options = options
        self._splits = splits
        self._work = work
        self.similarities: Mapping[str, Mapping[str, float]] = {}
        self._report = report
        self._accelerator = Accelerator(mixed_precision=spec.training.mixed_precision)
        self.base = Base(spec.base, spec.training.feature_cache_mib, self._accelerator.device)

    def folder(self, version: int) -> Path:
        """Return the folder of an attempt's weights."""
        return self._work / f"attempt-{version}"

    def similarity(self, item: Item, others: Sequence[str]) -> float:
        """Return the mean similarity of an item to others; 0 where none was computed."""
        own = self.similarities.get(item.name, {})
        return sum(own.get(other, 0.0) for other in others) / len(others)

    def train(self, item: Item, onto: Packed | None, version: int) -> Attempt:
        """Train as `fusion.Trainer` says, until all promises hold or no progress is made."""
        started = time.monotonic()
        training = self._spec.training
        items = [self._spec.item(name) for name in (onto.items if onto else ())] + [item]
        learner = Learner(self.base, training, self.labels(items), self._seed(version))
        try:
            if onto is not None:
                learner.load(self.folder(onto.version))
            attempt = self._run(learner, item, items, onto, version)
            if self._accelerator.is_main_process:
                learner.save(self.folder(version))
            self._accelerator.wait_for_everyone()
        finally:
            learner.release()
        scores, steps = attempt
        return Attempt(version, scores, steps, round(time.monotonic() - started, 1))

    def merge(self, first: Packed, second: Packed, version: int) -> Attempt:
        """Merge two adapters by PEFT's `add_weighted_adapter`, with weight 1 each."""
        started = time.monotonic()
        items = [self._spec.item(name) for name in (*first.items, *second.items)]
        learner = Learner(self.base, self._spec.training, self.labels(items), self._seed(version))
        try:
            folders = self.folder(first.version), self.folder(second.version)
            learner.load_merged(folders, self._options.merge)
            scores = self.evaluate(learner, items, "validation")
            if self._accelerator.is_main_process:
                learner.save(self.folder(version))
            self._accelerator.wait_for_everyone()
        finally:
            learner.release()
        return Attempt(version, scores, 0, round(time.monotonic() - started, 1))

    def labels(self, items: Sequence[Item]) -> list[str]:
        """Return the labels of the head that these items share, in a fixed order."""
        answers = {
            example.answer
            for item in items
            if item.head
            for part in (self._splits[item.name],)
            for example in (*part.train, *part.validation, *part.test)
        }
        return sorted(answers)

    def _run(
        self,
        learner: Learner,
        item: Item,
        items: Sequence[Item],
        onto: Packed | None,
        version: int,
    ) -> tuple[dict[str, float], int]:
        """Train until the promises hold. Return the scores of the best weights, and the steps."""
        training = self._spec.training
        weights = [weight for weight in learner.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=training.learning_rate, weight_decay=0.0)
        model, optimizer = self._accelerator.prepare(learner, optimizer)
        rows = {
            one.name: [
                self.base.row(one, example, learner.labels if one.head else ())
                for example in self._splits[one.name].train
            ]
            for one in items
        }
        best: tuple[float, dict[str, float], list[torch.Tensor]] | None = None
        failed = step = 0
        while step < training.max_steps and failed < training.patience:
            model.train()
            for group in optimizer.param_groups:
                group["lr"] = training.learning_rate * _rate(step, training.max_steps)
            batch = self.base.batch(self._draw(rows, item.name, version, step))
            with self._accelerator.autocast():
                loss = model(batch)
            optimizer.zero_grad()
            self._accelerator.backward(loss)
            self._accelerator.clip_grad_norm_(weights, MAX_GRADIENT_NORM)
            optimizer.step()
            step += 1
            if step % training.evaluate_every and step < training.max_steps:
                continue
            scores = self.evaluate(learner, items, "validation")
            self._report(
                Progress(
                    item.name,
                    onto.number if onto else None,
                    step,
                    training.max_steps,
                    float(loss.detach()),
                    scores,
                )
            )
            slack = min(scores[one.name] - one.required for one in items)
            if best is None or slack > best[0]:
                best = slack, scores, [weight.detach().clone() for weight in weights]
                failed = 0
            else:
                failed += 1
            if not broken_promises(self._spec, scores):
                break
        assert best is not None
        with torch.no_grad():
            for weight, kept in zip(weights, best[2], strict=True):
                weight.copy_(kept)
        return best[1], step

    def _draw(
        self, rows: Mapping[str, Sequence[Row]], new: str, version: int, step: int
    ) -> list[Row]:
        """Return the rows of one step: of the new item, and a share of those fused before."""
        process = self._accelerator.process_index
        rng = np.random.default_rng([self._spec.seed, version, step, process])
        size = self._spec.training.batch_size
        old = [name for name in rows if name != new]
        replayed = round(size * self._options.replay) if old else 0
        names = [new] * (size - replayed) + [
            str(name) for name in rng.choice(old or [new], replayed)
        ]
        return [rows[name][int(rng.integers(len(rows[name])))] for name in names]

    def evaluate(self, learner: Learner, items: Sequence[Item], split: str) -> dict[str, float]:
        """Return the accuracy of each item on a split: `validation` or `test`."""
        learner.eval()
        return {
            item.name: self._score(learner, item, getattr(self._splits[item.name], split))
            for item in items
        }

    def _score(self, learner: Learner, item: Item, examples: Sequence[Example]) -> float:
        own = examples[self._accelerator.process_index :: self._accelerator.num_processes]
        pairs: list[tuple[str, str]] = []
        for start in range(0, len(own), EVALUATION_ROWS):
            part = own[start : start + EVALUATION_ROWS]
            labels = learner.labels if item.head else ()
            rows = [self.base.row(item, example, labels) for example in part]
            answers = learner.answer(rows, item.task)
            pairs += zip(answers, (example.answer for example in part), strict=True)
        if self._accelerator.num_processes > 1:
            pairs = gather_object(pairs)
        return METRICS[item.metric]([a for a, _ in pairs], [wanted for _, wanted in pairs])

    def base_scores(self, items: Sequence[Item], split: str) -> dict[str, float]:
        """Return the accuracy of the base without adapters, which answers by its LM head."""
        learner = Learner(self.base, self._spec.training, (), self._spec.seed)
        try:
            headless = [item.model_copy(update={"head": False}) for item in items]
            return self.evaluate(learner, headless, split)
        finally:
            learner.release()

    def packed_scores(self, adapter: Packed, split: str) -> dict[str, float]:
        """Return the accuracy of a packed adapter's items on a split."""
        items = [self._spec.item(name) for name in adapter.items]
        learner = Learner(self.base, self._spec.training, self.labels(items), self._spec.seed)
        try:
            learner.load(self.folder(adapter.version))
            return self.evaluate(learner, items, split)
        finally:
            learner.release()

    def _seed(self, version: int) -> int:
        return self._spec.seed * 1_000_003 + version


def _rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate: linear warm-up, then a cosine."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return float(FINAL_RATE + (1 - FINAL_RATE) * (1 + np.cos(np.pi * done)) / 2)
