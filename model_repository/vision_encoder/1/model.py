"""`vision_encoder` converts images and frames into features, which it caches by image content.

`execute` queues requests and returns at once, so requests wait in our queue instead of Triton's.
"""

from __future__ import annotations

import logging
from typing import Any

from vlora import cores
from vlora.adapters.catalog import FolderFinder
from vlora.device.cuda import open_device
from vlora.engine.checks import served_context
from vlora.live_requests import RequestTable
from vlora.model.decoder_config import dtype_of, load_config
from vlora.model.loader import adapter_shape
from vlora.serving.arrivals import ArrivalStamps
from vlora.serving.metrics import ENCODER_PROGRESS, EncoderExporter, ProgressExporter
from vlora.serving.model_process import options_of_instance
from vlora.serving.service import WaitingExporter
from vlora.serving.triton.process import TritonProcess
from vlora.serving.vision_encoder import VisionService
from vlora.vision.adapters import VisionAdapters
from vlora.vision.decoding import ImageDecoder
from vlora.vision.encoder import TextOnlyEncoder, open_encoder
from vlora.vision.features import EncoderService, FeatureCache
from vlora.vision.startup import check_encoder

MIN_DECODERS = 2
"""Minimum number of requests that are decoded at the same time."""


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._process = TritonProcess(args)
        options = options_of_instance(self._process.options, args)
        split = cores.split_threads(options)
        threads = split.encoder
        decoder = ImageDecoder(options.limits, max(MIN_DECODERS, threads))
        encoder = open_encoder(
            options.model,
            threads,
            dtype_of(options.dtype, options.model),
            open_device(options.device, options.encoder_memory_share),
        )
        config = load_config(options.model)
        check_encoder(encoder, config, options.model, split.engine)
        service = EncoderService(
            encoder,
            FeatureCache(options.feature_cache_bytes),
            context=served_context(options, config.context, options.kv_cache_tokens),
            pruning_rate=options.video_pruning_rate,
        )
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
            adapter_shape(options.model, config),
            FolderFinder(options.adapters, self._process.adapter_names()),
            options.limits.max_adapter_bytes,
            options.adapter_host_bytes,
            encoder.layers,
        )
        table = RequestTable(options.limits.max_in_flight_bytes)
        self._process.export(
            lambda registry: WaitingExporter(registry, self._process.labels, table)
        )
        self._service = VisionService(
            decoder,
            service,
            options.limits,
            ArrivalStamps.of_this_server(),
            table,
            max_requests=options.max_num_seqs + options.max_num_waiting,
            # The metrics must count an answer before its client receives it.
            before_answers=(lambda: None) if exporter is None else exporter.flush,
            part_of=self._adapters.part,
        )
        lifeline = self._process.lifeline
        # Otherwise, `lmm` would refuse these requests only when their images are encoded.
        lifeline.on_drain(lambda _: self._service.hand_over() if lifeline.hands_over else None)
        log = logging.getLogger("vlora")
        if isinstance(encoder, TextOnlyEncoder):
            log.info("the checkpoint is text-only: requests with images are refused")
        else:
            log.info("image features have a width of %d", encoder.hidden)
        self._process.freeze()

    def execute(self, requests: list[Any]) -> list[None]:
        if self._process.lifeline.draining:
            self._service.refuse()
        self._process.hand_over(requests, self._service)
        return [None] * len(requests)

    def finalize(self) -> None:
        self._service.close()
        self._adapters.close()
        self._process.close_metrics()
        self._process.release(self)
