"""Training and evaluation of attempts with PEFT and accelerate.

All random numbers depend only on the run's seed and the attempt's number, so that an attempt that
was killed is repeated exactly.
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
from vlora.generation.fusion import Attempt, Goals, Packed, broken_promises, goals_of
from vlora.generation.learner import Base, Learner, Row
from vlora.generation.metrics import METRICS
from vlora.generation.optimization import Schedule, WeightAverage, assign
from vlora.generation.spec import Item, PackingOptions, Spec

EVALUATION_ROWS = 64
MAX_GRADIENT_NORM = 1.0


@dataclass(frozen=True)
class Progress:
    """Progress of an attempt, for a progress bar.

    item: name of the item that is added, or names of the items of merged adapters.
    adapter: number of the adapter that is trained; None for a new one.
    step, max_steps: number of steps so far, and maximum number of steps.
    loss: present training loss.
    scores: accuracy of each item at the last evaluation.
    """

    item: str
    adapter: int | None
    step: int
    max_steps: int
    loss: float
    scores: Mapping[str, float]


class PeftTrainer:
    """Trains and evaluates attempts. The weights of attempt N are in the folder `work/attempt-N`.

    splits: examples of each item.
    report: called after each evaluation.
    """

    def __init__(
        self,
        spec: Spec,
        options: PackingOptions,
        splits: Mapping[str, Splits],
        work: Path,
        accelerator: Accelerator,
        report: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self._spec = spec
        self._options = options
        self._splits = splits
        self._work = work
        self.goals = goals_of(spec, {name: len(part.validation) for name, part in splits.items()})
        self.similarities: Mapping[str, Mapping[str, float]] = {}
        self._report = report
        self._accelerator = accelerator
        self.base = Base(
            spec.base,
            spec.training.feature_cache_mib,
            self._accelerator.device,
            fast_attention=self._accelerator.mixed_precision == "no",
        )

    def folder(self, version: int) -> Path:
        return self._work / f"attempt-{version}"

    def similarity(self, item: Item, others: Sequence[str]) -> float:
        """Return the mean similarity of an item to others; 0 if none was computed."""
        own = self.similarities.get(item.name, {})
        return sum(own.get(other, 0.0) for other in others) / len(others)

    def train(self, item: Item, onto: Packed | None, version: int) -> Attempt:
        """Train as `fusion.Trainer.train` describes.

        Training ends when all promises are kept, or when the scores no longer improve.
        """
        started = time.monotonic()
        training = self._spec.training
        items = [self._spec.item(name) for name in (onto.items if onto else ())] + [item]
        learner = Learner(self.base, training, self.labels(items), self._seed(version))
        try:
            if onto is not None:
                learner.load(self.folder(onto.version))
            number = onto.number if onto else None
            attempt = self._run(learner, items, item.name, number, version)
            if self._accelerator.is_main_process:
                learner.save(self.folder(version))
            self._accelerator.wait_for_everyone()
        finally:
            learner.release()
        scores, steps = attempt
        return Attempt(version, scores, steps, round(time.monotonic() - started, 1))

    def merge(self, first: Packed, second: Packed, version: int, *, train: bool) -> Attempt:
        """Merge two adapters as `fusion.Trainer.merge` describes, by PEFT's `add_weighted_adapter`
        with weight 1 each.

        train: whether to train the merged weights on all items if a promise is broken.
        """
        started = time.monotonic()
        items = [self._spec.item(name) for name in (*first.items, *second.items)]
        learner = Learner(self.base, self._spec.training, self.labels(items), self._seed(version))
        steps = 0
        try:
            folders = self.folder(first.version), self.folder(second.version)
            learner.load_merged(folders, self._options.merge)
            scores = self.evaluate(learner, items, "validation")
            if train and broken_promises(self.goals, scores):
                scores, steps = self._run(learner, items, None, first.number, version)
            if self._accelerator.is_main_process:
                learner.save(self.folder(version))
            self._accelerator.wait_for_everyone()
        finally:
            learner.release()
        return Attempt(version, scores, steps, round(time.monotonic() - started, 1))

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
        items: Sequence[Item],
        new: str | None,
        adapter: int | None,
        version: int,
    ) -> tuple[dict[str, float], int]:
        """Train until the promises are kept. Returns the scores of the best weights, and the number
        of steps.

        new: name of the item that joins the others; None if two adapters are merged.
        adapter: number of the adapter whose weights are trained; None for a new adapter.

        An attempt that makes no progress for `patience` evaluations ends with a short decay of the
        learning rate, which often raises the scores enough. An attempt with a new adapter is not
        ended for this reason, because it is the last attempt for its item. An attempt that nearly
        keeps its promises at the end continues from its best weights, up to `restarts` times.
        """
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
        shares = row_shares(self.goals, self._options, new, tuple(rows), {})
        average = WeightAverage(weights)
        schedule, restarts = Schedule(training.max_steps), training.restarts
        failed = step = 0
        while True:
            model.train()
            for group in optimizer.param_groups:
                group["lr"] = training.learning_rate * schedule.rate(step)
            batches = self.base.batches(self._draw(rows, shares, version, step))
            with self._accelerator.autocast():
                loss = model(batches)
            optimizer.zero_grad()
            self._accelerator.backward(loss)
            self._accelerator.clip_grad_norm_(weights, MAX_GRADIENT_NORM)
            optimizer.step()
            step += 1
            average.add(weights)
            if step % training.evaluate_every and step < schedule.end:
                continue
            with average.applied(weights):
                scores = self.evaluate(learner, items, "validation")
            name = new or " with ".join(one.name for one in items)
            self._report(Progress(name, adapter, step, schedule.end, float(loss.detach()), scores))
            shares = row_shares(self.goals, self._options, new, tuple(rows), scores)
            slack = min(scores[one.name] - self.goals[one.name].accuracy for one in items)
            if best is None or slack > best[0]:
                best = slack, scores, average.values()
                failed = 0
            else:
                failed += 1
            if not broken_promises(self.goals, scores):
                break
            if step == schedule.end:
                if not restarts or not self._nearly_reached(best[1]):
                    break
                restarts -= 1
                failed = 0
                schedule.restart(step)
                assign(weights, best[2])
                average.restart(best[2])
            elif adapter is not None and not schedule.cooling and failed >= training.patience:
                schedule.end_early(step)
        assign(weights, best[2])
        return best[1], step

    def _nearly_reached(self, scores: Mapping[str, float]) -> bool:
        return all(self.goals[name].nearly_reached(score) for name, score in scores.items())

    def _draw(
        self,
        rows: Mapping[str, Sequence[Row]],
        shares: Mapping[str, float],
        version: int,
        step: int,
    ) -> list[Row]:
        """Return the examples of one step.

        The item of each example is drawn with the probability in `shares`.
        """
        process = self._accelerator.process_index
        rng = np.random.default_rng([self._spec.seed, version, step, process])
        size = self._spec.training.batch_size
        drawn = rng.choice(len(shares), size, p=np.array(list(shares.values())))
        parts = [rows[name] for name in np.array(list(shares))[drawn]]
        return [part[int(rng.integers(len(part)))] for part in parts]

    def evaluate(self, learner: Learner, items: Sequence[Item], split: str) -> dict[str, float]:
        """Return the accuracy of each item on a split, `validation` or `test`."""
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
        """Return the accuracy of the base model without adapters for each item. Its LM head answers
        all items.
        """
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


def row_shares(
    goals: Goals,
    options: PackingOptions,
    new: str | None,
    names: Sequence[str],
    scores: Mapping[str, float],
) -> dict[str, float]:
    """Return the share of each item in the batches of an attempt. The sum of the shares is 1.

    new: name of the item that is added; None if two adapters are merged.
    names: names of all items of the attempt, including `new`.
    scores: validation accuracy of each item so far; empty before the first evaluation.
    """
    old = [name for name in names if name != new]
    if new is None:
        even = dict.fromkeys(names, 1 / len(names))
    else:
        replay = options.replay if old else 0.0
        even = {name: replay / len(old) if name in old else 1.0 - replay for name in names}
    missing = {name: max(0.0, goals[name].accuracy - score) for name, score in scores.items()}
    total = sum(missing.values())
    if not total:
        return even
    focus = options.focus
    return {name: (1 - focus) * even[name] + focus * missing[name] / total for name in names}
