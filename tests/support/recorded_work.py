"""Records of the launches that a captured graph of some work would contain, with their arguments.

A graph stores the addresses and numbers with which its work was captured. So a replay on a GPU is
correct only if the work, executed again, would launch the same calls with the same arguments. Only
the addresses of tensors that the work itself allocates may differ, because they are in the graph's
own memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.count_launches import NO_LAUNCH
from vlora.atmm.cuda.library import CallStruct, Library, ProjectionStruct

UNCAPTURABLE = {"_local_scalar_dense", "lift_fresh", "nonzero", "unique"}
"""Operations that wait for a GPU or copy from pageable host memory."""

POISON = 0xFF
"""Byte whose repetition is NaN in every floating-point type, and -1 in integers."""

Launch = tuple[Any, ...]


class Record(TorchDispatchMode):
    """Launches of GPU kernels, of ATMM and of torch while some work runs, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self._allocated: list[range] = []
        """Addresses of the tensors that the work has allocated."""
        self._temporary: list[torch.Tensor] = []
        """Tensors that the work has allocated. Their addresses are not used again meanwhile."""
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Bytes of each other tensor that the work uses, and their copy from before their use."""
        self._in_kernel = False

    @classmethod
    def of(cls, work: Callable[[], object], *, undo: bool = False) -> list[Launch]:
        """Run `work` and return its launches. Kernels are interpreted.

        Afterwards the tensors that the work has allocated are overwritten, because a graph's next
        replay, or another graph in the same pool, uses their memory again.

        undo: whether to restore all other tensors that the work has changed.
        """
        from triton.runtime.interpreter import GridExecutor

        record, run, apply = cls(), GridExecutor.__call__, Library.apply

        def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
            record._add(executor.fn.__name__, (executor.grid, args, kwargs))
            record._in_kernel = True
            try:
                record._keep((args, kwargs))
                return run(executor, *args, **kwargs)
            finally:
                record._in_kernel = False

        def call(library: Library, call: CallStruct, tiles: Any, stream: int) -> None:
            record._add("atmm", (_values(call), _values(tiles)))
            apply(library, call, tiles, stream)

        with (
            patch.object(GridExecutor, "__call__", launch),
            patch.object(Library, "apply", call),
            record,
        ):
            work()
        for temporary in record._temporary:
            _bytes(temporary).fill_(POISON)
        if undo:
            for memory, before in record._before.values():
                memory.copy_(before)
        return record.launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._in_kernel:
            return func(*args, **(kwargs or {}))
        self._keep((args, kwargs))
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        assert name not in UNCAPTURABLE, f"a graph cannot contain '{name}'"
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given:
                start = storage.data_ptr()
                self._allocated.append(range(start, start + storage.nbytes()))
                self._temporary.append(tensor)
        if name not in NO_LAUNCH:
            self._add(name, (args, kwargs))
        return result

    def _keep(self, arguments: Any) -> None:
        """Copy the memory of tensors that the work has not allocated and not used before."""
        for tensor in _tensors(arguments):
            start = tensor.untyped_storage().data_ptr()
            if start not in self._before and self._address(start) != "allocated":
                memory = _bytes(tensor)
                self._before[start] = memory, memory.clone()

    def _add(self, name: str, arguments: Any) -> None:
        self.launches.append((name, self._plain(arguments)))

    def _plain(self, value: Any) -> Any:
        """Return arguments without tensors: these become addresses, shapes and types."""
        if isinstance(value, torch.Tensor):
            return self._address(value.data_ptr()), tuple(value.shape), value.stride(), value.dtype
        if isinstance(value, _Address):
            return self._address(value)
        if isinstance(value, dict):
            return {key: self._plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return tuple(self._plain(item) for item in value)
        return value

    def _address(self, address: int) -> int | str:
        return "allocated" if any(address in memory for memory in self._allocated) else int(address)


class _Address(int):
    """An address in a structure of the C interface."""


def _values(struct: ctypes.Structure) -> dict[str, Any]:
    """Return the fields of a structure, with pointers as `_Address`."""
    values: dict[str, Any] = {}
    for name, kind in struct._fields_:  # type: ignore[misc]
        value = getattr(struct, name)
        if kind is ctypes.c_void_p:
            value = _Address(value or 0)
        elif isinstance(value, ctypes.Array):
            value = [_values(v) if isinstance(v, ProjectionStruct) else v for v in value]
        values[name] = value
    return values


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return all tensors in nested arguments or results."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole memory of a tensor's storage, uint8."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
