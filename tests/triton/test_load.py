"""Tests of concurrent requests: batches, metrics, HTTP clients and perf_analyzer."""

from __future__ import annotations

import json
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.perf_analyzer import fetch
from benchmarks.perf_analyzer.sweep import write_inputs
from clients.common import ClientError
from tests.support.polling import until
from tests.support.triton_client import REFRESH_SECONDS, Asker, Refused, picture
from vlora.cli import app
from vlora.errors import BY_CODE

ADAPTERS = ("", "attention-r4", "all-r8", "feed-forward-r16", "head-r8")
SERIES = '{model="lmm",version="1"}'
ENCODER = '{model="vision_encoder",version="1"}'


def mixed(index: int) -> dict[str, Any]:
    """Return request number `index`; adapters, images, lengths and sampling differ."""
    name = ADAPTERS[index % len(ADAPTERS)]
    keys: dict[str, Any] = {"max_tokens": 5 + index, "ignore_eos": True}
    if name:
        keys["lora_name"] = name
    if index % 2:
        keys |= {"temperature": 0.9, "seed": index}
    images = [picture((10 * index, 40, 5 * k)) for k in range(index % 3)]
    return {
        "text_input": f"What is number {index}?",
        "image": images or None,
        "sampling_parameters": keys,
        "task": "vqa",
    }


@pytest.mark.parametrize("model", ["visual_retrieval", "video_analytics", "lmm_unary"])
def test_sixteen_concurrent_requests_get_the_same_answers_as_sequential_ones(
    ask: Asker, model: str
) -> None:
    def answer(index: int) -> str:
        question = mixed(index)
        if model == "visual_retrieval":
            return ask.text(model, **question)
        if model == "lmm_unary":
            question["sampling_parameters"].setdefault("temperature", 0)
        return str(ask.once(model, **question)["text_output"])

    alone = [answer(index) for index in range(16)]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(answer, range(16)))
    assert together == alone


@pytest.mark.alone
def test_concurrent_requests_share_forward_passes(ask: Asker) -> None:
    def figures() -> tuple[float, float]:
        metrics = ask.metrics()
        return (
            metrics[f"vlora:decode_rows_total{SERIES}"],
            metrics[f"vlora:decode_steps_total{SERIES}"],
        )

    def run(index: int) -> None:
        keys = {"max_tokens": 64, "ignore_eos": True, "lora_name": ADAPTERS[1 + index % 4]}
        ask.stream("lmm", text_input="hello", stream=True, sampling_parameters=keys)

    rows, steps = figures()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(run, range(32)))
    more_rows, more_steps = figures()
    assert more_rows - rows == 32 * 63
    assert (more_rows - rows) / (more_steps - steps) > 4


@pytest.mark.alone
def test_images_of_concurrent_requests_share_encoder_batches(ask: Asker) -> None:
    def run(index: int) -> None:
        ask.once("video_analytics", text_input="?", image=picture((index, 3, 5)))

    def figures() -> tuple[float, float]:
        metrics = ask.metrics()
        names = [f"vlora:encoder_{name}_total{ENCODER}" for name in ("requests", "groups")]
        requests, groups = (metrics[name] for name in names)
        return requests, groups

    count, batches = figures()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(run, range(48)))
    more_count, more_batches = figures()
    assert more_count - count == 48
    print(f"mean batch {48 / (more_batches - batches):.1f}")
    assert 48 / (more_batches - batches) >= 3


def test_a_cached_image_is_not_encoded_again(ask: Asker) -> None:
    def counter(name: str) -> float:
        return ask.metrics()[f'vlora:{name}_total{{model="vision_encoder",version="1"}}']

    image = picture((77, 77, 77))
    hits, misses = counter("feature_cache_hits"), counter("feature_cache_misses")
    for _ in range(3):
        ask.once("video_analytics", text_input="?", image=[image, image])
    assert counter("feature_cache_misses") == misses + 1
    assert counter("feature_cache_hits") == hits + 5


def test_generate_answers_over_http(ask: Asker) -> None:
    body = {"text_input": "What?", "sampling_parameters": '{"max_tokens": 3}', "task": "vqa"}
    status, text = ask.http("video_analytics", "generate", body)
    assert status == 200
    assert json.loads(json.loads(text)["result"])["task"] == "vqa"
    status, text = ask.http("lmm", "generate", {"text_input": "hi", "max_tokens": 3, "seed": 1})
    assert status == 200
    assert json.loads(text)["text_output"].startswith("hi")


def test_generate_stream_streams_over_http(ask: Asker) -> None:
    keys = json.dumps({"max_tokens": 4, "ignore_eos": True})
    body = {"text_input": "What?", "sampling_parameters": keys}
    status, text = ask.http("visual_retrieval", "generate_stream", body)
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]
    assert status == 200
    assert sum(event["num_output_tokens"] for event in events) == 4
    assert "".join(event["text_output"] for event in events) == ask.text(
        "visual_retrieval", text_input="What?", sampling_parameters=keys
    )


def test_http_errors_are_json_with_their_code(ask: Asker) -> None:
    keys = '{"lora_name": "unknown"}'
    body = {"text_input": "What?", "sampling_parameters": keys}
    status, text = ask.http("video_analytics", "generate", body)
    # Triton sends 400 for any error of a step of an ensemble.
    assert status == 400
    assert "NOT_FOUND: unknown adapter 'unknown'" in json.loads(text)["error"]


def test_the_metrics_of_the_vllm_backend_are_exported(ask: Asker) -> None:
    ask.stream("lmm", text_input="hello", sampling_parameters={"lora_name": "all-r8"})
    labels = ('adapter_name="all-r8"', 'level="gpu"', 'pinned="false"', 'rank="8"')

    def loaded() -> set[str]:
        """Return the names of all series as soon as the idle server shows the adapter as loaded."""
        found = {*ask.metrics()}
        shown = [one for one in found if one.startswith("vllm:lora_adapter_loaded")]
        return found if any(all(label in one for label in labels) for one in shown) else set()

    series = until(loaded)
    names = {name.partition("{")[0] for name in series}
    assert {
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        "vllm:lora_requests_info",
        "vllm:num_gpu_loaded_lora_adapters",
        "vllm:max_gpu_lora_adapters",
        "vllm:lora_adapter_load_seconds_bucket",
        "vllm:cache_config_info",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:time_per_output_token_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
        "vllm:request_prompt_tokens_bucket",
        "vllm:request_generation_tokens_bucket",
        "vllm:request_params_n_bucket",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "nv_trt_llm_kv_cache_block_metrics",
    } <= names
    (info,) = (one for one in series if one.startswith("vllm:lora_requests_info"))
    assert 'running_lora_adapters="' in info
    assert "all-r8" in info
    assert 'max_lora="0"' not in info


def test_a_request_is_counted_before_its_last_response(ask: Asker) -> None:
    names = ["prompt_tokens_total", "generation_tokens_total"]
    names += [f"{one}_count" for one in ("e2e_request_latency_seconds", "request_params_n")]
    names += ["request_prompt_tokens_sum", "request_generation_tokens_sum"]
    names += ["time_to_first_token_seconds_count", "time_per_output_token_seconds_count"]

    def figures() -> list[float]:
        metrics = ask.metrics()
        return [metrics[f"vllm:{name}{SERIES}"] for name in names]

    keys = {"max_tokens": 5, "ignore_eos": True}
    for stream in (False, True):
        before = figures()
        answers = ask.stream(
            "lmm",
            text_input="hello",
            stream=stream,
            sampling_parameters=keys,
            return_num_input_tokens=True,
        )
        prompt = answers[0]["num_input_tokens"]
        added = [now - then for now, then in zip(figures(), before, strict=True)]
        assert added[:-1] == [prompt, 5, 1, 1, prompt, 5, 1]
        assert added[-1] == len(answers) - 1 if stream else 0 <= added[-1] <= 4


def test_a_failed_request_is_counted_as_one_error(ask: Asker) -> None:
    def errors() -> dict[tuple[str, str], float]:
        series = re.compile(r'vlora:request_errors_total\{code="(\w+)",model="(\w+)"')
        outcome = ((series.match(name), value) for name, value in ask.metrics().items())
        return {(match[2], match[1]): value for match, value in outcome if match}

    time.sleep(REFRESH_SECONDS)
    before = errors()
    assert len(before) == len(BY_CODE) * 4
    unknown = {"text_input": "What?", "sampling_parameters": {"lora_name": "unknown"}}
    corrupt = {"text_input": "What?", "image": b"no image", "sampling_parameters": {}}
    for model, question in (("video_analytics", unknown), ("lmm_unary", unknown), ("lmm", corrupt)):
        with pytest.raises(Refused):
            (ask.stream if model == "lmm" else ask.once)(model, **question)
    expected = {("lmm", "NOT_FOUND"): 2.0, ("vision_encoder", "INVALID_ARG"): 1.0}

    def added() -> dict[tuple[str, str], float]:
        return {key: now - before[key] for key, now in errors().items() if now != before[key]}

    until(lambda: added() == expected)


def test_requests_that_wait_anywhere_are_seen_in_one_series(ask: Asker) -> None:
    """The encoder's queue has most of the requests with images, of which only 16 are decoded."""

    def run(index: int) -> None:
        ask.once(
            "video_analytics", text_input="?", image=[picture((index, 9, k)) for k in range(9)]
        )

    def waiting() -> float:
        found = [v for k, v in ask.metrics().items() if k.startswith("vllm:num_requests_waiting")]
        assert len(found) == 1
        return found[0]

    def most() -> float:
        with ThreadPoolExecutor(60) as pool:
            requests = [pool.submit(run, index) for index in range(60)]
            seen = [0.0]
            while not all(request.done() for request in requests):
                seen.append(waiting())
                time.sleep(0.1)
        return max(seen)

    until(lambda: most() > 20)
    until(lambda: waiting() == 0)
    assert ask.metrics()['vlora:adapters_broken{model="lmm",version="1"}'] == 1
    (series,) = (name for name in ask.metrics() if name.startswith("vlora:adapter_broken{"))
    assert 'adapter="broken"' in series
    assert "adapter_config.json" in series


def test_two_hundred_concurrent_requests_are_all_answered(ask: Asker) -> None:
    """200 requests are more than the maximum number of calls of `lmm_unary`."""
    question = {"text_input": "What is this?", "image": picture((9, 9, 9))}
    alone = ask.once("video_analytics", **question)["text_output"]
    with ThreadPoolExecutor(200) as pool:
        outcome = [pool.submit(ask.once, "video_analytics", **question) for _ in range(200)]
    assert [one.result()["text_output"] for one in outcome] == [alone] * 200


def test_vlora_load_measures_what_the_server_has_done(ask: Asker, tmp_path: Path) -> None:
    def generated() -> float:
        return ask.metrics()[f"vllm:generation_tokens_total{SERIES}"]

    before, file = generated(), tmp_path / "load.json"
    given = "--rate 40 --seconds 0.5 --prompt-tokens 24 --output-tokens 4 --base-share 0.5"
    command = ["load", "--grpc", ask.grpc_url, "--adapters", "all-r8", "--json", str(file)]
    done = CliRunner().invoke(app, [*command, *given.split()])
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    summary, adapters = found["summary"], found["adapters"]
    assert (summary["answered"], summary["errors"], len(found["rows"])) == (20, {}, 20)
    assert summary["output_tokens"] == 4
    assert summary["prompt_tokens"] == pytest.approx(24, abs=2)
    assert {*adapters} == {"", "all-r8"}
    assert 0 < summary["first_token_s"]["mean"] < summary["end_to_end_s"]["mean"]
    until(lambda: generated() == before + 20 * 4 + 2)  # with the two questions that count tokens


@pytest.fixture(scope="module")
def perf_analyzer() -> fetch.PerfAnalyzer:
    if not (fetch.FOLDER / "bin" / "perf_analyzer").is_file():
        pytest.skip(
            "perf_analyzer is not installed; get it with: python -m benchmarks.perf_analyzer.fetch"
        )
    try:
        return fetch.ensure()
    except ClientError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("model", ["visual_retrieval", "video_analytics", "lmm"])
def test_perf_analyzer_runs_without_an_error(
    ask: Asker, perf_analyzer: fetch.PerfAnalyzer, tmp_path: Path, model: str
) -> None:
    names = ["base", "attention-r4", "all-r8"]
    data = write_inputs(tmp_path / "inputs.json", model, names, images=12, tokens=4)
    command = [perf_analyzer.program, "-m", model, "-u", ask.grpc_url, "-i", "grpc"]
    command += ["--input-data", data, "--concurrency-range", "4", "--request-count", "24"]
    if model != "video_analytics":
        command.append("--streaming")
    done = subprocess.run(
        command, env=perf_analyzer.environment, capture_output=True, text=True, timeout=120
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "Throughput" in said
    assert "error" not in said.lower(), said
