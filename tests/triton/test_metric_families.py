"""Tests that a real server removes time series of metrics that no longer hold."""

from __future__ import annotations

from pathlib import Path

from tests.support.triton_client import Asker, asking
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer
from vlora.serving.metrics import MAX_LORA_SERIES

MODEL = """
from vlora.metrics import EngineStats
from vlora.serving.metrics import EngineExporter
from vlora.serving.triton.process import TritonRegistry
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.count = 0
        self.registry = TritonRegistry()
        self.exporter = EngineExporter(self.registry, {}, self.stats, max_tokens=10)

    def stats(self):
        return EngineStats(waiting_adapters={f"adapter-{self.count}": 1})

    def execute(self, requests):
        for _ in range(100):
            self.count += 1
            self.exporter.flush()
        return [pb_utils.InferenceResponse([]) for _ in requests]

    def finalize(self):
        del self.exporter, self.registry
"""
CONFIG = """
name: "changes"
backend: "python"
input [{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }]
output [{ name: "none" data_type: TYPE_STRING dims: [ 1 ] }]
"""


def lora_series(ask: Asker) -> dict[str, float]:
    return {k: v for k, v in ask.metrics().items() if k.startswith("vllm:lora_requests_info")}


def test_the_lora_metric_names_the_present_adapters_after_many_changes(tmp_path: Path) -> None:
    (tmp_path / "changes" / "1").mkdir(parents=True)
    (tmp_path / "changes" / "1" / "model.py").write_text(MODEL)
    (tmp_path / "changes" / "config.pbtxt").write_text(CONFIG)
    with TritonServer(ServerOptions(repository=tmp_path)) as server, asking(server) as ask:
        for round in range(1, 5):
            ask.once("changes", text_input="?")
            series = lora_series(ask)
            assert 0 < len(series) <= MAX_LORA_SERIES
            assert f'"adapter-{100 * round}"' in max(series, key=lambda name: series[name])
