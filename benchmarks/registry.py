"""The list of benchmarks.

A benchmark is a module or folder with a subclass of `Benchmark`, and an entry in this list. This
module imports no benchmark, so that listing them does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.benchmark import Benchmark


@dataclass(frozen=True)
class Entry:
    """Location of a benchmark, and its line in the list.

    location: module and class as "module:class".
    """

    location: str
    help: str

    def load(self) -> type[Benchmark[Any]]:
        """Import and return the class of the benchmark."""
        module, _, name = self.location.partition(":")
        benchmark: type[Benchmark[Any]] = getattr(import_module(module), name)
        return benchmark


REGISTRY: Mapping[str, Entry] = {
    "kernels": Entry(
        "benchmarks.kernels.benchmark:KernelsBenchmark",
        "The LoRA operator against PEFT's loop, slices, dLoRA's einsum, padding and static tiles.",
    ),
    "attention": Entry(
        "benchmarks.attention.benchmark:AttentionBenchmark",
        "Attention over KV pages against its reference implementation and the roofline.",
    ),
    "step": Entry(
        "benchmarks.step.benchmark:StepBenchmark",
        "One decode or prefill step of a mid-size model against the roofline, part by part.",
    ),
    "quantized": Entry(
        "benchmarks.quantized:QuantizedBenchmark",
        "Products with int8 and int4 weights against the roofline of their own bytes.",
    ),
    "llama-cpp": Entry(
        "benchmarks.llama_cpp:LlamaCppBenchmark",
        "Decode steps of a quantized model in our engine and in llama.cpp, in one run.",
    ),
    "engine": Entry(
        "benchmarks.engine.benchmark:EngineBenchmark",
        "Sixteen concurrent requests (four with --quick) in process, over gRPC and on PEFT.",
    ),
    "switch": Entry(
        "benchmarks.switch.benchmark:SwitchBenchmark",
        "Merging all layers, mode switches, LoRA in mixture mode, drift of merging in place.",
    ),
    "policies": Entry(
        "benchmarks.policies.benchmark:PoliciesBenchmark",
        "Scheduling policies on seeded traces, measured in real time and simulated.",
    ),
    "adapters": Entry(
        "benchmarks.adapters.benchmark:AdaptersBenchmark",
        "Many adapters: registered, resident, distinct, more than fit, and a split pool.",
    ),
    "premerge": Entry(
        "benchmarks.premerge:PremergeBenchmark",
        "Steps before and after premerging, by the hot adapter's share of the requests.",
    ),
    "prefix": Entry(
        "benchmarks.prefix:PrefixBenchmark",
        "Rounds of questions about one image, with and without the prefix cache.",
    ),
    "activated": Entry(
        "benchmarks.activated:ActivatedBenchmark",
        "Questions about one image by activated adapters, against ordinary ones.",
    ),
    "gateway": Entry(
        "benchmarks.gateway.benchmark:GatewayBenchmark",
        "The gateway against gRPC directly, idle connections, and streams that are cut.",
    ),
    "structured": Entry(
        "benchmarks.structured:StructuredBenchmark",
        "Requests whose answers follow a schema or an expression, against free ones.",
    ),
}
