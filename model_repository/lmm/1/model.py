"""`lmm`: hosts the engine. Decoupled: `execute` hands requests over and returns at once."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vlora.engine.loop import EngineLoop
from vlora.serving import glue
from vlora.serving.exporter import EngineExporter
from vlora.serving.lmm import LmmService
from vlora.serving.registry import Refresher
from vlora.vision.prompts import ChatTemplate

log = logging.getLogger("vlora")

BLS_THREADS = 16


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        lifeline = glue.set_up(args["model_name"])
        options = glue.options(args)
        for note in options.notes:
            log.info(note)
        glue.export_errors(options, args)
        self._loop = EngineLoop.from_options(options, glue.adapter_names(args))
        self._pool = ThreadPoolExecutor(BLS_THREADS, thread_name_prefix="encode")
        exporter = glue.exporter(
            options,
            lambda registry: EngineExporter(
                registry,
                glue.metric_labels(args),
                self._loop.stats,
                max_lora=len(self._loop.adapters.names()),
                max_tokens=self._loop.max_model_len,
            ),
        )
        self._refresher = None if exporter is None else Refresher(exporter)
        if exporter is not None:
            # While the next step is computed, not before the last response of a request: those
            # that end in one step shall come back, and be encoded again, together.
            self._loop.after_outputs = exporter.catch_up
        self._service = LmmService(
            self._loop,
            ChatTemplate.from_checkpoint(options.model),
            options.limits,
            glue.encode_images,
            self._pool,
            observe=(lambda: lambda output: None) if exporter is None else exporter.request,
            cancel_elsewhere=glue.cancel_unary,
        )
        lifeline.on_drain(self._loop.shutdown)

    def execute(self, requests: list[Any]) -> None:
        glue.hand_over(requests, self._service)

    def finalize(self) -> None:
        if self._refresher is not None:
            self._refresher.close()
        self._service.close()
        self._loop.shutdown(0)  # Triton unloads a model when none of its requests runs
        self._pool.shutdown(cancel_futures=True)
        glue.release(self)
