"""`task_head`: answers of the LMM as labels, boxes and counts."""

from __future__ import annotations

from typing import Any

from vlora.serving import glue
from vlora.serving.responder import as_vlora_error
from vlora.serving.task_head import to_result


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        glue.set_up(args["model_name"])
        options = glue.options(args)
        glue.export_errors(options, args)
        self._limits = options.limits

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            return glue.response(to_result(glue.inputs(request), self._limits))
        except Exception as error:
            return glue.error_response(as_vlora_error(error, "reading the answer"))

    def finalize(self) -> None:
        glue.release(self)
