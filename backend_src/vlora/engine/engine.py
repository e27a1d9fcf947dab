"""The engine. Each step runs on the caller's thread: schedule → switch → forward → update."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from vlora.adapters.handle import AdapterHandle
from vlora.config import Options
from vlora.engine.calibration import Calibration, SyntheticSteps
from vlora.engine.parts import load_parts
from vlora.engine.plan import StepPlan
from vlora.engine.requests import InFlightRequests, RequestState
from vlora.engine.rows import HeldRows, StepRows
from vlora.engine.sequence import mode_of
from vlora.engine.statistics import EngineStatistics
from vlora.errors import Cancelled, Internal, InvalidArgument, VLoraError, in_one_line
from vlora.ids import BASE
from vlora.metrics import EngineStats
from vlora.model.chunk import Chunk
from vlora.model.inputs import text_prompt
from vlora.model.runner import StepResult
from vlora.request import Freshness, Output, Request

log = logging.getLogger(__name__)


class Engine:
    """A model with its adapters and its page pool.

    Any thread may call `prepare`, `discard` and `stats`. One thread calls all other methods.
    """

    def __init__(
        self,
        options: Options,
        adapter_names: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load the checkpoint and the adapters.

        adapter_names: name → folder, in addition to the folders in `options.adapters`.
        clock: function that returns the time in seconds, which deadlines are compared with.

        Raises InvalidArgument for a checkpoint or options that cannot be served.
        """
        parts = load_parts(options, adapter_names or {})
        self.config = parts.config
        self.slab = parts.slab
        self.adapters = parts.adapters
        self.watch = parts.watch
        self.memory = parts.memory
        self.pool = parts.memory.pool
        self.switcher = parts.switcher
        self.costs = parts.costs
        self.scheduler = parts.scheduler
        self.max_model_len = parts.max_model_len
        self.admission = parts.admission
        self._runner = parts.runner
        self._merge_is_lossy = parts.merge_is_lossy
        self._max_rows = options.max_num_batched_tokens
        self._clock = clock
        self._requests = InFlightRequests()
        self._held_rows = HeldRows(self.config.vocabulary, self.slab.device)
        self._statistics = EngineStatistics(parts)
        # Time at which the last step ended, or None if the engine has been idle since.
        self._busy_since: float | None = None
        self._stalled = False  # True if the last step had nothing to compute.
        self.adapters.tiers.on_evict = self._on_evict

    def calibrate(self, *, force: bool = False) -> None:
        """Load the cost model's profile, or measure it. Call this before the first request."""
        assert self.pool.kv == 0, "calibrating writes to pages"
        pages = self.pool.allocate(self.pool.free) or []
        block = self.memory.block_size
        slots = sorted(self.adapters.resident)
        calibration = Calibration(
            SyntheticSteps(self._runner, self.switcher, pages, block, self._max_rows),
            slots,
            [slot for slot in slots if self.costs.mergeable(slot)],
            self.costs.sizes,
            self.costs.profile.head,
            self.max_model_len,
        )
        model = (self.config, self.slab.dtype, self.slab.format, block, self.costs.in_place)
        self.costs.use(calibration.load_or_measure(model, force=force))
        self.pool.release(pages)

    def check_first_step(self, folder: Path) -> None:
        """Compute one step, before the first request.

        Raises InvalidArgument, which names the checkpoint's folder, if the step fails or its logits
        are not finite.
        """
        pages = self.pool.allocate(1) or []
        tokens = (0, self.config.vocabulary - 1)[: min(self.max_model_len, self._max_rows)]
        chunk = Chunk("", BASE, 0, 0, tokens, text_prompt(tokens), tuple(pages), completes=True)
        try:
            finite = bool(self._runner.forward([chunk]).logits.isfinite().all())
        except Exception as error:
            raise InvalidArgument(
                f"model: {folder}: the first step failed: {in_one_line(error)}"
            ) from error
        if not finite:
            raise InvalidArgument(
                f"model: {folder}: the logits of the first step are not finite; some weight is not,"
                " or is too large for the option 'dtype'"
            )
        self.pool.release(pages)

    # -- requests ----------------------------------------------------------------------------

    def prepare(self, request: Request) -> RequestState:
        """Check a request and return its state. Raise a VLoraError if it is refused."""
        return self.admission.prepare(request)

    def add(self, state: RequestState, arrival: float) -> list[Output]:
        """Queue a prepared request, and end the waiting requests of its stream that it supersedes.

        arrival: time of arrival in seconds.

        Returns the last outputs of the ended requests. Raises ValueError if the new id is in use.
        """
        sequence = state.sequence
        if self._requests.get(sequence.id) is not None:
            raise ValueError(f"request id {sequence.id!r} is in use already")
        ended = self._supersede(sequence.request.freshness(arrival))
        sequence.queue_at(arrival)
        self._requests.add(state)
        self.scheduler.add(sequence)
        if sequence.adapter is not None:
            self.adapters.tiers.count_request(sequence.adapter)
        self._stalled = False
        return ended

    def abort(self, request_id: str, reason: VLoraError | None = None) -> list[Output]:
        """End a request and return its last output, which carries `reason` (Cancelled by default).

        An unknown id returns no output, because the request may just have finished.
        """
        state = self._requests.get(request_id)
        if state is None:
            return []
        self._forget(state)
        failed = isinstance(reason, Internal)
        self._statistics.count(failed=failed, aborted=not failed)
        return [state.ended(reason or Cancelled("the request was cancelled"), self._clock())]

    def _supersede(self, newer: Freshness) -> list[Output]:
        if not newer.supersede:
            return []
        older = [
            sequence.id
            for sequence in self.scheduler.waiting
            if sequence.request.freshness(sequence.arrival).is_superseded_by(newer)
            and not sequence.started
        ]
        self._statistics.count(superseded=len(older))
        reason = newer.superseded_error()
        return [output for request_id in older for output in self.abort(request_id, reason)]

    def discard(self, state: RequestState) -> None:
        """Release the grammar of a request that was never queued or has ended. Thread-safe."""
        params = state.sequence.request.sampling
        if params.structured_outputs is not None and state.grammar is not None:
            self.admission.grammars.release(
                params.structured_outputs, state.grammar, params.cache_salt
            )

    def _forget(self, state: RequestState) -> None:
        sequence = state.sequence
        self._held_rows.end(state)
        self.discard(state)
        self.scheduler.remove(sequence)
        if sequence.adapter is not None:
            sequence.adapter.last_used = self.pool.tick()
        self._requests.remove(state)

    # -- stepping ----------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Compute one step, and return the new outputs of all requests.

        A fault in the forward pass ends the requests of the step. A fault in the answer of one row
        ends its request. Both are reported in the requests' last outputs. If this method raises,
        scheduling or bookkeeping is faulty, and the engine must not be used any more.
        """
        now = self._clock()
        started = now if self._busy_since is None else self._busy_since
        self._busy_since = None
        ended = self._before_step(now)
        plan = self.scheduler.schedule(now, self.switcher.live, self.memory.arrival_cutoff)
        self._stalled = not plan.chunks and not self._held_rows
        if not plan.chunks:
            if self._held_rows and not ended:
                self._held_rows.sleep()
            return ended
        try:
            started += self._switch(plan.live)
            result, rows, forward_seconds = self._forward(plan)
        except Exception:
            log.exception("a step failed; its requests are ended")
            return ended + self._fail(plan)
        outputs = self._update(plan, result, rows)
        self._record(plan, started, forward_seconds + rows.waited, learn=not result.captured)
        return ended + outputs

    def _before_step(self, now: float) -> list[Output]:
        """End late requests, load adapters, and answer the rows whose masks have arrived."""
        ended: list[Output] = []
        for state in self._requests.expired(now):
            self._statistics.count(expired=1)
            sequence = state.sequence
            late = sequence.request.freshness(sequence.arrival).late_error()
            ended += self.abort(sequence.id, late)
        failed = self.memory.advance(self.scheduler.queue, len(self.scheduler.running), now)
        for request_id, error in failed:
            ended += self.abort(request_id, error)
        answers = [
            self._answer(state, partial(state.drawn, row, now), now)
            for state, row in self._held_rows.answerable()
        ]
        if answers:
            self._statistics.count_outputs(answers)
        return ended + answers

    def _switch(self, live: int) -> float:
        """Make `live` the adapter in the active weights; return the seconds of the switch."""
        if live == self.switcher.live:
            return 0.0
        merges = bool(self.costs.merges(self.switcher.live, live))
        predicted = self.costs.switch(self.switcher.live, live)
        started = self._clock()
        self.switcher.switch(live)
        seconds = self._clock() - started
        if merges:
            self.costs.record_switch(predicted, seconds)
        self._statistics.count(switches=1, merges=merges, switch_seconds=seconds)
        return seconds

    def _forward(self, plan: StepPlan) -> tuple[StepResult, StepRows, float]:
        """Compute a plan; return its result, the rows that need tokens, and the seconds taken."""
        started, mode = self._clock(), plan.mode.value
        states = [self._requests[chunk.sequence_id] for chunk in plan.chunks]
        for state in states:
            state.scheduled(mode, started)
        rows = self._held_rows.begin(plan, states)
        result = self._runner.forward(plan.chunks, rows)
        seconds = self._clock() - started
        self._statistics.count_mode(mode, seconds)
        return result, rows, seconds

    def _update(self, plan: StepPlan, result: StepResult, rows: StepRows) -> list[Output]:
        now = self._clock()
        drawn, heads = iter(rows.take(result.logits)), iter(result.heads)
        outputs: list[Output] = []
        for chunk in plan.chunks:
            state = self._requests[chunk.sequence_id]
            mode = mode_of(chunk.slot, plan.live, merge_is_lossy=self._merge_is_lossy)
            state.sequence.advance(chunk.length, mode)
            if not chunk.completes:
                continue
            if chunk.use_head:
                answer = partial(state.scored, next(heads), now)
            elif (row := next(drawn)) is None:
                self._statistics.count(rows_held=1)
                continue
            else:
                answer = partial(state.drawn, row, now)
            outputs.append(self._answer(state, answer, now))
        self._statistics.count_step(plan, outputs)
        return outputs

    def _answer(self, state: RequestState, answer: Callable[[], Output], now: float) -> Output:
        """Return the output of one row. A row that fails ends its request, and no other."""
        try:
            output = answer()
        except VLoraError as error:
            output = state.ended(error, now)
        except Exception:
            log.exception("answering request %s failed; it is ended", state.sequence.id)
            output = state.ended(Internal("the engine failed on this request"), now)
        if output.finished:
            self._forget(state)
        return output

    def _record(self, plan: StepPlan, started: float, seconds: float, *, learn: bool) -> None:
        """Record a step that began at `started`, with `seconds` of its forward pass."""
        now = self._clock()
        if not self.idle:
            self._busy_since = now
        overhead = now - started - seconds
        predicted = 0.0
        if learn and (self.scheduler.policy.uses_costs or self.costs.calibrated):
            predicted = self.costs.record(plan.parts, plan.live, seconds, overhead)
        self._statistics.count(step_seconds=seconds + overhead, predicted_seconds=predicted)

    def _fail(self, plan: StepPlan) -> list[Output]:
        return [
            output
            for chunk in plan.chunks
            for output in self.abort(chunk.sequence_id, Internal("the engine failed on a step"))
        ]

    def _on_evict(self, slot: int, handle: AdapterHandle) -> None:
        """Unmerge an evicted adapter, and mark its cached prefix blocks as the first to evict."""
        if self.switcher.live == slot:
            self._switch(BASE)
        self.switcher.forget(slot)
        self.memory.evicted(handle)

    # -- state -------------------------------------------------------------------------------

    @property
    def stalled(self) -> bool:
        """True if all requests wait for adapters and no load ended since the last step."""
        return self._stalled and not self.adapters.workers.pending

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    @property
    def request_ids(self) -> tuple[str, ...]:
        return self._requests.ids

    def close(self) -> None:
        """End the processes that compute token masks."""
        self.admission.grammars.close()

    def stats(self) -> EngineStats:
        """Return a snapshot of the statistics; safe from any thread."""
        return self._statistics.snapshot()

    def check_integrity(self) -> None:
        """Raise AssertionError unless pages, sequences and in-flight requests are consistent."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        self.memory.check_integrity(running)
        assert all(not sequence.table.pages for sequence in waiting)
        self._requests.check_integrity({s.id for s in (*running, *waiting)})
