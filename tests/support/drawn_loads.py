"""Random loads of an engine whose forward pass computes nothing and takes simulated time.

All else is real: admission, scheduler, policies, page pool, tiers of adapters, merges.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from vlora.adapters.catalog import stamp_of
from vlora.config import Options
from vlora.device.device import UploadedPart
from vlora.engine import memory
from vlora.engine.engine import Engine
from vlora.engine.plan import StepPlan
from vlora.engine.policies.base import make_policy
from vlora.engine.sequence import Sequence as EngineSequence
from vlora.errors import Cancelled, InvalidArgument, NotFound, VLoraError
from vlora.ids import BASE
from vlora.memory.kv_cache import pages_for
from vlora.model.chunk import Chunk
from vlora.model.runner import StepResult
from vlora.request import Output, Request
from vlora.sampling import SamplingParams

BOUNDED = ("unmerge_only", "paper", "predictive")
"""Policies that bound the wait of requests (decision 41)."""
IDLE_SECONDS = 0.05
"""Seconds that pass while nothing can be computed."""
LARGE, LARGE_RUN = "all-r8", 13
"""The largest adapter, and the number of its pages."""
INVOCATION = "it"
"""Word of one token in every prompt that is long enough. It invokes an activated adapter."""
MAX_STEPS = 20_000
"""Number of steps after which a load counts as stuck."""


@dataclass(frozen=True)
class Shape:
    """Random sizes and kinds of a load.

    arrivals: number of requests.
    queue: number of requests in flight that new ones maintain, or None for bursts of arrivals.
    prompt, answer: maximum numbers of tokens.
    step, row: seconds per step, and per row of it. merge: seconds per switch.
    plentiful: whether pages and rows suffice for as many requests as there are slots.
    adapters: adapters that requests ask for initially.
    """

    arrivals: int
    queue: int | None
    prompt: int
    answer: int
    step: float
    row: float
    merge: float
    plentiful: bool
    adapters: tuple[str | None, ...]
    priorities: bool
    deadlines: bool
    streams: bool
    aborts: bool
    hot_changes: bool


@dataclass
class Tally:
    """Counts over all loads, for a report."""

    loads: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    steps: int = 0
    computed: int = 0
    possible: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0
    evictions: int = 0
    held_back: int = 0
    closest: float = 0.0
    """Largest wait before the first service, as a share of its bound."""

    def __str__(self) -> str:
        ended = ", ".join(f"{count} {how}" for how, count in sorted(self.ended.items()))
        return (
            f"{self.loads.total()} loads ({dict(self.loads)}), {self.requests} requests ({ended}),"
            f" {self.steps} steps, {self.preemptions} preemptions, {self.evictions} evictions,"
            f" newer requests held back in {self.held_back} steps; batches"
            f" {self.computed / max(1, self.possible):.3f} full; longest wait"
            f" {self.closest:.2f} of its bound"
        )


def draw_engine(
    draw: random.Random, checkpoint: Path, folders: Mapping[str, Path]
) -> tuple[Engine, Options, Shape]:
    """Return an engine with random limits, its options, and a load that fits it.

    folders: adapters by kind. A hot change gives a name the adapter of another kind.
    """
    # The run of a rare adapter must find its place among the growing pages of other requests.
    rare = draw.random() < 0.25
    sequences, block = draw.randint(3 if rare else 1, 8), draw.choice([4] if rare else [1, 4, 16])
    queue = sequences + draw.randint(1, 6) if rare or draw.random() < 0.5 else None
    prompt, answer = draw.randint(3, 40), draw.randint(1, 30 if rare or queue is None else 8)
    plentiful = not rare and draw.random() < 0.3
    largest = pages_for(prompt + answer, block)
    pages = largest * (sequences + 1 if plentiful else draw.randint(1, sequences))
    pages = max(largest, LARGE_RUN) + LARGE_RUN if rare else pages
    rows = max(sequences, sequences * prompt if plentiful or rare else draw.randint(8, 60))
    kinds = [draw.choice(sorted(folders)) for _ in range(draw.randint(1, 5))]
    names = {f"a{i}": str(folders[kind]) for i, kind in enumerate([LARGE] if rare else kinds)}
    used = draw.choice([(None,), (None, *names), tuple(names)])
    used = (*[None] * 9, *names) if rare else used
    options = Options(
        model=checkpoint,
        block_size=block,
        kv_cache_tokens=block * pages,
        max_model_len=max(2, min(prompt + answer, block * pages)),
        max_num_seqs=sequences,
        max_batch_requests=draw.choice([None, draw.randint(1, sequences)]),
        max_num_batched_tokens=rows,
        max_wait_seconds=draw.choice([0.5, 2.0, 5.0]),
        adapter_pool_bytes="auto" if plentiful else 0 if rare else draw.choice([0, 540_000, 10**6]),
        merging=draw.choice(["out_of_place", "out_of_place", "in_place", "off"]),
        enable_prefix_caching=draw.random() < 0.5,
    )
    shape = Shape(
        arrivals=draw.randint(5, 50) if queue is None else 12 * queue,
        queue=queue,
        prompt=prompt,
        answer=answer,
        step=draw.choice([0.01, 0.05, 0.1]),
        row=draw.choice([0.0, 0.001]),
        merge=draw.choice([0.0, 0.05]),
        plentiful=plentiful,
        adapters=used,
        **{
            kind: draw.random() < 0.5
            for kind in ("priorities", "deadlines", "streams", "aborts", "hot_changes")
        },
    )
    return Engine(options, names), options, shape


class Load:
    """One load of an engine under one policy."""

    def __init__(
        self,
        engine: Engine,
        options: Options,
        shape: Shape,
        folders: Mapping[str, Path],
        seed: str,
        tally: Tally,
    ) -> None:
        self.engine, self.options, self.shape, self.tally = engine, options, shape, tally
        self.draw = random.Random(seed)
        self.seed = seed
        self.now = 0.0
        self._stamped = {kind: (path, stamp_of(path)) for kind, path in folders.items()}
        self._plan = StepPlan(())
        self._unserved: dict[str, tuple[EngineSequence, int]] = {}
        """Requests not served yet, with the maximum number of requests in flight since arrival."""
        self._contended: set[str] = set()
        """Requests not served yet that were held back, or whose adapter was not resident."""
        self._open: dict[str, Request] = {}
        self._longest_step = IDLE_SECONDS
        self._waits: list[tuple[str, float, int]] = []
        engine._clock = lambda: self.now
        engine._runner = self  # type: ignore[assignment]
        engine.scheduler.policy = make_policy(options, engine.costs)
        self._schedule = type(engine.scheduler).schedule.__get__(engine.scheduler)
        engine.scheduler.schedule = self._planned  # type: ignore[method-assign]
        self._switch = type(engine.switcher).switch.__get__(engine.switcher)
        engine.switcher.switch = self._switched  # type: ignore[method-assign]

    def run(self) -> None:
        """Run the load to its end, with checks in every step."""
        engine, shape, draw = self.engine, self.shape, self.draw
        before, left = engine.stats(), shape.arrivals
        numbers = itertools.count()
        for step in itertools.count():
            assert step < MAX_STEPS, f"{self.seed}: {sorted(self._open)} never end"
            wanted = draw.choice([0, 0, 0, 1, 1, 6])
            if shape.queue is not None:
                wanted = shape.queue - len(self._open)
            for _ in range(min(left, wanted)):
                left -= 1
                self._add(f"{self.seed} r{next(numbers)}")
            if shape.hot_changes and draw.random() < 0.05:
                self._change_adapters()
            if shape.aborts and self._open and draw.random() < 0.05:
                self._ended(engine.abort(draw.choice(sorted(self._open))))
            if engine.idle and not left:
                break
            self._step()
        after = engine.stats()
        self._check_waits(repeats=1 + (after.preemptions > before.preemptions))
        assert not self._open, f"{self.seed}: {sorted(self._open)} are lost"
        assert engine.pool.kv == 0, self.seed
        self.tally.loads[self.options.policy] += 1
        self.tally.requests += shape.arrivals
        self.tally.steps += after.steps - before.steps
        self.tally.preemptions += after.preemptions - before.preemptions
        self.tally.evictions += after.adapter_evictions - before.adapter_evictions

    # -- requests and adapters ---------------------------------------------------------------

    def _add(self, request_id: str) -> None:
        draw, shape = self.draw, self.shape
        params = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            max_tokens=draw.randint(1, shape.answer),
            priority=draw.choice([-1, -1, -1, -1, 0, 3]) if shape.priorities else 0,
            deadline_ms=draw.choice([None, 400.0, 4000.0]) if shape.deadlines else None,
            stream_id=(stream := draw.choice(["s", "t", None]) if shape.streams else None),
            supersede=stream is not None and draw.random() < 0.3,
        )
        drawn = ["a"] * draw.randint(0, shape.prompt - 3)
        if len(drawn) > 1:
            drawn[draw.randrange(1, len(drawn))] = INVOCATION
        words = " ".join([*drawn, ""])
        request = Request(request_id, f"<s>{words}", params, adapter=draw.choice(shape.adapters))
        try:
            state = self.engine.prepare(request)
        except (InvalidArgument, NotFound):
            # The adapter is gone, or it leaves too few pages for the request.
            assert request.adapter is not None, request_id
            self.tally.ended["refused"] += 1
            return
        self._open[request_id] = request
        self._unserved[request_id] = state.sequence, 0
        self._ended(self.engine.add(state, self.now))

    def _change_adapters(self) -> None:
        """Replace, remove or add adapters, some of which have waiting or running requests."""
        names = [name for name in self.shape.adapters if name is not None] or ["a0"]
        kept = [name for name in names if self.draw.random() < 0.8]
        self.engine.adapters.folders.update(
            {name: self._stamped[self.draw.choice(sorted(self._stamped))] for name in kept}
        )

    def _ended(self, outputs: Sequence[Output]) -> None:
        """Check that each request gets one last output, of a kind that the load can cause."""
        for output in outputs:
            request = self._open[output.request_id]
            if not output.finished:
                continue
            del self._open[output.request_id]
            self._unserved.pop(output.request_id, None)
            if output.error is None:
                assert output.num_output_tokens == request.sampling.max_tokens
            else:
                self._check_error(request, output.error)
            self.tally.ended[type(output.error).__name__ if output.error else "answered"] += 1

    def _check_error(self, request: Request, error: VLoraError) -> None:
        shape = self.shape
        if isinstance(error, Cancelled):
            assert shape.aborts or shape.deadlines or shape.streams, error
        else:
            assert isinstance(error, InvalidArgument | NotFound), error
            assert shape.hot_changes, error
            assert request.adapter is not None, error

    # -- a step ------------------------------------------------------------------------------

    def _step(self) -> None:
        engine, began = self.engine, self.now
        in_flight = len(engine.request_ids)
        held_back = engine.memory.arrival_cutoff < math.inf
        self._plan = StepPlan(())
        outputs = engine.step()
        computed = {chunk.sequence_id for chunk in self._plan.chunks}
        for request_id, (sequence, most) in list(self._unserved.items()):
            if request_id in computed:
                del self._unserved[request_id]
                self._waits.append((request_id, began - sequence.arrival, most))
            else:
                self._unserved[request_id] = sequence, max(most, in_flight)
                if held_back or not sequence.ready:
                    self._contended.add(request_id)
        self._ended(outputs)
        running = engine.scheduler.running
        assert engine.stats().paused == sum(s.id not in computed for s in running), self.seed
        engine.check_integrity()
        engine.adapters.finish()
        engine.adapters.check_integrity()
        self.tally.held_back += held_back
        if not computed:
            self.now += IDLE_SECONDS
        self._longest_step = max(self._longest_step, self.now - began)

    def _planned(self, now: float, live: int, arrival_cutoff: float) -> StepPlan:
        scheduler, budgets = self.engine.scheduler, self.engine.scheduler._budgets
        able = len(scheduler.running) + sum(
            s.ready and s.arrival <= arrival_cutoff for s in scheduler.waiting
        )
        self._plan = plan = self._schedule(now, live, arrival_cutoff)
        assert bool(plan.chunks) == (able > 0), f"{self.seed}: {able} can run, and none does"
        assert plan.rows <= budgets.rows
        assert len(scheduler.running) <= budgets.sequences
        self._check_full(plan, able)
        return plan

    def _check_full(self, plan: StepPlan, able: int) -> None:
        """Check that no further request that the policy chose fits into the step. If a chosen
        request was refused for lack of a slot or pages, no further running request may fit."""
        scheduler = self.engine.scheduler
        computed = {chunk.sequence_id for chunk in plan.chunks}
        batch = scheduler.policy.max_batch
        possible = min(batch, self.options.max_num_seqs, able)
        self.tally.computed += len(computed)
        self.tally.possible += possible
        if len(computed) >= batch or plan.rows >= self.options.max_num_batched_tokens or not able:
            return
        if self.options.policy == "unmerge_only" and self.shape.plentiful:
            assert len(computed) >= possible, f"{self.seed}: {len(computed)} of {possible}"
        chosen = {r.id: r for r in scheduler.choice.order}
        refused = [s for s in scheduler.waiting if s.id in chosen]
        for sequence in scheduler.running:
            if sequence.id not in computed and (refused or sequence.id in chosen):
                assert not self._fits(sequence), f"{self.seed}: {sequence.id} is paused for nothing"
        if not plan.preempted and len(scheduler.running) < self.options.max_num_seqs:
            position = {request_id: i for i, request_id in enumerate(chosen)}
            first = min(refused, key=lambda s: position[s.id], default=None)
            if first is not None and first.ready:
                assert not self._fits(first), f"{self.seed}: {first.id} is refused for nothing"

    def _fits(self, sequence: EngineSequence) -> bool:
        """Return whether there are pages for all known tokens of a sequence."""
        if sequence.adapter is not None:
            sequence.adapter.pin()
        missing = pages_for(sequence.known, self.options.block_size) - len(sequence.table.pages)
        fits = self.engine.pool.can_allocate(missing)
        if sequence.adapter is not None:
            sequence.adapter.unpin()
        return fits

    def _switched(self, slot: int) -> None:
        self._switch(slot)
        self.now += self.shape.merge if slot != BASE else 0.0

    def forward(self, chunks: Sequence[Chunk], *parts: UploadedPart) -> StepResult:
        """Advance the time by one step. Every answer gets token 5."""
        self.now += self.shape.step + self.shape.row * sum(chunk.length for chunk in chunks)
        logits = torch.zeros(sum(c.completes for c in chunks), self.engine.config.vocabulary)
        logits[:, 5] = 1.0
        return StepResult(logits, ())

    # -- waits -------------------------------------------------------------------------------

    def _check_waits(self, repeats: int) -> None:
        """Check decision 41: a request is first served within its bound.

        repeats: 2 if requests were preempted and computed again, else 1.
        """
        if self.options.policy not in BOUNDED:
            return
        for request_id, waited, in_flight in self._waits:
            bound = self._bound(request_id, in_flight * repeats)
            self.tally.closest = max(self.tally.closest, waited / bound)
            assert waited <= bound, f"{request_id}: waited {waited:.2f} s, bound {bound:.2f} s"

    def _bound(self, request_id: str, in_flight: int) -> float:
        """Return the maximum seconds until a request is first served.

        in_flight: maximum number of requests in flight while it waited, times `repeats`.
        """
        shape, options = self.shape, self.options
        pages = options.kv_cache_tokens // options.block_size
        fitting = pages // pages_for(shape.prompt + shape.answer, options.block_size)
        at_once = max(1, min(options.max_step_requests, options.max_num_seqs, fitting))
        free_rows = options.max_num_batched_tokens - options.max_num_seqs + 1
        steps = math.ceil(shape.prompt / free_rows) + shape.answer
        served = (math.ceil(in_flight / at_once) * steps + 1) * self._longest_step
        if request_id not in self._contended:
            return options.max_wait_seconds + served
        # Each adapter in front takes its patience, plus the time until its request begins.
        adapters = len(set(shape.adapters))
        return options.max_wait_seconds + adapters * (memory.PATIENCE_SECONDS + served)


def run_loads(
    seeds: Sequence[int],
    policies: Sequence[str],
    checkpoint: Path,
    folders: Mapping[str, Path],
    report: Callable[[str], object] = lambda line: None,
) -> Tally:
    """Run one random load per seed under each policy. Return the counts."""
    tally = Tally()
    for number, seed in enumerate(seeds):
        engine, options, shape = draw_engine(random.Random(seed), checkpoint, folders)
        for policy in policies:
            named = replace(options, policy=policy)
            Load(engine, named, shape, folders, f"{seed} {policy}", tally).run()
        engine.adapters.close()
        if number % 50 == 49:
            report(str(tally))
    return tally
