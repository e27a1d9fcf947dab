"""llama.cpp with all requests in one context, which has one adapter, so adapters take turns."""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.loads import OUTPUT, TEXT_TOKENS
from benchmarks.peers import checkpoints
from benchmarks.peers.process import Answer, Prompt, Setup
from benchmarks.peers.turns import in_turns

FILE_TYPES = {"Q8_0": 7, "Q4_0": 2}
"""llama.cpp's numbers of its file types (`llama_ftype`)."""
MOST_REQUESTS = 16


class System:
    """A context of one file type and setting."""

    def __init__(self, setup: Setup) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        options = dict(setup.options)
        llama = Path(setup.llama)
        kind = options.pop("type")
        source = checkpoints.gguf_file(llama)
        self._file = checkpoints.once(
            llama.parent / f"llama-{kind}.gguf", lambda part: self._quantize(source, part, kind)
        )
        self._config = json.loads((llama / "model" / "config.json").read_text())
        self._api.llama_backend_init()
        chosen = self._api.llama_model_default_params()
        chosen.use_extra_bufts = options.pop("use_extra_bufts")
        model = self._api.llama_model_load_from_file(str(self._file).encode(), chosen)
        params = self._api.llama_context_default_params()
        params.n_ctx = MOST_REQUESTS * (TEXT_TOKENS + OUTPUT)
        params.n_seq_max = MOST_REQUESTS
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = setup.threads
        for name, value in options.items():
            setattr(params, name, value)
        self._batch_tokens = params.n_batch = params.n_ubatch
        self._context = self._api.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp could not load {self._file}")
        self._vocabulary = int(self._config["vocab_size"])
        self._batch = self._api.llama_batch_init(self._batch_tokens, 0, 1)
        files = {name: checkpoints.gguf_adapter(llama, name) for name in setup.adapters}
        self._adapters = {
            name: self._api.llama_adapter_lora_init(model, str(file).encode())
            for name, file in files.items()
        }

    def run(self, prompts: Sequence[Prompt]) -> Sequence[Answer]:
        return in_turns(prompts, self._turn)

    def weights(self) -> Mapping[str, torch.Tensor]:
        import gguf

        names = {checkpoints.gguf_name(name): name for name in _llama_names(self._config)}
        found = {}
        for tensor in gguf.GGUFReader(self._file).tensors:
            name = names[tensor.name]
            weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
            heads = checkpoints.heads_of(name, self._config)
            found[name] = (
                weight if heads is None else checkpoints.permuted(weight, heads, back=True)
            )
        return found

    def _quantize(self, source: Path, target: Path, kind: str) -> None:
        options = self._api.llama_model_quantize_default_params()
        options.ftype = FILE_TYPES[kind]
        paths = (str(source).encode(), str(target).encode())
        if self._api.llama_model_quantize(*paths, ctypes.byref(options)):
            raise RuntimeError(f"llama.cpp could not quantize {source} to {kind}")

    def _turn(self, prompts: Sequence[Prompt], started: float) -> list[Answer]:
        """Compute all prompts in batches of adjacent tokens, then decode all requests together."""
        self._use(prompts[0].adapter)
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)
        rows = [
            (token, position, i)
            for i, prompt in enumerate(prompts)
            for position, token in enumerate(prompt.tokens)
        ]
        tokens: list[list[int]] = [[] for _ in prompts]
        firsts, now = [0.0] * len(prompts), 0.0
        for start in range(0, len(rows), self._batch_tokens):
            part = rows[start : start + self._batch_tokens]
            last = [p == len(prompts[i].tokens) - 1 for _, p, i in part]
            for i, token in self._decode(part, last):
                tokens[i].append(token)
                firsts[i] = time.perf_counter() - started
        for step in range(OUTPUT - 1):
            part = [
                (ids[-1], len(prompt.tokens) + step, i)
                for i, (prompt, ids) in enumerate(zip(prompts, tokens, strict=True))
            ]
            for i, token in self._decode(part, [True] * len(part)):
                tokens[i].append(token)
        now = time.perf_counter() - started
        return [Answer(first, now, ids) for first, ids in zip(firsts, tokens, strict=True)]

    def _decode(
        self, rows: Sequence[tuple[int, int, int]], wanted: Sequence[bool]
    ) -> list[tuple[int, int]]:
        """Compute rows of (token, position, request). Return the request and the next token of the
        wanted rows."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, position, request) in enumerate(rows):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, request
            batch.logits[row] = wanted[row]
        if self._api.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp could not decode a batch")
        found = []
        for row, (_, _, request) in enumerate(rows):
            if wanted[row]:
                logits = self._api.llama_get_logits_ith(self._context, row)
                best = np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax()
                found.append((request, int(best)))
        return found

    def _use(self, adapter: str | None) -> None:
        count = int(adapter is not None)
        handles = (self._api.llama_adapter_lora_p_ctypes * 1)()
        if adapter is not None:
            handles[0] = self._adapters[adapter]
        scales = (ctypes.c_float * 1)(1.0)
        if self._api.llama_set_adapters_lora(self._context, handles, count, scales):
            raise RuntimeError(f"llama.cpp could not use the adapter {adapter}")


def _llama_names(config: Mapping[str, Any]) -> list[str]:
    layers = range(config["num_hidden_layers"])
    inner = [f"model.layers.{i}.{part}" for i in layers for part in checkpoints.LAYER_NAMES]
    return [f"{module}.weight" for module in (*checkpoints.OUTER_NAMES, *inner)]
