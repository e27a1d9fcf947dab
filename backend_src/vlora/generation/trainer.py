"""Training and evaluation of attempts with PEFT and accelerate.

**Invariant:** all random numbers depend only on the run's seed and the attempt's number, so that an
attempt that was killed is repeated exactly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from vlora.errors import InvalidArgument
from vlora.generation.examples import Example, Splits
from vlora.generation.fusion import Attempt, Goals, Packed, broken_promises, goals_of
from vlora.generation.learner import Base, Learner, Row
from vlora.generation.metrics import METRICS
from vlora.generation.spec import Item, PackingOptions, Spec, Training

WARMUP_STEPS = 20
FINAL_RATE = 0.05  # Learning rate at the end of an attempt, as a share of the maximum.
COOLING_SHARE = 0.2  # Share of `max_steps` over which the rate falls if an attempt ends early.
# Learning rate with which a further round of an attempt begins, as a share of the maximum.
RESTART_RATE = 0.5
AVERAGE_DECAY = 0.97


def make_accelerator(training: Training) -> Accelerator:
    """Return accelerate's object. Raises InvalidArgument for a precision that cannot be used."""
    precision = training.mixed_precision
    if precision == "auto":
        precision = "bf16" if _bf16_is_fast() else "no"
    refused = f"training.mixed_precision '{precision}' cannot be used here"
    # accelerate accepts fp16 without a GPU if its state is new, and only fails later.
    if precision == "fp16" and not torch.cuda.is_available():
        raise InvalidArgument(f"{refused}: it needs a GPU; use 'auto'")
    try:
        return Accelerator(mixed_precision=precision)
    except ValueError as error:
        raise InvalidArgument(f"{refused}: {error}; use 'auto'") from error


def _bf16_is_fast() -> bool:
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported())
    instructions = torch.cpu.get_capabilities()
    return any(instructions.get(name) for name in ("avx512_bf16", "amx_bf16", "amx_tile"))


class WeightAverage:
    """Exponential moving average of the trained weights, which is evaluated and saved.

    With a high learning rate, the weights fluctuate around a better point, close to their average.
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._values = [weight.detach().clone() for weight in weights]
        self._steps = 0

    def add(self, weights: Sequence[torch.Tensor]) -> None:
        """Include the weights after a step in the average."""
        self._steps += 1
        # The first steps have equal weights.
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

    A round of `steps` steps consists of a linear warm-up and a cosine decay to FINAL_RATE. It may
    end early, with a short linear decay. Another round may follow, which starts at a lower rate.
    """

    def __init__(self, steps: int) -> None:
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


EXAMPLES = 64  # Number of training examples of each item from which its gradient is computed.
# Length of a sketch, the compressed gradient. The error of a cosine is about 1 / √BUCKETS.
BUCKETS = 1 << 16
EVALUATION_ROWS = 64
MAX_GRADIENT_NORM = 1.0


@dataclass(frozen=True)
class Progress:
    """Progress of an attempt with an item, or with the items of merged adapters.

    adapter: number of the adapter that is trained; None for a new one.
    scores: accuracy of each item at the last evaluation.
    """

    item: str
    adapter: int | None
    step: int
    max_steps: int
    loss: float
    scores: Mapping[str, float]


class PeftTrainer:
    """Trains and evaluates attempts. The weights of attempt N are in `work/attempt-N`."""

    def __init__(
        self,
        spec: Spec,
        options: PackingOptions,
        splits: Mapping[str, Splits],
        work: Path,
        accelerator: Accelerator,
        report: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self.spec = spec
        self.options = options
        self.splits = splits
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
        """Train as `fusion.Trainer.train` describes, until the scores no longer improve."""
        started = time.monotonic()
        items = [*self._items(onto.items if onto else ()), item]
        with self._learner(items, self._seed(version)) as learner:
            if onto is not None:
                learner.load(self.folder(onto.version))
            number = onto.number if onto else None
            scores, steps = self._run(learner, items, item.name, number, version)
            self._save(learner, version)
        return Attempt(version, scores, steps, round(time.monotonic() - started, 1))

    def merge(self, first: Packed, second: Packed, version: int, *, train: bool) -> Attempt:
        """Merge two adapters as `fusion.Trainer.merge` describes, with weight 1 each."""
        started, steps = time.monotonic(), 0
        items = self._items((*first.items, *second.items))
        with self._learner(items, self._seed(version)) as learner:
            folders = self.folder(first.version), self.folder(second.version)
            learner.load_merged(folders, self.options.merge)
            scores = self.evaluate(learner, items, "validation")
            if train and broken_promises(self.goals, scores):
                scores, steps = self._run(learner, items, None, first.number, version)
            self._save(learner, version)
        return Attempt(version, scores, steps, round(time.monotonic() - started, 1))

    def _items(self, names: Iterable[str]) -> list[Item]:
        return [self.spec.item(name) for name in names]

    @contextmanager
    def _learner(self, items: Sequence[Item], seed: int) -> Iterator[Learner]:
        learner = Learner(self.base, self.spec.training, self.labels(items), seed)
        try:
            yield learner
        finally:
            learner.release()

    def _save(self, learner: Learner, version: int) -> None:
        if self._accelerator.is_main_process:
            learner.save(self.folder(version))
        self._accelerator.wait_for_everyone()

    def labels(self, items: Sequence[Item]) -> list[str]:
        """Return the labels of the head that these items share, in a fixed order."""
        splits = [self.splits[item.name] for item in items if item.head]
        examples = [one for part in splits for one in (*part.train, *part.validation, *part.test)]
        return sorted({example.answer for example in examples})

    def _run(
        self,
        learner: Learner,
        items: Sequence[Item],
        new: str | None,
        adapter: int | None,
        version: int,
    ) -> tuple[dict[str, float], int]:
        """Train until the promises are kept. Return the best weights' scores, and the steps."""
        training = self.spec.training
        weights = [weight for weight in learner.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=training.learning_rate, weight_decay=0.0)
        model, optimizer = self._accelerator.prepare(learner, optimizer)
        rows = {one.name: self._rows(one, learner) for one in items}
        best: tuple[float, dict[str, float], list[torch.Tensor]] | None = None
        scores: dict[str, float] = {}
        average = WeightAverage(weights)
        schedule, restarts = Schedule(training.max_steps), training.restarts
        name = new or " with ".join(one.name for one in items)
        failed = step = 0
        while True:
            rate = training.learning_rate * schedule.rate(step)
            loss = self._step(model, optimizer, rate, self._draw(rows, new, scores, version, step))
            step += 1
            average.add(weights)
            if step % training.evaluate_every and step < schedule.end:
                continue
            with average.applied(weights):
                scores = self.evaluate(learner, items, "validation")
            self._report(Progress(name, adapter, step, schedule.end, float(loss), scores))
            slack = min(scores[one.name] - self.goals[one.name].accuracy for one in items)
            failed += 1
            if best is None or slack > best[0]:
                best, failed = (slack, scores, average.values()), 0
            # An attempt that nearly keeps its promises continues from its best weights.
            nearly = [self.goals[name].nearly_reached(score) for name, score in best[1].items()]
            go_on = restarts and all(nearly)
            if not broken_promises(self.goals, scores) or (step == schedule.end and not go_on):
                break
            if step == schedule.end:
                restarts, failed = restarts - 1, 0
                schedule.restart(step)
                assign(weights, best[2])
                average.restart(best[2])
            # The short decay at an early end often raises the scores enough. An attempt with a new
            # adapter is not ended early, because it is the last one for its item.
            elif adapter is not None and not schedule.cooling and failed >= training.patience:
                schedule.end_early(step)
        assign(weights, best[2])
        return best[1], step

    def _rows(self, item: Item, learner: Learner) -> list[Row]:
        labels = learner.labels if item.head else ()
        return [self.base.row(item, example, labels) for example in self.splits[item.name].train]

    def _step(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rate: float, rows: list[Row]
    ) -> torch.Tensor:
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = rate
        with self._accelerator.autocast():
            loss: torch.Tensor = model(self.base.batches(rows))
        optimizer.zero_grad()
        self._accelerator.backward(loss)
        self._accelerator.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        return loss.detach()

    def _draw(
        self,
        rows: Mapping[str, Sequence[Row]],
        new: str | None,
        scores: Mapping[str, float],
        version: int,
        step: int,
    ) -> list[Row]:
        shares = row_shares(self.goals, self.options, new, tuple(rows), scores)
        process = self._accelerator.process_index
        rng = np.random.default_rng([self.spec.seed, version, step, process])
        size = self.spec.training.batch_size
        drawn = rng.choice(len(shares), size, p=np.array(list(shares.values())))
        parts = [rows[name] for name in np.array(list(shares))[drawn]]
        return [part[int(rng.integers(len(part)))] for part in parts]

    def evaluate(self, learner: Learner, items: Sequence[Item], split: str) -> dict[str, float]:
        """Return the accuracy of each item on a split, `validation` or `test`."""
        learner.eval()
        return {
            item.name: self._score(learner, item, getattr(self.splits[item.name], split))
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
        """Return the accuracy of the base model for each item. Its LM head answers all items."""
        headless = [item.model_copy(update={"head": False}) for item in items]
        with self._learner(headless, self.spec.seed) as learner:
            return self.evaluate(learner, headless, split)

    def packed_scores(self, adapter: Packed, split: str) -> dict[str, float]:
        """Return the accuracy of a packed adapter's items on a split."""
        items = self._items(adapter.items)
        with self._learner(items, self.spec.seed) as learner:
            learner.load(self.folder(adapter.version))
            return self.evaluate(learner, items, split)

    def compare(self) -> None:
        """Store the cosine of the gradients of each two items as their similarity."""
        # A small training step on item b with learning rate η changes the loss of item a by
        # -η gₐ·g_b to first order, where g is the gradient with respect to the adapter's weights.
        # So the cosine estimates whether training both in one adapter helps. Li et al. (ACL 2025,
        # "Efficient Ensemble for Fine-tuning Language Models on Multiple Datasets") do the same.
        with self._learner((), self.spec.seed) as learner:
            sketches = {
                item.name: _sketch(learner, item, self.splits[item.name], self.spec.seed)
                for item in self.spec.items
            }
        self.similarities = {
            name: {
                other: round(float(torch.cosine_similarity(sketch, theirs, dim=0)), 6)
                for other, theirs in sketches.items()
                if other != name
            }
            for name, sketch in sketches.items()
        }

    def _seed(self, version: int) -> int:
        return self.spec.seed * 1_000_003 + version


def row_shares(
    goals: Goals,
    options: PackingOptions,
    new: str | None,
    names: Sequence[str],
    scores: Mapping[str, float],
) -> dict[str, float]:
    """Return the share of each item in the batches of an attempt, which sum up to 1.

    new: name of the item that is added; None if two adapters are merged.
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


def _sketch(learner: Learner, item: Item, splits: Splits, seed: int) -> torch.Tensor:
    """Return the count sketch of an item's gradient, [BUCKETS]."""
    # The gradient of every weight is added, with a random sign, to a random bucket. Sketches with
    # the same seed preserve inner products in expectation.
    step = max(1, len(splits.train) // EXAMPLES)
    rows = [learner.base.row(item, example, ()) for example in splits.train[::step][:EXAMPLES]]
    learner.zero_grad()
    learner(learner.base.batches(rows)).backward()
    generator = torch.Generator().manual_seed(seed)
    sketch = torch.zeros(BUCKETS)
    for weight in learner.parameters():
        if weight.requires_grad and weight.grad is not None:
            gradient = weight.grad.flatten().float().cpu()
            buckets = torch.randint(BUCKETS, gradient.shape, generator=generator)
            signs = torch.randint(2, gradient.shape, generator=generator) * 2 - 1
            sketch.index_add_(0, buckets, gradient * signs)
    return sketch
