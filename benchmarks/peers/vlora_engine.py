"""Our engine in process, as a system that the peers are compared with."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.loads import OUTPUT
from benchmarks.peers.checkpoints import DECODER, WEIGHTS
from benchmarks.peers.process import Answer, Prompt, Setup
from vlora.config import Options
from vlora.engine.loop import EngineLoop
from vlora.kernels.formats import Format
from vlora.kernels.quantize import quantize
from vlora.kernels.quantized import allocate, dequantize
from vlora.model.decoder_config import LM_HEAD_FORMAT
from vlora.request import Output, Request
from vlora.sampling import SamplingParams

PAGES_TOKENS = 8192
"""Number of positions of the page pool: room for all requests at once."""


class System:
    """The engine with the options of a setting."""

    def __init__(self, setup: Setup) -> None:
        self._options = Options(
            model=Path(setup.llava),
            adapters=Path(setup.llava).parent / "adapters",
            engine_threads=setup.threads,
            kv_cache_tokens=PAGES_TOKENS,
            enable_prefix_caching=False,
            **setup.options,
        )
        self._loop = EngineLoop.from_options(self._options)
        self._params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
        self._runs = itertools.count()

    def run(self, prompts: Sequence[Prompt]) -> Sequence[Answer]:
        run = next(self._runs)
        outputs: list[list[tuple[float, Output]]] = [[] for _ in prompts]
        finished = threading.Semaphore(0)

        def sink(index: int, _: str, output: Output) -> None:
            outputs[index].append((time.perf_counter(), output))
            if output.finished:
                finished.release()

        started = time.perf_counter()
        for i, prompt in enumerate(prompts):
            name = f"request-{run}-{i}"
            asked = Request(name, prompt.text, self._params, adapter=prompt.adapter)
            self._loop.submit(asked, partial(sink, i, name))
        for _ in prompts:
            finished.acquire()
        if error := next((output.error for *_, (_, output) in outputs if output.error), None):
            raise error
        return [
            Answer(
                one[0][0] - started,
                one[-1][0] - started,
                [token for _, output in one for token in output.token_ids],
            )
            for one in outputs
        ]

    def weights(self) -> Mapping[str, torch.Tensor]:
        kind = self._options.quantization
        if kind is None:
            return {}
        group = self._options.quantization_group_size
        form = Format(8, None) if kind.startswith("int8") else Format(4, group, zeros=True)
        made = {}
        for key, weight in load_file(self._options.model / WEIGHTS).items():
            name = key.removeprefix(DECODER)
            if name.endswith("_proj.weight") and ".layers." in name and key != name:
                made[name] = _rounded(weight, form)
            elif name == "lm_head.weight":
                made[name] = _rounded(weight, LM_HEAD_FORMAT)
        return made


def _rounded(weight: torch.Tensor, form: Format) -> torch.Tensor:
    stored = allocate(form, len(weight), weight.shape[1], torch.float32)
    quantize(weight, stored)
    return dequantize(stored)
