"""Triton's custom metrics as an implementation of `Registry`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from vlora.serving.registry import Metric


class TritonRegistry:
    """Makes custom metrics, with one family per name.

    The registry must live as long as its metrics, because Triton removes a family's metrics
    together with the family.
    """

    def __init__(self) -> None:
        self._families: dict[str, Any] = {}

    def gauge(self, name: str, help: str, labels: Mapping[str, str]) -> Metric:
        return self._metric(name, help, pb_utils.MetricFamily.GAUGE, labels)

    def counter(self, name: str, help: str, labels: Mapping[str, str]) -> Metric:
        return self._metric(name, help, pb_utils.MetricFamily.COUNTER, labels)

    def histogram(
        self, name: str, help: str, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> Metric:
        kind = pb_utils.MetricFamily.HISTOGRAM
        return self._metric(name, help, kind, labels, buckets=list(buckets))

    def drop(self, name: str) -> None:
        # Triton keeps a metric until its family is deleted; deleting the metric alone does nothing.
        del self._families[name]

    def _metric(
        self, name: str, help: str, kind: Any, labels: Mapping[str, str], **options: Any
    ) -> Metric:
        if name not in self._families:
            family = pb_utils.MetricFamily(name=name, description=help, kind=kind)
            self._families[name] = family
        metric: Metric = self._families[name].Metric(labels=dict(labels), **options)
        return metric
