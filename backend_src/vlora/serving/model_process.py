"""The process of a model: the GPU that its instance group names, and the end of its server.

Triton 2.51 does not notify its models when the server stops or has ended, so `Lifeline` notices it
without Triton.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from vlora import draining
from vlora.config import AUTO, Options
from vlora.errors import InvalidArgument
from vlora.server_run import RUN_VARIABLE, SERVER_VARIABLE, release_shared_memory

ON_GPU = ("GPU", "KIND_GPU")


def require_one_instance(args: Mapping[str, str]) -> None:
    """Raise InvalidArgument if the model, by the arguments of `initialize`, has several."""
    # A cancellation must reach the engine of its request, so a server has one engine.
    groups = json.loads(args.get("model_config") or "{}").get("instance_group", [])
    count = sum(group.get("count", 1) * max(1, len(group.get("gpus", ()))) for group in groups)
    if count > 1:
        raise InvalidArgument(
            f"the instance groups of '{args['model_name']}' have {count} instances; a server has"
            " one engine, so start a server for each GPU"
        )


def options_of_instance(options: Options, args: Mapping[str, str]) -> Options:
    """Return the options with the GPU that the model's instance group names, if any.

    Raises InvalidArgument unless the option `device` is "auto", "cuda" or that GPU.
    """
    if args.get("model_instance_kind") not in ON_GPU:
        return options
    gpu = f"cuda:{args['model_instance_device_id']}"
    if options.device not in (AUTO, "cuda", gpu):
        raise InvalidArgument(
            f"the instance group of '{args['model_name']}' names '{gpu}', but 'device' ="
            f' \'{options.device}\'; set it to "auto", "cuda" or "{gpu}"'
        )
    return replace(options, device=gpu)


POLL_SECONDS = 0.1

# Rejects new requests, lets running ones finish for these seconds, cancels the rest.
Drain = Callable[[float], None]


class Lifeline:
    """Watches the server on its own thread, from construction until `close`.

    **Invariant:** if the server ends, this process ends shortly afterwards, even in the middle of
    its work. Before that, the process unlinks the shared memory that a killed server leaves behind.

    The thread cannot act while Triton's Python backend holds the interpreter's lock: it waits for a
    server's reply to a metric, which a killed one never sends. `launcher/guard.py` then ends this
    process.
    """

    def __init__(self, model: str) -> None:
        run = os.environ.get(RUN_VARIABLE)
        self._folder = Path(run) if run else None
        self._name = f"{model}.{os.getpid()}"
        self._server = int(os.environ.get(SERVER_VARIABLE, os.getppid()))
        self._drain: Drain | None = None
        self._draining = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lifeline", daemon=True)
        self._thread.start()

    @property
    def draining(self) -> bool:
        """True once the server has started to stop. New requests must then be rejected."""
        return self._draining.is_set()

    @property
    def hands_over(self) -> bool:
        """True if the server stops, and others shall answer the requests that have not begun."""
        return self.draining and self._folder is not None and draining.hands_over(self._folder)

    def on_drain(self, drain: Drain) -> None:
        """Set a function that is called once, when the server starts to stop. It waits for it."""
        if self._folder is not None:
            draining.register(self._folder, self._name)
        self._drain = drain

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._drain = None

    def _watch(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            if os.getppid() != self._server:
                self._end()
            if self._folder is not None and not (self.draining and self._drain is None):
                # If there is no free file descriptor or thread at present, look again later.
                with suppress(OSError, RuntimeError):
                    self._look(self._folder)

    def _end(self) -> NoReturn:
        try:
            if self._folder is not None:
                release_shared_memory(self._folder)
        finally:
            os._exit(1)

    def _look(self, folder: Path) -> None:
        """Drain on a new thread once the server has started to stop, and continue to watch."""

        def finish(drain: Drain) -> None:
            try:
                drain(seconds)
            finally:
                draining.deregister(folder, self._name)

        found = draining.seconds_left(folder)
        if found is not None:
            seconds = found
            self._draining.set()
            if (drain := self._drain) is not None:
                threading.Thread(target=finish, args=[drain], name="drain", daemon=True).start()
                self._drain = None
