"""Make a checkpoint with the sizes of LLaVA-1.5-7B, serve it, and compare its memory with the plan.

The weights are random bfloat16 numbers, so the answers mean nothing. The folder takes 14 GB, and
serving it takes about 17 GiB of memory. With fewer layers, both are smaller.

    python -m tools.large_checkpoint make FOLDER
    python -m tools.large_checkpoint measure FOLDER
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from benchmarks.machine import status_bytes
from vlora.cli.common import Command, Group

MIB = 1 << 20
DEMO = Path(__file__).parent / "demo"
SHARD_BYTES = 1 << 30
DEVIATION = 0.02
"""Standard deviation of the weights, as transformers initializes them."""
CONTEXT, SEQUENCES = 2048, 4
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "kv_cache_tokens": CONTEXT,
    "max_model_len": CONTEXT,
    "max_num_batched_tokens": 512,
    "max_num_seqs": SEQUENCES,
}
WORDS = 480
"""Number of words of a request without an image. SEQUENCES such requests fill most of the cache."""

app = typer.Typer(cls=Group, add_completion=False, help=__doc__)


def configuration(layers: int) -> LlavaConfig:
    """Return the configuration of LLaVA-1.5-7B with `layers` decoder layers."""
    sizes = {"vocab_size": 32064, "num_hidden_layers": layers, "max_position_embeddings": 4096}
    # All other sizes are the defaults of transformers.
    return LlavaConfig(text_config=LlamaConfig(rms_norm_eps=1e-5, **sizes))


def write_checkpoint(folder: Path, config: LlavaConfig, report: Callable[[str], None]) -> None:
    """Write a checkpoint of bfloat16 weights with the demo's tokenizer, one shard at a time.

    report: called with a line after each shard.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "checkpoint")
    config.image_token_index = config.image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    config.text_config.bos_token_id = tokenizer.bos_token_id
    config.text_config.eos_token_id = tokenizer.eos_token_id
    config.architectures = ["LlavaForConditionalGeneration"]
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config)
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    torch.manual_seed(0)
    files: dict[str, str] = {}
    shards = list(_shards(shapes))
    for i, names in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        weights = {name: _drawn(shapes[name]) for name in names}
        if "lm_head.weight" in weights:
            # A logit of 0 is never the largest, so answers have only tokens of the tokenizer.
            weights["lm_head.weight"][len(tokenizer) :] = 0.0
        save_file(weights, folder / file, {"format": "pt"})
        files |= dict.fromkeys(names, file)
        report(f"{file} ({i} of {len(shards)})")
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = config.vision_config.image_size
    CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size=size).save_pretrained(folder)


def _shards(shapes: dict[str, tuple[int, ...]]) -> Iterator[list[str]]:
    """Yield the names of each shard's weights. A shard has at most SHARD_BYTES, or one weight."""
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        more = 2 * int(torch.Size(shape).numel())
        if names and size + more > SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += more
    yield names


def _drawn(shape: tuple[int, ...]) -> torch.Tensor:
    """Return random weights: around 1 for norms and other vectors, around 0 for matrices."""
    mean = 1.0 if len(shape) == 1 else 0.0
    return torch.empty(shape, dtype=torch.bfloat16).normal_(mean, DEVIATION)


@app.command(cls=Command)
def make(
    folder: Path,
    layers: Annotated[int, typer.Option(min=1, help="Number of decoder layers.")] = 32,
) -> None:
    """Write the checkpoint into FOLDER."""
    write_checkpoint(folder, configuration(layers), typer.echo)


@app.command(cls=Command)
def measure(
    folder: Path,
    quantization: Annotated[
        str | None, typer.Option(help="Quantize the decoder: int8 or int4.")
    ] = None,
) -> None:
    """Serve the checkpoint. Print the time until it is ready, and memory in MiB, as JSON.

    The memory of each model's process is given after loading and after requests that filled the KV
    cache, with its peaks. `planned` is the memory that `vlora capacity` predicts for `lmm`.
    """
    from vlora.launcher.repository import ServerOptions
    from vlora.launcher.server import TritonServer

    options = OPTIONS | ({"quantization": quantization} if quantization else {})
    server = TritonServer(ServerOptions(model=folder, model_json=options))
    started = time.monotonic()
    try:
        server.open(lambda line: typer.echo(line, err=True))
        seconds = time.monotonic() - started
        names = ("lmm", "vision_encoder")
        loaded = {name: memory_mib(server.models[name]) for name in names}
        answer = ask_all(server.grpc_url)
        used = {name: memory_mib(server.models[name]) for name in names}
    finally:
        server.stop()
    planned = planned_mib(folder, options)
    result = {
        "ready_seconds": round(seconds, 1),
        "answer": answer,
        "after loading": loaded,
        "after requests": used,
        "planned": planned,
        "planned / measured": round(planned / used["lmm"]["resident"], 4),
    }
    typer.echo(json.dumps(result, indent=2))


def memory_mib(pid: int) -> dict[str, int]:
    """Return the resident memory of a process and its peak, in MiB."""
    sizes = {"resident": status_bytes("VmRSS", pid), "peak": status_bytes("VmHWM", pid)}
    return {name: size // MIB for name, size in sizes.items()}


def ask_all(url: str) -> str:
    """Ask a question about an image, then fill the KV cache. Return the answer to the question."""
    from concurrent.futures import ThreadPoolExecutor

    from clients.common import connect, first_string, request_inputs, sampling_parameters

    client = connect(url, "video_analytics")

    def ask(text: str, images: list[bytes]) -> str:
        sampling = sampling_parameters(None, max_tokens=4, temperature=0.0, ignore_eos=True)
        inputs = request_inputs(text, images=images, sampling=sampling)
        return first_string(client.infer("video_analytics", inputs), "text_output")

    try:
        answer = ask("What color is the star?", [(DEMO / "samples" / "vqa.png").read_bytes()])
        with ThreadPoolExecutor(SEQUENCES) as pool:
            list(pool.map(lambda i: ask(f"{i}" + " what" * WORDS, []), range(SEQUENCES)))
    finally:
        client.close()
    return answer


def planned_mib(folder: Path, options: dict[str, Any]) -> int:
    """Return the memory in MiB that `vlora capacity` predicts for the process of `lmm`."""
    from vlora.config import parse_options
    from vlora.engine.capacity import plan, process_bytes

    keys = {"model": str(folder.resolve()), **options}
    parsed = parse_options(keys, "options", folder)
    return plan(parsed, {}, 0, process_bytes(parsed)).configured_bytes // MIB


if __name__ == "__main__":
    app()
