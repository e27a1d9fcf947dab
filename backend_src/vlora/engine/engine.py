"""The engine: schedule → switch → forward → update, one step at a time, on the caller's thread."""

from __future__ import annotations

import bisect
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from vlora import backends
from vlora.config import Options
from vlora.engine.calibration import AdapterSizes, Bed, calibrated
from vlora.engine.checks import check_choices, context_of, max_tokens_of
from vlora.engine.cost import CostModel, guess
from vlora.engine.memory import EngineMemory
from vlora.engine.plan import Mode, StepPlan
from vlora.engine.policies.registry import make_policy
from vlora.engine.request_state import RequestState, rows_of
from vlora.engine.scheduler import Budgets, Scheduler
from vlora.engine.sequence import Sequence, mode_of
from vlora.errors import Cancelled, Internal, InvalidArgument, VLoraError
from vlora.ids import BASE
from vlora.lora.folders import FolderFinder, FolderWatch, find_folders
from vlora.lora.handle import AdapterHandle
from vlora.lora.store import AdapterStore
from vlora.lora.switcher import Switcher
from vlora.memory.available import available_bytes
from vlora.memory.prefix import BlockDigests
from vlora.metrics import EngineStats
from vlora.model.decoder_config import dtype_of, load_config
from vlora.model.inputs import PromptReader
from vlora.model.loader import adapter_shape, load_weights
from vlora.model.runner import Runner, StepResult
from vlora.model.sampler import TokenSampler
from vlora.model.vocabulary import Vocabulary
from vlora.request import Output, Request
from vlora.sampling import SamplingParams

log = logging.getLogger(__name__)


class Engine:
    """One model, its adapters, its pages. `prepare` may be called from any thread; all else
    belongs to one."""

    def __init__(
        self,
        options: Options,
        adapter_names: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        memory: type[EngineMemory] = EngineMemory,
    ) -> None:
        """Loads the checkpoint and the adapters. adapter_names: name → folder besides those under
        `options.adapters`. memory: what kind. Raises InvalidArgument for what cannot be served."""
        if options.max_num_batched_tokens < options.max_num_seqs:
            raise InvalidArgument(
                f"'max_num_batched_tokens' = {options.max_num_batched_tokens} must be at least"
                f" 'max_num_seqs' = {options.max_num_seqs}: each running request needs a row a step"
            )
        backends.backend_of("kernels")  # an unknown name fails here, not in each step
        self._clock = clock
        self._limits = options.limits
        self.config = load_config(options.model)
        dtype = dtype_of(options.dtype, options.model)
        weights = load_weights(options.model, self.config, dtype)
        self.slab = weights.slab
        self.adapters = AdapterStore(
            adapter_shape(options.model, self.config, weights.lm_head),
            options.limits.max_adapter_bytes,
            dtype,
            options.adapter_host_bytes,
        )
        names = adapter_names or {}
        self.adapters.load(find_folders(options.adapters, names), make_resident=False)
        self.watch = FolderWatch(FolderFinder(options.adapters, names), self.adapters.update)
        tokens = options.kv_cache_tokens // options.block_size * options.block_size
        self.max_model_len = context_of(options, self.config.context, tokens)
        self.memory = memory(options, self.config, dtype, self.adapters)
        self.pool = self.memory.pool
        self.pool.movers.append(lambda moves: self.memory.move(self.scheduler.running, moves))
        self._most_rows = options.max_num_batched_tokens
        self.switcher = Switcher(weights.slab, self.adapters, options.merging)
        self._runner = Runner(self.config, weights, self.adapters, self.switcher, self.memory.store)
        self.adapters.on_evict = self._evicted
        self.memory.attach()
        self.switcher.memory = options.merged_weights_bytes
        if self.switcher.memory is None and (left := available_bytes()) is not None:
            # The pages' memory is taken as they are used.
            self.switcher.memory = max(0, left - self.memory.store.cache.nbytes)
        if options.merging != "off" and (reason := self.switcher.refusal(0)) is not None:
            log.warning("no adapter is merged: %s ('merged_weights_bytes')", reason)
        self._reader = PromptReader(options.model, self.config)
        self._tokenizing = threading.Lock()
        self._vocabulary = Vocabulary(self._reader.tokenizer)
        self._sizes = AdapterSizes(self.adapters)
        head, layers = weights.lm_head.numel(), self.slab.base.numel()
        self.costs = CostModel(
            guess(layers, dtype.itemsize, head),
            self._sizes,
            held=lambda: self.switcher.merged,
            can_merge=lambda slot: not options.deterministic and self.switcher.can_merge(slot),
        )
        self.scheduler = Scheduler(
            Budgets(options.max_num_seqs, options.max_num_batched_tokens),
            make_policy(options, self.costs),
            keep=partial(setattr, self.adapters, "keep"),
        )
        self._live: dict[str, RequestState] = {}
        self._by_deadline: list[tuple[float, str]] = []
        """Live requests that have a deadline, by it."""
        self._busy_since: float | None = None
        """When the last step ended, if nothing but the next one has been waited for since."""
        self._stats = EngineStats(pages_total=self.pool.total, page_tokens=options.block_size)
        self._merge_is_lossy = dtype != torch.float32
        self._news = 0
        self._stalled_at: int | None = None

    def calibrate(self, *, anew: bool = False) -> None:
        """Measures what the cost model predicts from, or finds it in this machine's cache (not
        where `anew`); before the first request."""
        assert self.pool.kv == 0, "calibrating writes to pages"
        pages = self.pool.allocate(self.pool.free) or []
        bed = Bed(self._runner, self.switcher, pages, self.memory.block, self._most_rows)
        slots = sorted(self.adapters.resident)
        model = (self.config, self.slab.dtype, self.memory.block)
        mergeable = [slot for slot in slots if self.costs.mergeable(slot)]
        head = self.costs.profile.head
        self.costs.use(
            calibrated(
                bed, model, slots, mergeable, self._sizes, head, self.max_model_len, anew=anew
            )
        )
        self.pool.release(pages)

    # -- at the edge, on the caller's thread -------------------------------------------------

    def prepare(self, request: Request) -> RequestState:
        """Every check that a request can fail, before it is queued; it holds no pages yet.

        Raises a VLoraError."""
        params = request.sampling
        handle = None if request.adapter is None else self.adapters.handle(request.adapter)
        if request.use_head and (handle is None or not handle.info.head_labels):
            raise InvalidArgument(f"adapter {request.adapter!r} has no vision task head")
        beyond = [t for t in params.stop_token_ids if not 0 <= t < self.config.vocabulary]
        if beyond:
            raise InvalidArgument(
                f"'stop_token_ids' holds {beyond[0]}; ids run from 0 to"
                f" {self.config.vocabulary - 1}"
            )
        check_choices(params.choices, self._limits)
        if not request.prompt:
            raise InvalidArgument("the prompt is empty; give a text")
        with self._tokenizing:
            prompt = self._reader.read(request.prompt, request.images)
        context = min(self.max_model_len, self.memory.capacity(handle))
        max_tokens = max_tokens_of(request, len(prompt.ids), context)
        sampler = TokenSampler(params, request.id, self.config.eos_tokens, self._vocabulary)
        if sampler.choices is not None and sampler.choices.least_tokens > max_tokens:
            raise InvalidArgument(
                f"the longest of 'choices' needs {sampler.choices.least_tokens} tokens;"
                f" {max_tokens} are left for it"
            )
        digests = None
        if self.memory.prefix is not None:
            digests = BlockDigests(self.memory.block, prompt.feature_row, prompt.features)
            digests.up_to(prompt.ids, len(prompt.ids))  # now, and not on the engine's thread
        table = self.memory.table()
        sequence = Sequence(
            request, prompt, handle, max_tokens, table, digests, rounded=self._merge_is_lossy
        )
        return RequestState(sequence, sampler, self._vocabulary)

    # -- on the engine's thread --------------------------------------------------------------

    def add(self, state: RequestState, arrival: float) -> list[Output]:
        """Queues a prepared request; its id must not be live. Where it supersedes, the last outputs
        of the older requests of its stream that still waited."""
        sequence = state.sequence
        if sequence.id in self._live:
            raise ValueError(f"request id {sequence.id!r} is live already")
        ended = self._supersede(sequence.request.sampling)
        sequence.arrival = arrival
        self._live[sequence.id] = state
        if sequence.deadline < math.inf:
            bisect.insort(self._by_deadline, (sequence.deadline, sequence.id))
        self.scheduler.add(sequence)
        if sequence.adapter is not None:
            self.adapters.count_request(sequence.adapter)
        self._stalled_at = None
        return ended

    def _supersede(self, params: SamplingParams) -> list[Output]:
        if not params.supersede:
            return []
        stream = params.stream_id
        older = [
            sequence.id
            for sequence in self.scheduler.waiting
            if sequence.request.sampling.stream_id == stream and not sequence.started
        ]
        self._count(superseded=len(older))
        reason = Cancelled(f"a newer request of stream '{stream}' superseded this one")
        return [output for request_id in older for output in self.abort(request_id, reason)]

    def step(self) -> list[Output]:
        """One iteration; the news of every request that has some.

        A fault in the forward pass ends the step's requests, one in a row's answer ends that
        row's; both are told in their last outputs. What is raised is a fault of scheduling or
        bookkeeping, after which the engine must not be used.
        """
        now = self._clock()
        began = now if self._busy_since is None else self._busy_since
        self._busy_since = None
        seen = self._news
        ended = self._expire(now) + self._advance()
        plan = self.scheduler.schedule(now, self.switcher.live, self.memory.barrier)
        if not plan.chunks:
            self._stalled_at = seen
            return ended
        self._stalled_at = None
        try:
            began += self._switch(plan.live)
            computing = self._clock()
            result = self._forward(plan)
            computed = self._clock() - computing
        except Exception:
            log.exception("a step failed; its requests are ended")
            return ended + [
                output
                for chunk in plan.chunks
                for output in self.abort(chunk.sequence_id, Internal("the engine failed on a step"))
            ]
        outputs = self._update(plan, result)
        done = self._clock()
        if not self.idle:
            self._busy_since = done
        self._learn(plan, computed, done - began - computed)
        return ended + outputs

    def _learn(self, plan: StepPlan, computed: float, beside: float) -> None:
        """What a step took, from the end of the one before, in its forward pass and beside it."""
        predicted = self.costs.record(plan.parts, plan.live, computed, beside)
        self._count(step_seconds=computed + beside, predicted_seconds=predicted)

    def _advance(self) -> list[Output]:
        """Adapters come nearer to who waits for them; who waits in vain is told."""
        failed = self.memory.advance(self.scheduler.waiting, len(self.scheduler.running))
        return [output for name, error in failed for output in self.abort(name, error)]

    def _evicted(self, slot: int, handle: AdapterHandle) -> None:
        """The slot's adapter goes: out of the weights, and what it computed goes next."""
        if self.switcher.live == slot:
            self._switch(BASE)
        self.switcher.forget(slot)
        self.memory.evicted(handle)

    def on_news(self) -> None:
        """Something that the engine may have waited for has come; from any thread."""
        self._news += 1

    @property
    def stalled(self) -> bool:
        """Whether all that is live waits for adapters to be loaded, with nothing new since."""
        return self._stalled_at == self._news

    def _expire(self, now: float) -> list[Output]:
        """Ends what is past its deadline: nobody wants the answer any more."""
        outputs: list[Output] = []
        while self._by_deadline and self._by_deadline[0][0] <= now:
            _, request_id = self._by_deadline[0]
            asked = self._live[request_id].sequence.request.sampling.deadline_ms
            self._count(expired=1)
            late = Cancelled(f"past its deadline: 'deadline_ms' = {asked:g}")
            outputs += self.abort(request_id, late)
        return outputs

    def abort(self, request_id: str, reason: VLoraError | None = None) -> list[Output]:
        """Ends a request; its last output carries `reason` (Cancelled by default). An unknown id
        is no error: it may just have finished."""
        state = self._live.get(request_id)
        if state is None:
            return []
        self._forget(state)
        failed = isinstance(reason, Internal)
        self._count(failed=failed, aborted=not failed)
        return [state.ended(reason or Cancelled("the request was cancelled"), self._clock())]

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    @property
    def live_ids(self) -> tuple[str, ...]:
        return tuple(self._live)

    @property
    def running_ids(self) -> tuple[str, ...]:
        return tuple(sequence.id for sequence in self.scheduler.running)

    def stats(self) -> EngineStats:
        """A snapshot; also safe from other threads."""
        running, waiting = list(self.scheduler.running), list(self.scheduler.waiting)
        credits = sorted((self.scheduler.choice.credits or {}).values())
        tiers = self.adapters.counters
        return replace(
            self._stats,
            paused=self.scheduler.paused,
            highest_credit=credits[-1] if credits else 0.0,
            median_credit=credits[len(credits) // 2] if credits else 0.0,
            running=len(running),
            waiting=len(waiting),
            prediction_error=self.costs.median_error,
            pages_used=self.pool.kv,
            pages_cached=self.pool.cached,
            pages_adapter=self.pool.adapter,
            pages_moved=self.pool.pages_moved,
            adapters_resident=len(self.adapters.resident),
            adapters_known=len(self.adapters),
            adapter_host_bytes=self.adapters.host_bytes,
            adapter_hits=tiers.hits,
            adapter_host_hits=tiers.host_hits,
            adapter_misses=tiers.misses,
            adapter_loads=tiers.loads,
            adapter_evictions=tiers.evictions,
            running_adapters=Counter(s.request.adapter or "" for s in running),
            waiting_adapters=Counter(s.request.adapter or "" for s in waiting),
        )

    def check_integrity(self) -> None:
        """Pages add up, and every page in use belongs to a running sequence."""
        self.memory.check_integrity(self.scheduler.running)
        assert all(not sequence.table.pages for sequence in self.scheduler.waiting)
        known = {s.id for s in (*self.scheduler.running, *self.scheduler.waiting)}
        assert known == set(self._live), known ^ set(self._live)
        dated = (s for state in self._live.values() if (s := state.sequence).deadline < math.inf)
        assert self._by_deadline == sorted((s.deadline, s.id) for s in dated)

    def _switch(self, live: int) -> float:
        """`live` becomes the adapter in the active weights; how many seconds that took."""
        if live == self.switcher.live:
            return 0.0
        merges = live not in (BASE, self.switcher.merged)
        predicted = self.costs.switch(self.switcher.live, live)
        began = self._clock()
        self.switcher.switch(live)
        seconds = self._clock() - began
        if merges:
            self.costs.record_switch(predicted, seconds)
        self._count(switches=1, merges=merges, switch_seconds=seconds)
        return seconds

    def _forward(self, plan: StepPlan) -> StepResult:
        began = self._clock()
        for chunk in plan.chunks:
            self._live[chunk.sequence_id].scheduled(plan.mode, began)
        result = self._runner.forward(plan.chunks)
        self._count_mode(plan.mode, self._clock() - began)
        return result

    def _update(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Counters forward, tokens drawn, answers ended."""
        now = self._clock()
        drawn = [c.sequence_id for c in plan.chunks if c.completes and not c.use_head]
        rows = iter(rows_of(result.logits, [self._live[one] for one in drawn]))
        heads = iter(result.heads)
        outputs: list[Output] = []
        for chunk in plan.chunks:
            state = self._live[chunk.sequence_id]
            state.sequence.advance(
                chunk.length, mode_of(chunk.slot, plan.live, rounded=self._merge_is_lossy)
            )
            if not chunk.completes:
                continue
            answer = (
                partial(state.scored, next(heads), now)
                if chunk.use_head
                else partial(state.drawn, next(rows), now)
            )
            outputs.append(self._row_output(state, answer, now))
            if outputs[-1].finished:
                self._forget(state)
        self._count(
            steps=1,
            rows=plan.rows,
            decode_steps=plan.decode_rows > 0,
            decode_rows=plan.decode_rows,
            prompt_tokens=plan.rows - plan.decode_rows,
            generated_tokens=len(result.logits),
            finished=sum(output.finish_reason is not None for output in outputs),
            failed=sum(output.error is not None for output in outputs),
            preemptions=len(plan.preempted),
            cached_tokens=plan.cached,
        )
        return outputs

    def _row_output(self, state: RequestState, answer: Callable[[], Output], now: float) -> Output:
        """A row's own news; whatever goes wrong with it is its request's end, not the step's."""
        try:
            return answer()
        except VLoraError as error:
            return state.ended(error, now)
        except Exception:
            log.exception("answering request %s failed; it is ended", state.sequence.id)
            return state.ended(Internal("the engine failed on this request"), now)

    def _forget(self, state: RequestState) -> None:
        sequence = state.sequence
        self.scheduler.remove(sequence)
        if sequence.adapter is not None:
            sequence.adapter.last_used = self.pool.tick()
        del self._live[sequence.id]
        if sequence.deadline < math.inf:
            del self._by_deadline[
                bisect.bisect_left(self._by_deadline, (sequence.deadline, sequence.id))
            ]

    def _count_mode(self, mode: Mode, seconds: float) -> None:
        name, stats = mode.value, self._stats
        self._stats = replace(
            stats,
            mode=name,
            mode_steps={**stats.mode_steps, name: stats.mode_steps.get(name, 0) + 1},
            mode_seconds={**stats.mode_seconds, name: stats.mode_seconds.get(name, 0.0) + seconds},
        )

    def _count(self, **more: float) -> None:
        self._stats = replace(
            self._stats, **{name: getattr(self._stats, name) + n for name, n in more.items()}
        )
