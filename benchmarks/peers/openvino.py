"""OpenVINO GenAI with continuous batching. A batch has one adapter, so adapters take turns."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.loads import OUTPUT
from benchmarks.peers.checkpoints import once
from benchmarks.peers.process import Answer, Prompt, Setup
from benchmarks.peers.turns import in_turns

CACHE_GB = 2
LORA_SCALE = 2.0
"""lora_alpha / r of the generated adapters; OpenVINO does not read PEFT's `lora_alpha`."""
SUFFIX = "._openvino_orig_weight"


class System:
    """A pipeline of one type of weights and setting."""

    def __init__(self, setup: Setup) -> None:
        import openvino_genai as genai

        options = dict(setup.options)
        bits, budget = options.pop("bits"), options.pop("max_num_batched_tokens")
        llama = Path(setup.llama)
        folder = llama.parent / f"openvino-{'int8' if bits == 8 else 'float'}"
        self._folder = once(folder, lambda part: _convert(llama / "model", part, bits))
        self._quantized = bits == 8
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens, scheduler.cache_size = budget, CACHE_GB
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": setup.threads, **options}
        # A pipeline that was made for adapters is slower without one.
        self._base = genai.ContinuousBatchingPipeline(
            str(self._folder), scheduler, "CPU", properties
        )
        config = genai.AdapterConfig()
        files = {n: llama / "adapters" / n / "adapter_model.safetensors" for n in setup.adapters}
        self._adapters = {name: genai.Adapter(str(file)) for name, file in files.items()}
        for adapter in self._adapters.values():
            config.add(adapter)
        self._adapted = genai.ContinuousBatchingPipeline(
            str(self._folder), scheduler, "CPU", {**properties, "adapters": config}
        )

    def run(self, prompts: Sequence[Prompt]) -> Sequence[Answer]:
        return in_turns(prompts, self._turn)

    def _turn(self, prompts: Sequence[Prompt], started: float) -> list[Answer]:
        import openvino_genai as genai

        config: Any = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = OUTPUT
        config.ignore_eos, config.do_sample = True, False
        if prompts[0].adapter is not None:
            return self._adapted_turn(prompts, config, started)
        handles = [
            self._base.add_request(i, _tensor(prompt), config) for i, prompt in enumerate(prompts)
        ]
        times: list[list[float]] = [[] for _ in prompts]
        tokens: list[list[int]] = [[] for _ in prompts]
        while self._base.has_non_finished_requests():
            self._base.step()
            now = time.perf_counter() - started
            for handle, known, ids in zip(handles, times, tokens, strict=True):
                if handle.can_read():
                    ids += [t for output in handle.read().values() for t in output.generated_ids]
                    known.append(now)
        return [Answer(t[0], t[-1], ids) for t, ids in zip(times, tokens, strict=True)]

    def _adapted_turn(self, prompts: Sequence[Prompt], config: Any, started: float) -> list[Answer]:
        import openvino_genai as genai

        assert prompts[0].adapter is not None
        config.adapters = genai.AdapterConfig(self._adapters[prompts[0].adapter], LORA_SCALE)
        begun = time.perf_counter() - started
        # `add_request` does not change adapters.
        made = self._adapted.generate([_tensor(p) for p in prompts], [config] * len(prompts))
        end = time.perf_counter() - started
        firsts = [one.perf_metrics.get_ttft().mean / 1e3 for one in made]
        ids = [list(one.m_generation_ids[0]) for one in made]
        return [Answer(begun + f, end, t) for f, t in zip(firsts, ids, strict=True)]

    def weights(self) -> Mapping[str, torch.Tensor]:
        return _dequantized(self._folder) if self._quantized else {}


def _tensor(prompt: Prompt) -> Any:
    import openvino

    return openvino.Tensor(np.array([prompt.tokens], np.int64))


def _convert(model: Path, folder: Path, bits: int) -> None:
    """Write a Llama, and its tokenizer, in OpenVINO's format."""
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    from transformers import AutoTokenizer

    eight = OVWeightQuantizationConfig(bits=8, sym=True) if bits == 8 else None
    options: dict[str, Any] = {"quantization_config": eight} if eight else {"load_in_8bit": False}
    OVModelForCausalLM.from_pretrained(
        model, export=True, compile=False, **options
    ).save_pretrained(folder)
    parts = convert_tokenizer(AutoTokenizer.from_pretrained(model), with_detokenizer=True)
    for part, name in zip(parts, ("tokenizer", "detokenizer"), strict=True):
        openvino.save_model(part, folder / f"openvino_{name}.xml")


def _dequantized(folder: Path) -> dict[str, torch.Tensor]:
    """Return integer · scale of each symmetric int8 matrix of a model."""
    import openvino

    model = openvino.Core().read_model(folder / "openvino_model.xml")
    found = {}
    for node in model.get_ops():
        name = node.get_friendly_name()
        if node.get_type_name() != "Constant" or not name.endswith(SUFFIX):
            continue
        (convert,) = (one.get_node() for one in node.output(0).get_target_inputs())
        (multiply,) = (one.get_node() for one in convert.output(0).get_target_inputs())
        scale = multiply.input_value(1).get_node().get_data()
        values = node.get_data().astype(np.float32) * scale.astype(np.float32)
        found[f"{name.removeprefix('self.').removesuffix(SUFFIX)}.weight"] = torch.tensor(values)
    return found
