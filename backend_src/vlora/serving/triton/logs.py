"""Handler that writes the log records of `vlora` to Triton's log."""

from __future__ import annotations

import logging

import triton_python_backend_utils as pb_utils


class TritonHandler(logging.Handler):
    """Writes log records to Triton's log with the same severity; never raises."""

    def emit(self, record: logging.LogRecord) -> None:
        logger = pb_utils.Logger
        try:
            # Triton takes only text that can be encoded.
            text = self.format(record).encode(errors="backslashreplace").decode()
            if record.levelno >= logging.ERROR:
                logger.log_error(text)
            elif record.levelno >= logging.WARNING:
                logger.log_warn(text)
            else:
                logger.log_info(text)
        except Exception:
            self.handleError(record)


def log_to_triton(model: str) -> None:
    """Send the log of `vlora` to Triton's, with the model's name at the start of each line."""
    handler = TritonHandler()
    handler.setFormatter(logging.Formatter(f"[{model}] %(message)s"))
    logger = logging.getLogger("vlora")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
