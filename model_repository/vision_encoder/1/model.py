"""`vision_encoder`: images and frames to features, in batches, each distinct image once.

A request is answered as soon as its part of the batch is encoded.
"""

from __future__ import annotations

import logging
from typing import Any

from vlora import cores
from vlora.errors import Unavailable
from vlora.model.decoder_config import dtype_of
from vlora.serving import glue
from vlora.serving.exporter import EncoderExporter
from vlora.serving.registry import Refresher
from vlora.serving.vision_encoder import Answers, encode_batch
from vlora.vision.encoder import VisionEncoder
from vlora.vision.features import EncoderService, FeatureCache


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._lifeline = glue.set_up(args["model_name"])
        options = glue.options(args)
        glue.export_errors(options, args)
        encoder = VisionEncoder(
            options.model,
            cores.of(options).encoder,
            dtype_of(options.dtype, options.model),
        )
        service = EncoderService(encoder, FeatureCache(options.feature_cache_bytes))
        exporter = glue.exporter(
            options,
            lambda registry: EncoderExporter(
                registry, glue.metric_labels(args), lambda: service.counters
            ),
        )
        self._flush = (lambda: None) if exporter is None else exporter.flush
        self._refresher = None if exporter is None else Refresher(exporter)
        self._limits = options.limits
        self._service = service
        logging.getLogger("vlora").info("%d rows of %d per image", encoder.rows, encoder.hidden)

    def execute(self, requests: list[Any]) -> list[Any]:
        """What the last part brings is returned together, which costs the least; None stands for
        what has been sent before."""
        if self._lifeline.draining:
            refusal = Unavailable("the server is shutting down")
            return [glue.error_response(refusal) for _ in requests]

        def send(answers: Answers) -> None:
            self._flush()  # who has an answer finds it counted
            for index, answer in answers.items():
                glue.answer(glue.TritonResponder(requests[index]), answer)

        batch = [glue.try_inputs(request) for request in requests]
        last = encode_batch(batch, self._service, self._limits, send)
        self._flush()
        return [glue.returned(last.get(index)) for index in range(len(requests))]

    def finalize(self) -> None:
        if self._refresher is not None:
            self._refresher.close()
        glue.release(self)
