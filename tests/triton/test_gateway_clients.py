"""Tests of unchanged OpenAI clients and of our example, with the gateway of a real server.

VLORA_NODE_MODULES is a folder `node_modules` that contains the npm package `openai`.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.gateway import Gateway
from tests.support.polling import until
from tests.support.triton_client import Asker, picture
from vlora.cli import app

pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")

ROOT = Path(__file__).parents[2]
MODULES = os.environ.get("VLORA_NODE_MODULES", "")
DATA_URL = "data:image/png;base64," + base64.b64encode(picture()).decode()
QUESTION = "What color is the square?"
MESSAGE = [
    {"type": "image_url", "image_url": {"url": DATA_URL}},
    {"type": "text", "text": QUESTION},
]


@pytest.fixture(scope="module")
def expected(gateway: Gateway) -> str:
    """Return the answer to the question about the picture, of eight tokens."""
    body = {"model": "base", "max_tokens": 8, "messages": [{"role": "user", "content": MESSAGE}]}
    status, text = gateway.http("/v1/chat/completions", json.dumps(body).encode())
    assert status == 200
    return str(json.loads(text)["choices"][0]["message"]["content"])


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
@pytest.mark.skipif(not Path(MODULES, "openai").is_dir(), reason="VLORA_NODE_MODULES has no openai")
def test_the_official_npm_package(gateway: Gateway, ask: Asker, expected: str) -> None:
    script = ROOT / "tests" / "support" / "openai_client.mjs"
    done = subprocess.run(
        ["node", script, gateway.address, DATA_URL],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "all-r8" in found["models"]
    assert found["whole"] == found["streamed"] == expected
    assert found["usage"] == 8
    assert (found["unknown"], found["wrong"]) == ("NOT_FOUND", "INVALID_ARG")
    assert found["pieces"] == 3
    until(lambda: gateway.running() == 0)
    until(lambda: ask.metrics()['vllm:num_requests_running{model="lmm",version="1"}'] == 0)


def test_langchain(gateway: Gateway, expected: str) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    model = langchain.ChatOpenAI(
        base_url=f"http://{gateway.address}/v1",
        api_key="none",
        model="base",
        max_tokens=8,
        max_retries=0,
        temperature=0,
    )
    message = [{"role": "user", "content": MESSAGE}]
    answer = model.invoke(message)
    assert answer.content == expected
    assert answer.usage_metadata["output_tokens"] == 8
    assert "".join(chunk.content for chunk in model.stream(message)) == expected
    with pytest.raises(Exception, match="'nothing'"):
        model.bind(model="nothing").invoke(message)


@pytest.mark.filterwarnings("ignore")  # The warnings concern litellm's own types.
def test_litellm(gateway: Gateway, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise litellm downloads a file when it is imported.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    options: dict[str, Any] = {
        "model": "openai/base",
        "api_base": f"http://{gateway.address}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": MESSAGE}],
        "max_tokens": 8,
        "num_retries": 0,
    }
    answer = litellm.completion(**options)
    assert answer.choices[0].message.content == expected
    pieces = litellm.completion(**options, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**options, temperature=-1)


def test_the_example_of_an_openai_client(gateway: Gateway, expected: str, tmp_path: Path) -> None:
    pytest.importorskip("openai", reason="the package openai is not installed")
    image, broken = tmp_path / "scene.png", tmp_path / "broken.png"
    image.write_bytes(picture())
    broken.write_bytes(b"no picture")

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, ROOT / "clients" / "openai_example.py", *map(str, arguments)]
        url = ("--url", f"http://{gateway.address}/v1", "--max-tokens", "8")
        return subprocess.run(
            [*command, *url], capture_output=True, text=True, timeout=120, check=False
        )

    assert run(image, QUESTION).stdout == expected + "\n"
    assert run(image, QUESTION, "--stream").stdout == expected + "\n"
    each = run(image, broken, QUESTION, "--each")
    assert each.stdout.startswith(f"{image}: {expected}\n{broken}: error: ")
    assert "all-r8" in run("--list").stdout.split()
    unknown = run(image, QUESTION, "--model", "nothing")
    assert unknown.returncode == 1
    assert unknown.stderr.startswith("error: NOT_FOUND: unknown adapter 'nothing'")
    assert unknown.stderr.endswith("; the base model is 'base'\n")
    assert "Traceback" not in unknown.stderr
    assert run().stderr.endswith("give a question, with the images before it\n")


def test_vlora_load_measures_a_gateway(gateway: Gateway, tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    given = (
        "--rate 20 --seconds 0.5 --prompt-tokens 40 --output-tokens 4 --images 1 --image-size 32"
    )
    command = ["load", "--openai", f"http://{gateway.address}/v1", "--json", str(file)]
    done = CliRunner().invoke(app, [*command, *given.split(), "--adapters", "all-r8,unknown"])
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    known, unknown = (found["adapters"][name] for name in ("all-r8", "unknown"))
    assert known["answered"] == known["requests"] > 0
    assert known["output_tokens"] == 4
    assert unknown["errors"] == {"NOT_FOUND": unknown["requests"]}
    assert "errors NOT_FOUND: unknown adapter 'unknown'" in done.output
