"""`vision_encoder`: images and frames to features, in batches; encodes each distinct image once.

A request is answered as soon as its part of the batch is encoded. One that takes long to decode is
answered while the next batches are encoded.
"""

from __future__ import annotations

import logging
from typing import Any

from vlora import cores
from vlora.errors import Unavailable
from vlora.model.decoder_config import dtype_of
from vlora.serving.exporter import ENCODER_PROGRESS, EncoderExporter, ProgressExporter
from vlora.serving.triton.process import TritonProcess
from vlora.serving.triton.tensors import try_inputs
from vlora.serving.vision_encoder import Answers, VisionService
from vlora.vision.decoder import ImageDecoder
from vlora.vision.encoder import VisionEncoder
from vlora.vision.features import EncoderService, FeatureCache

MIN_DECODERS = 2
"""Minimum number of requests that are decoded at a time."""


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._process = TritonProcess(args)
        options = self._process.options
        threads = cores.split_threads(options).encoder
        decoder = ImageDecoder(options.limits, max(MIN_DECODERS, threads))
        encoder = VisionEncoder(
            options.model,
            threads,
            dtype_of(options.dtype, options.model),
        )
        service = EncoderService(encoder, FeatureCache(options.feature_cache_bytes))
        exporter = self._process.export(
            lambda registry: EncoderExporter(
                registry, self._process.labels, lambda: service.counters
            ),
            progress=lambda registry: ProgressExporter(
                registry,
                self._process.labels,
                ENCODER_PROGRESS,
                lambda: service.counters.images,
            ),
        )
        self._flush_metrics = (lambda: None) if exporter is None else exporter.flush
        self._service = VisionService(decoder, service, options.limits)
        logging.getLogger("vlora").info(
            "features per image: %d rows of width %d", encoder.rows, encoder.hidden
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer a batch.

        The answers of its last part are returned together, which is the cheapest way to send them.
        None stands for a request that has been answered before, or is still being decoded.
        """
        if self._process.lifeline.draining:
            refusal = Unavailable("the server is shutting down")
            return [self._process.response(refusal) for _ in requests]

        def send(answers: Answers) -> None:
            # Metrics are written first, so that a client with an answer finds it counted.
            self._flush_metrics()
            for index, answer in answers.items():
                self._process.responder(requests[index]).answer(answer)

        batch = [try_inputs(request) for request in requests]
        last = self._service.answer(batch, send)
        self._flush_metrics()
        return [
            self._process.response(last[index]) if index in last else None
            for index in range(len(requests))
        ]

    def finalize(self) -> None:
        self._service.close()
        self._process.close_metrics()
        self._process.release(self)
