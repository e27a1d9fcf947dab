"""`lmm_unary` answers like `lmm`, with one response per request."""

from __future__ import annotations

from typing import Any

from vlora.live_requests import RequestTable
from vlora.serving.arrivals import ArrivalStamps
from vlora.serving.lmm_unary import LmmUnaryService
from vlora.serving.service import WaitingExporter
from vlora.serving.tenant_pool import TenantPool
from vlora.serving.triton.process import TritonProcess

MAX_CALLS = 128
"""Maximum number of simultaneous calls of `lmm`. Further requests wait for a thread."""


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._process = TritonProcess(args)
        options = self._process.options
        self._pool = TenantPool(MAX_CALLS, "relay")
        table = RequestTable(options.limits.max_in_flight_bytes)
        self._process.export(
            lambda registry: WaitingExporter(registry, self._process.labels, table)
        )
        self._service = LmmUnaryService(
            self._process.calls.ask_lmm,
            self._pool,
            options.limits,
            ArrivalStamps.of_this_server(),
            table,
            max_requests=options.max_num_seqs + options.max_num_waiting,
            max_running=options.max_num_seqs,
        )
        self._process.freeze()

    def execute(self, requests: list[Any]) -> None:
        self._process.hand_over(requests, self._service)

    def finalize(self) -> None:
        self._process.close_metrics()
        self._service.close()
        self._pool.shutdown()
        self._process.release(self)
