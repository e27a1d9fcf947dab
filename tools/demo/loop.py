"""Training loop of every stage: schedule, progress with remaining time, resumable state."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SAVE_EVERY_SECONDS = 120.0
REPORT_EVERY_SECONDS = 15.0


@dataclass(frozen=True)
class Stage:
    """A stage of training.

    state: file from which an interrupted run resumes.
    warmup: number of steps of linear warm-up.
    clip: maximum norm of the gradient.
    muon: whether the hidden layers' matrices use the optimizer Muon instead of AdamW.
    """

    name: str
    steps: int
    learning_rate: float
    state: Path
    weight_decay: float = 0.01
    warmup: int = 50
    clip: float = 1.0
    muon: bool = False

    def rate(self, step: int) -> float:
        """Return the factor of the learning rate: linear warm-up, then cosine decay to 2 %."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


class Run:
    """State of a stage of training: modules, optimizers, and the number of completed steps."""

    def __init__(
        self,
        stage: Stage,
        modules: dict[str, torch.nn.Module],
        slower: dict[str, float] | None = None,
    ) -> None:
        """Create the state, or load it from the stage's file.

        slower: factor of the learning rate by module name.
        """
        self.stage = stage
        self.modules = modules
        groups: list[dict[str, Any]] = []
        for name, module in modules.items():
            factor = (slower or {}).get(name, 1.0)
            weights = [p for p in module.parameters() if p.requires_grad]
            groups.append({"params": weights, "factor": factor})
        self.optimizers = _optimizers(groups, stage)
        self.weights = [weight for group in groups for weight in group["params"]]
        self.step = 0
        if stage.state.is_file():
            self._load()

    def save(self) -> None:
        """Write the state atomically, so that a killed run can resume."""
        self.stage.state.parent.mkdir(parents=True, exist_ok=True)
        half = self.stage.state.with_suffix(".half")
        state = {
            "step": self.step,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "modules": {name: module.state_dict() for name, module in self.modules.items()},
        }
        torch.save(state, half)
        half.replace(self.stage.state)

    def _load(self) -> None:
        state = torch.load(self.stage.state, weights_only=True)
        for name, module in self.modules.items():
            module.load_state_dict(state["modules"][name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = int(state["step"])

    def train(
        self,
        batches: Iterable[Any],
        loss_of: Callable[[Any], tuple[torch.Tensor, dict[str, float]]],
    ) -> None:
        """Run the remaining steps. `loss_of` returns the loss, and figures to report by name."""
        console = Console()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} {task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        started = saved = reported = time.monotonic()
        first = self.step
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task(
                self.stage.name, total=self.stage.steps, completed=self.step, note=""
            )
            for batch in batches:
                figures = self._take_step(batch, loss_of)
                now = time.monotonic()
                if now - saved > SAVE_EVERY_SECONDS:
                    self.save()
                    saved = now
                if now - reported > REPORT_EVERY_SECONDS or self.step == self.stage.steps:
                    note = " ".join(f"{name}={value:.3f}" for name, value in figures.items())
                    pace = (now - started) / max(1, self.step - first)
                    left = pace * (self.stage.steps - self.step)
                    if not console.is_terminal:
                        print(
                            f"{self.stage.name} {self.step}/{self.stage.steps} {note} "
                            f"({pace:.2f} s a step, {left / 60:.1f} min left)",
                            flush=True,
                        )
                    progress.update(bar, note=note)
                    reported = now
                progress.update(bar, completed=self.step)
        self.save()

    def _take_step(
        self, batch: Any, loss_of: Callable[[Any], tuple[torch.Tensor, dict[str, float]]]
    ) -> dict[str, float]:
        rate = self.stage.learning_rate * self.stage.rate(self.step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["factor"]
            optimizer.zero_grad(set_to_none=True)
        loss, figures = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, self.stage.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        return figures


def _optimizers(groups: list[dict[str, Any]], stage: Stage) -> list[torch.optim.Optimizer]:
    """Return AdamW and, if `stage.muon`, also Muon for the hidden layers' matrices."""
    muon: list[dict[str, Any]] = []
    adam: list[dict[str, Any]] = []
    for group in groups:
        hidden = [p for p in group["params"] if stage.muon and _is_hidden_matrix(p)]
        kept = {id(p) for p in hidden}
        others = [p for p in group["params"] if id(p) not in kept]
        muon.append({"params": hidden, "factor": group["factor"]})
        decay = {True: stage.weight_decay, False: 0.0}
        for is_matrix in (True, False):
            chosen = [p for p in others if (p.dim() >= 2) is is_matrix]
            adam.append(
                {"params": chosen, "factor": group["factor"], "weight_decay": decay[is_matrix]}
            )
    optimizers: list[torch.optim.Optimizer] = []
    if any(group["params"] for group in muon):
        optimizers.append(
            torch.optim.Muon(
                [group for group in muon if group["params"]],
                lr=stage.learning_rate,
                weight_decay=stage.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    rest = [group for group in adam if group["params"]]
    optimizers.append(torch.optim.AdamW(rest, lr=stage.learning_rate, betas=(0.9, 0.97)))
    return optimizers


def _is_hidden_matrix(weight: torch.Tensor) -> bool:
    return weight.dim() == 2 and max(weight.shape) <= 512 and min(weight.shape) >= 64
