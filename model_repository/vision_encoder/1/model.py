"""`vision_encoder` converts images and frames into features, which it caches by image content.

`execute` queues requests and returns at once, so requests wait in our queue instead of Triton's.
"""

from __future__ import annotations

import logging
from typing import Any

from vlora import cores
from vlora.adapters.catalog import FolderFinder
from vlora.device.cuda import open_device
from vlora.errors import Unavailable, VLoraError
from vlora.model.decoder_config import dtype_of, load_config
from vlora.model.loader import adapter_shape
from vlora.serving.arrivals import ArrivalStamps
from vlora.serving.instance import options_of_instance
from vlora.serving.metrics import ENCODER_PROGRESS, EncoderExporter, ProgressExporter
from vlora.serving.requests import WaitingExporter, WaitingRequests
from vlora.serving.responder import as_vlora_error
from vlora.serving.tensors import Tensors
from vlora.serving.triton.process import TritonProcess
from vlora.serving.triton.responder import id_of, inputs_of, parameters_of
from vlora.serving.vision_encoder import VisionService
from vlora.vision.adapters import VisionAdapters
from vlora.vision.decoding import ImageDecoder
from vlora.vision.encoder import TextOnlyEncoder, open_encoder
from vlora.vision.features import EncoderService, FeatureCache

MIN_DECODERS = 2
"""Minimum number of requests that are decoded at the same time."""


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._process = TritonProcess(args)
        options = options_of_instance(self._process.options, args)
        threads = cores.split_threads(options).encoder
        decoder = ImageDecoder(options.limits, max(MIN_DECODERS, threads))
        encoder = open_encoder(
            options.model,
            threads,
            dtype_of(options.dtype, options.model),
            open_device(options.device, options.encoder_memory_share),
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
        self._adapters = VisionAdapters(
            adapter_shape(options.model, load_config(options.model)),
            FolderFinder(options.adapters, self._process.adapter_names()),
            options.limits.max_adapter_bytes,
            options.adapter_host_bytes,
            encoder.layers,
        )
        waiting = WaitingRequests()
        self._process.export(
            lambda registry: WaitingExporter(registry, self._process.labels, waiting)
        )
        self._service = VisionService(
            decoder,
            service,
            options.limits,
            ArrivalStamps.of_this_server(),
            waiting,
            max_requests=options.max_num_seqs + options.max_num_waiting,
            # The metrics must count an answer before its client receives it.
            before_answers=(lambda: None) if exporter is None else exporter.flush,
            part_of=self._adapters.part,
        )
        log = logging.getLogger("vlora")
        if isinstance(encoder, TextOnlyEncoder):
            log.info("the checkpoint is text-only: requests with images are refused")
        else:
            log.info("image features have a width of %d", encoder.hidden)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer the requests without images. Queue the others, and return None in their place."""
        answers = [self._answer(request) for request in requests]
        return [None if one is None else self._process.response(one) for one in answers]

    def _answer(self, request: Any) -> Tensors | VLoraError | None:
        if self._process.lifeline.draining:
            return Unavailable("the server is shutting down")
        try:
            limits = self._process.options.limits
            arguments = inputs_of(request), parameters_of(request, limits), id_of(request)
        except Exception as error:
            return as_vlora_error(error, "reading the request")
        return self._service.handle(*arguments, lambda: self._process.responder(request))

    def finalize(self) -> None:
        self._service.close()
        self._adapters.close()
        self._process.close_metrics()
        self._process.release(self)
