"""Make a checkpoint with the sizes of LLaVA-1.5-7B, serve it, and compare its memory with the plan.

The weights are random bfloat16 numbers, so the answers mean nothing. The folder takes 14 GB, making
it 14 GiB of memory, and serving it about 17 GiB. With fewer layers, all three are smaller.

    python -m tools.large_checkpoint make FOLDER
    python -m tools.large_checkpoint measure FOLDER
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForImageTextToText, AutoTokenizer, LlamaConfig, LlavaConfig
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from benchmarks.machine import status_bytes
from vlora.cli.common import Command, Group

MIB = 1 << 20
DEMO = Path(__file__).parent / "demo"
SHARD_LIMIT = "1GB"
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


def write_checkpoint(folder: Path, config: LlavaConfig) -> None:
    """Write a checkpoint of bfloat16 weights, as transformers initializes them, with the demo's
    tokenizer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "checkpoint")
    config.image_token_index = config.image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    config.text_config.bos_token_id = tokenizer.bos_token_id
    config.text_config.eos_token_id = tokenizer.eos_token_id
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        # A logit of 0 is never the largest, so answers have only tokens of the tokenizer.
        model.lm_head.weight[len(tokenizer) :] = 0.0
    model.save_pretrained(folder, max_shard_size=SHARD_LIMIT)
    tokenizer.save_pretrained(folder)
    size = config.vision_config.image_size
    CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size=size).save_pretrained(folder)


@app.command(cls=Command)
def make(
    folder: Path,
    layers: Annotated[int, typer.Option(min=1, help="Number of decoder layers.")] = 32,
) -> None:
    """Write the checkpoint into FOLDER."""
    sizes = {"vocab_size": 32064, "num_hidden_layers": layers, "max_position_embeddings": 4096}
    # All other sizes of LLaVA-1.5-7B are the defaults of transformers.
    write_checkpoint(folder, LlavaConfig(text_config=LlamaConfig(rms_norm_eps=1e-5, **sizes)))


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
        typer.echo(f"ready after {seconds:.1f} s; asking now, for minutes on a CPU", err=True)
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
