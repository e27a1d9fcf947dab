"""Triton's gRPC messages and stub, imported without numpy.

`tritonclient.grpc` imports numpy and ml_dtypes for its client, which takes more processor time than
the rest of `vlora probe`. Its generated modules need neither.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

PACKAGE = "tritonclient.grpc"


def load_grpc_stubs() -> tuple[ModuleType, ModuleType]:
    """Return the modules `service_pb2` and `service_pb2_grpc` of tritonclient.

    While they are imported, an empty package takes the place of tritonclient.grpc, so that its
    `__init__` does not run. Later imports of the package are not affected.

    Raises ModuleNotFoundError, with the command that installs tritonclient, if it is missing.
    """
    stand_in = None
    if PACKAGE not in sys.modules:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError(
                f"{PACKAGE} is not installed; install it with: pip install 'vlora[server]'"
            )
        stand_in = ModuleType(PACKAGE)
        stand_in.__path__ = list(spec.submodule_search_locations)
        sys.modules[PACKAGE] = stand_in
    try:
        return (
            importlib.import_module(f"{PACKAGE}.service_pb2"),
            importlib.import_module(f"{PACKAGE}.service_pb2_grpc"),
        )
    finally:
        if stand_in is not None:
            del sys.modules[PACKAGE]
