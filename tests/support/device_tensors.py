"""CPU tensors that cannot be mixed with others, as tensors of a GPU cannot be mixed with the CPU's.

In the context `separate_devices`, tensors on DEVICE are those that are created there or computed
from such tensors. An operation with a tensor on DEVICE and another one fails as it would on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cpu", 0)
"""The fake GPU. Tensors of the host are on torch.device("cpu")."""

TRANSFERS = {torch.Tensor.copy_, torch.Tensor.cpu, torch.Tensor.to}
"""Operations that may copy between devices."""

INTERPRETER = threading.RLock()
"""Held while Triton's interpreter runs a kernel."""

HOST_ONLY = {torch.Tensor.numpy, torch.Tensor.__array__}
"""Operations that fail on a GPU."""


class OnDevice(torch.Tensor):
    """A tensor on DEVICE."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Do not copy to DEVICE again, as torch does from "cpu" to "cpu:0"."""
        if args and args[0] == DEVICE:
            args = args[1:]
        return super().to(*args, **kwargs) if args or kwargs else self


class _Separation(TorchFunctionMode):
    """Marks tensors on DEVICE, and fails where they are mixed with others."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        on_device = any(isinstance(tensor, OnDevice) for tensor in given)
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return DEVICE if on_device else func(*args, **kwargs)
        target = _device_of(func, args, kwargs)
        if on_device and func in HOST_ONLY:
            raise TypeError("cannot convert a tensor of the GPU to numpy; use Tensor.cpu() first")
        if func is torch.Tensor.to and on_device and target == DEVICE:
            # As on a GPU, a tensor that is there already is not copied.
            args = [one for one in args if not isinstance(one, torch.device | str)]
            kwargs = {key: value for key, value in kwargs.items() if key != "device"}
            if len(args) == 1 and not kwargs:
                return args[0]
        others = [t for t in given if not isinstance(t, OnDevice) and t.ndim > 0]
        if on_device and others and func not in TRANSFERS:
            raise RuntimeError(
                f"{func}: expected all tensors to be on the same device, but found {DEVICE} and"
                f" the host, shape {list(others[0].shape)}"
            )
        result = func(*args, **kwargs)
        if func is torch.Tensor.cpu or (target is not None and target != DEVICE):
            return result.as_subclass(torch.Tensor)
        if func is torch.Tensor.copy_:
            return args[0]
        return _marked(result) if on_device or target == DEVICE else result


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _device_of(func: Any, args: Any, kwargs: Any) -> torch.device | None:
    """Return the device that a call names; None if it names none."""
    device = kwargs.get("device")
    if device is None and func is torch.Tensor.to:
        device = next((one for one in args[1:] if isinstance(one, torch.device | str)), None)
    return None if device is None else torch.device(device)


def _marked(result: Any) -> Any:
    if isinstance(result, torch.Tensor) and not isinstance(result, OnDevice):
        return result.as_subclass(OnDevice)
    if type(result) in (list, tuple):
        return type(result)(map(_marked, result))
    return result


@contextmanager
def separate_devices() -> Iterator[None]:
    """Separate tensors on DEVICE from others, on this thread. Interpreted kernels see both."""
    with _Separation():
        yield


def unseparated(run: Any) -> Any:
    """Return a function that does what `run` does, without separating tensors.

    One thread at a time calls `run`, because Triton's interpreter replaces functions of `tl` while
    a kernel runs.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        with INTERPRETER, torch._C.DisableTorchFunction():
            return run(*args, **kwargs)

    return call
