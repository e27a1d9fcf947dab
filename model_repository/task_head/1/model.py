"""`task_head` converts answers of the LMM into labels, boxes and counts."""

from __future__ import annotations

from typing import Any

from vlora.errors import VLoraError
from vlora.serving.responder import as_vlora_error
from vlora.serving.task_head import to_result
from vlora.serving.tensors import Tensors
from vlora.serving.triton.process import TritonProcess
from vlora.serving.triton.requests import inputs_of


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._process = TritonProcess(args)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._process.response(self._result(request)) for request in requests]

    def _result(self, request: Any) -> Tensors | VLoraError:
        try:
            return to_result(inputs_of(request), self._process.options.limits)
        except Exception as error:
            return as_vlora_error(error, "reading the answer")

    def finalize(self) -> None:
        self._process.release(self)
