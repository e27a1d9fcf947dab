"""Products with the weights, and what lies between them. Attention's are in its plan.

Rows are fp32 everywhere; weights are stored as fp32 or bf16. Every function takes `backend` to
override the default for one call, and those that make rows take `out`: [T, width] fp32, contiguous,
where they go, apart from what is read; None for a tensor of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vlora import backends, native
from vlora.backends import Backend
from vlora.kernels import reference


class Matrix:
    """A weight [d_out, d_in], contiguous, fp32 or bf16, and its bias, [d_out] fp32 or None: checked
    once, with their addresses, for all the steps that use them.

    Raises ValueError for what does not fit.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        if weight.dim() != 2 or weight.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"weight {tuple(weight.shape)} {weight.dtype} is no matrix")
        if not weight.is_contiguous():
            raise ValueError("all of weight must lie side by side")
        if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != torch.float32):
            raise ValueError(f"bias {tuple(bias.shape)} {bias.dtype} does not fit {len(weight)}")
        self.weight, self._bias = weight, bias
        width, depth = weight.shape
        self._native = (
            weight.data_ptr(),
            weight.dtype == torch.bfloat16,
            width,
            depth,
            0 if bias is None else bias.data_ptr(),
        )

    def __call__(
        self,
        x: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        also: Callable[[int, int, int, int, int], None] | None = None,
        backend: Backend | None = None,
    ) -> torch.Tensor:
        """x weightᵀ + bias; x: [T, d_in] fp32, rows may be strided → [T, d_out] fp32.

        also: what adds to the product: called with the addresses and strides (elements) of the
        product and of x, and the number of rows.

        Where the CPU multiplies pairs of bf16, x is rounded to bf16 for it; else bf16 is widened on
        its way. Raises ValueError for what does not fit.
        """
        width = self._native[2]
        at, stride, rows = self._rows(x)
        if (backend or backends.backend_of("kernels")) == "reference":
            y = given(reference.linear(x, self.weight, self._bias), out)
            to = y.data_ptr()
        else:
            y = place(out, rows, width)
            to = y.data_ptr()
            native.kernels().gemm.multiply(
                to, width, at, stride, rows, *self._native, torch.get_num_threads()
            )
        if also is not None:
            also(to, width, at, stride, rows)
        return y

    def gated(
        self,
        x: torch.Tensor,
        *,
        between: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        backend: Backend | None = None,
    ) -> torch.Tensor:
        """`gate` of the product, [T, d_out / 2], in one pass where the CPU has one.

        between: a place for the product, as `out` of a call, which may be left as it was.
        """
        width = self._native[2]
        if width % 2:
            raise ValueError(f"weight {tuple(self.weight.shape)} has no two halves")
        at, stride, rows = self._rows(x)
        if (backend or backends.backend_of("kernels")) == "reference":
            return given(reference.gate(reference.linear(x, self.weight, self._bias)), out)
        y, out = place(between, rows, width), place(out, rows, width // 2)
        native.kernels().gemm.multiply_gated(
            out.data_ptr(),
            y.data_ptr(),
            width,
            at,
            stride,
            rows,
            *self._native,
            torch.get_num_threads(),
        )
        return out

    def _rows(self, x: torch.Tensor) -> tuple[int, int, int]:
        """(address, elements from row to row, rows)"""
        if x.dim() != 2 or x.shape[1] != self._native[3]:
            raise ValueError(f"x {tuple(x.shape)} and weight {tuple(self.weight.shape)} do not fit")
        if x.dtype != torch.float32:
            raise ValueError(f"x must be fp32, not {x.dtype}")
        stride, column = x.stride()
        if column != 1:
            raise ValueError("columns of x must lie side by side")
        return x.data_ptr(), stride, x.shape[0]


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> torch.Tensor:
    """One product with a weight that is used once, or seldom: see `Matrix`."""
    return Matrix(weight, bias)(x, backend=backend)


def embed(
    tokens: torch.Tensor,
    table: torch.Tensor,
    images: Sequence[tuple[int, torch.Tensor, torch.Tensor]] = (),
    *,
    out: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """tokens: [T] int64; table: [words, width], contiguous, fp32 or bf16 → each token's row, [T,
    width].

    images: (first row, [n] int64 rows of features or a negative number for the table's, features
    [m, width] fp32): what stands there instead. Raises IndexError for a token without a row, or a
    row of features that is not there; ValueError for what does not fit.
    """
    if (backend or backends.backend_of("kernels")) == "reference":
        return given(reference.embed(tokens, table, images), out)
    rows, (words, width) = len(tokens), table.shape
    if table.dtype not in (torch.float32, torch.bfloat16) or not table.is_contiguous():
        raise ValueError(f"table {tuple(table.shape)} {table.dtype} does not lie side by side")
    if tokens.dim() != 1 or tokens.dtype != torch.int64 or not tokens.is_contiguous():
        raise ValueError(f"tokens {tuple(tokens.shape)} {tokens.dtype} are no row of int64")
    instead = torch.zeros(rows if images else 0, dtype=torch.int64)
    for first, which, features in images:
        fits = features.dim() == 2 and features.shape[1] == width and features.is_contiguous()
        if not fits or features.dtype != torch.float32 or not 0 <= first <= rows - len(which):
            raise ValueError(f"features {tuple(features.shape)} {features.dtype} do not fit")
        if len(which) and int(which.max()) >= len(features):
            raise IndexError(f"row {int(which.max())} is none of {len(features)} of features")
        at = features.data_ptr() + which * (4 * width)
        instead[first : first + len(which)] = torch.where(which >= 0, at, 0)
    out = place(out, rows, width)
    native.kernels().gemm.embed(
        out.data_ptr(),
        tokens.data_ptr(),
        instead.data_ptr() if images else 0,
        table.data_ptr(),
        table.dtype == torch.bfloat16,
        words,
        rows,
        width,
        torch.get_num_threads(),
    )
    return out


def add_norm(
    hidden: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """hidden += delta, in place, where there is one; → hidden / rms(hidden) · weight, by row.

    hidden, delta: [T, width] fp32, contiguous; weight: [width] fp32. rms: the root of the mean
    square plus eps. Raises ValueError for what does not fit.
    """
    if (backend or backends.backend_of("kernels")) == "reference":
        return given(reference.add_norm(hidden, delta, weight, eps), out)
    _check(hidden, weight)
    if delta is not None:
        _check(delta, weight)
        if delta.shape != hidden.shape:
            raise ValueError(f"{tuple(delta.shape)} cannot be added to {tuple(hidden.shape)}")
    out = place(out, *hidden.shape)
    native.kernels().gemm.add_norm(
        out.data_ptr(),
        hidden.data_ptr(),
        0 if delta is None else delta.data_ptr(),
        weight.data_ptr(),
        *hidden.shape,
        eps,
        torch.get_num_threads(),
    )
    return out


def gate(
    x: torch.Tensor, *, out: torch.Tensor | None = None, backend: Backend | None = None
) -> torch.Tensor:
    """x: [T, 2 · width] fp32, contiguous → silu(its left half) · its right half, [T, width]."""
    if (backend or backends.backend_of("kernels")) == "reference":
        return given(reference.gate(x), out)
    if x.dim() != 2 or x.shape[1] % 2 or x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(f"{tuple(x.shape)} {x.dtype} is no contiguous pair of fp32 halves")
    rows, width = x.shape[0], x.shape[1] // 2
    out = place(out, rows, width)
    native.kernels().gemm.gate(out.data_ptr(), x.data_ptr(), rows, width, torch.get_num_threads())
    return out


def largest(
    x: torch.Tensor, *, backend: Backend | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [T, width] fp32 → ([T] int64 place of each row's first largest value, [T] bool whether all
    of the row's are finite; where not, its place means nothing)."""
    if (backend or backends.backend_of("kernels")) == "reference":
        return reference.largest(x)
    if x.dim() != 2 or x.shape[1] < 1 or x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(f"{tuple(x.shape)} {x.dtype} are no contiguous rows of fp32")
    rows = x.shape[0]
    at, finite = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
    native.kernels().gemm.largest(
        at.data_ptr(), finite.data_ptr(), x.data_ptr(), *x.shape, torch.get_num_threads()
    )
    return at, finite


def place(out: torch.Tensor | None, rows: int, width: int) -> torch.Tensor:
    """`out`, if it can hold so many rows; where there is none, a new tensor."""
    if out is None:
        return torch.empty(rows, width)
    if out.shape != (rows, width) or out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError(
            f"out {tuple(out.shape)} {out.dtype} is no place for [{rows}, {width}] fp32, side by"
            " side"
        )
    return out


def given(found: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """What a twin has found, put where it was wanted."""
    return found if out is None else place(out, *found.shape).copy_(found)


def _check(rows: torch.Tensor, weight: torch.Tensor) -> None:
    fits = rows.dim() == 2 and rows.shape[1:] == weight.shape and rows.is_contiguous()
    if not fits or rows.dtype != torch.float32 or weight.dtype != torch.float32:
        raise ValueError(
            f"rows {tuple(rows.shape)} {rows.dtype} do not fit a norm of"
            f" {tuple(weight.shape)} {weight.dtype}, or do not lie side by side"
        )
