"""`lmm_unary`: `lmm` with one response per request."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vlora.serving import glue
from vlora.serving.lmm_unary import LmmUnaryService

CALLS_AT_ONCE = 128


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        glue.set_up(args["model_name"])
        options = glue.options(args)
        glue.export_errors(options, args)
        self._pool = ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="relay")
        self._service = LmmUnaryService(
            glue.ask_lmm,
            self._pool,
            most=options.max_num_seqs + options.max_num_waiting,
            running=options.max_num_seqs,
        )

    def execute(self, requests: list[Any]) -> None:
        glue.hand_over(requests, self._service)

    def finalize(self) -> None:
        self._service.close()
        self._pool.shutdown()
        glue.release(self)
