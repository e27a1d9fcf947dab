"""`task_head` converts answers of the LMM into labels, boxes and counts."""

from __future__ import annotations

from typing import Any

from vlora.errors import VLoraError
from vlora.serving.responder import as_vlora_error
from vlora.serving.task_head import to_result
from vlora.serving.tensors import Tensors
from vlora.serving.triton.process import TritonProcess
from vlora.serving.triton.requests import inputs_of
from vlora.vision.results import pixels_per_patch


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._process = TritonProcess(args)
        self._pixels_per_patch = pixels_per_patch(self._process.options.model)
        self._process.freeze()

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._process.response(self._result(request)) for request in requests]

    def _result(self, request: Any) -> Tensors | VLoraError:
        try:
            limits = self._process.options.limits
            return to_result(inputs_of(request), limits, self._pixels_per_patch)
        except Exception as error:
            return as_vlora_error(error, "reading the answer")

    def finalize(self) -> None:
        self._process.release(self)
