"""`lmm` hosts the engine.

It is a decoupled model: `execute` passes requests on and returns at once.
"""

from __future__ import annotations

import logging
from typing import Any

from vlora.engine.loop import EngineLoop
from vlora.serving.arrivals import ArrivalStamps
from vlora.serving.lmm import LmmService, ServerDescription
from vlora.serving.metrics import ENGINE_PROGRESS, EngineExporter, ProgressExporter
from vlora.serving.model_process import options_of_instance, require_one_instance
from vlora.serving.peer_cancels import PeerCancels
from vlora.serving.service import with_waiting
from vlora.serving.tenant_pool import TenantPool
from vlora.serving.triton.process import TritonProcess
from vlora.vision.prompts import ChatTemplate

log = logging.getLogger("vlora")

ENCODE_THREADS = 16
"""Maximum number of simultaneous calls of the vision encoder."""


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._process = TritonProcess(args)
        require_one_instance(args)
        options = options_of_instance(self._process.options, args)
        for note in options.notes:
            log.info(note)
        self._loop = EngineLoop.from_options(options, self._process.adapter_names())
        self._pool = TenantPool(ENCODE_THREADS, "encode")
        exporter = self._process.export(
            lambda registry: EngineExporter(
                registry,
                self._process.labels,
                lambda: with_waiting(self._loop.stats(), self._loop.table),
                max_tokens=self._loop.max_model_len,
            ),
            progress=lambda registry: ProgressExporter(
                registry,
                self._process.labels,
                ENGINE_PROGRESS,
                lambda: self._loop.stats().steps,
            ),
        )
        if exporter is not None:
            # Metrics are written while the next step is computed. Written before a step's last
            # response, they would delay it. All responses of a step should leave together, so
            # that the clients' next images arrive together and are encoded as one batch.
            self._loop.after_outputs = exporter.catch_up
        self._peers = PeerCancels()
        self._service = LmmService(
            self._loop,
            ChatTemplate.from_checkpoint(options.model),
            options.limits,
            self._process.calls.encode_images,
            self._pool,
            ArrivalStamps.of_this_server(),
            observe=(lambda adapter: lambda output: None) if exporter is None else exporter.request,
            cancel_elsewhere=self._process.calls.cancel,
            tell_peers=self._peers.send,
            routes=options.route_adapters,
            describe=ServerDescription(
                lambda: self._loop.adapters.table, self._loop.max_model_len
            ).as_json,
        )
        lifeline = self._process.lifeline
        lifeline.on_drain(lambda seconds: self._loop.shutdown(seconds, lifeline.hands_over))
        self._process.freeze()

    def execute(self, requests: list[Any]) -> None:
        # Before, there is nothing to cancel, and Triton can crash if a model that it is still
        # initializing calls another one.
        self._peers.listen(self._service.cancel_here)
        self._process.hand_over(requests, self._service)

    def finalize(self) -> None:
        self._process.close_metrics()
        self._peers.close()
        self._service.close()
        # No request is running: Triton unloads a model only after its last request.
        self._loop.shutdown(0)
        self._pool.shutdown()
        self._process.release(self)
