"""Interface of the step's kernels: products with the weights, embedding, norm, gate, argmax.

Activations are fp32 everywhere; weights are stored as fp32 or bf16. Every function takes `backend`
to override the default for one call. Those that return rows take `out`, a contiguous [T, width]
fp32 tensor for the result that does not overlap the inputs; None allocates it. Attention has its
own interface (`model/attention.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vlora import backends, native
from vlora.backends import Backend
from vlora.kernels import reference

Epilogue = Callable[[int, int, int, int, int], None]
"""Adds to a product in place.

Called with the address of the product, its row stride in elements, the address of x, its row
stride in elements, and the number of rows.
"""


class Matrix:
    """A weight and its bias, checked once for all the steps that use them.

    weight: [d_out, d_in], contiguous, fp32 or bf16. bias: [d_out] fp32, or None.

    Raises ValueError for a wrong shape, type or layout.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        if weight.dim() != 2 or weight.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"weight {tuple(weight.shape)} {weight.dtype} must be a matrix of fp32 or bf16"
            )
        if not weight.is_contiguous():
            raise ValueError(f"weight with strides {weight.stride()} must be contiguous")
        if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != torch.float32):
            raise ValueError(
                f"bias {tuple(bias.shape)} {bias.dtype} must be [{len(weight)}] of fp32"
            )
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
        epilogue: Epilogue | None = None,
        backend: Backend | None = None,
    ) -> torch.Tensor:
        """Return x weightᵀ + bias, [T, d_out] fp32.

        x: [T, d_in] fp32, whose rows may be strided.
        epilogue: called once the product is complete.

        Where the CPU has an instruction for products of bf16 pairs, x is rounded to bf16 for a bf16
        weight; elsewhere the weight is widened to fp32. Raises ValueError for a wrong shape, type
        or layout.
        """
        width = self._native[2]
        x_address, x_stride, rows = self._check_rows(x)
        if (backend or backends.backend_of("kernels")) == "reference":
            y = copy_out(reference.linear(x, self.weight, self._bias), out)
            y_address = y.data_ptr()
        else:
            y = alloc_out(out, rows, width)
            y_address = y.data_ptr()
            native.kernels().gemm.multiply(
                y_address,
                width,
                x_address,
                x_stride,
                rows,
                *self._native,
                torch.get_num_threads(),
            )
        if epilogue is not None:
            epilogue(y_address, width, x_address, x_stride, rows)
        return y

    def gated(
        self,
        x: torch.Tensor,
        *,
        scratch: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        backend: Backend | None = None,
    ) -> torch.Tensor:
        """Return `gate` of the product, [T, d_out / 2] fp32, in one pass where the CPU has one.

        scratch: [T, d_out] fp32, contiguous, overwritten where the product is stored in between;
            None allocates it.
        """
        width = self._native[2]
        if width % 2:
            raise ValueError(
                f"weight {tuple(self.weight.shape)} must have an even number of rows to be gated"
            )
        x_address, x_stride, rows = self._check_rows(x)
        if (backend or backends.backend_of("kernels")) == "reference":
            return copy_out(reference.gate(reference.linear(x, self.weight, self._bias)), out)
        scratch, out = alloc_out(scratch, rows, width), alloc_out(out, rows, width // 2)
        native.kernels().gemm.multiply_gated(
            out.data_ptr(),
            scratch.data_ptr(),
            width,
            x_address,
            x_stride,
            rows,
            *self._native,
            torch.get_num_threads(),
        )
        return out

    def _check_rows(self, x: torch.Tensor) -> tuple[int, int, int]:
        """Check the input and return its address, its row stride in elements and its rows."""
        if x.dim() != 2 or x.shape[1] != self._native[3]:
            raise ValueError(
                f"x {tuple(x.shape)} does not fit weight {tuple(self.weight.shape)}"
                f"; x must be [rows, {self._native[3]}]"
            )
        if x.dtype != torch.float32:
            raise ValueError(f"x is {x.dtype}; it must be fp32")
        row_stride, column_stride = x.stride()
        if column_stride != 1:
            raise ValueError(f"x with strides {x.stride()} must have contiguous rows")
        return x.data_ptr(), row_stride, x.shape[0]


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Return x weightᵀ + bias, for a weight that is used once or rarely; see `Matrix`."""
    return Matrix(weight, bias)(x, backend=backend)


def embed(
    tokens: torch.Tensor,
    table: torch.Tensor,
    images: Sequence[tuple[int, torch.Tensor, torch.Tensor]] = (),
    *,
    out: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Return the embedding of each token, [T, width] fp32, or the image feature that replaces it.

    tokens: [T] int64.
    table: [vocabulary, width], contiguous, fp32 or bf16.
    images: (first_row, feature_rows, features) of each image range. Row `first_row + i` becomes
        `features[feature_rows[i]]` unless `feature_rows[i]` is negative. feature_rows: [n] int64;
        features: [m, width] fp32, contiguous.

    Raises IndexError for a token outside the table or a feature row that does not exist, ValueError
    for a wrong shape, type or layout.
    """
    if (backend or backends.backend_of("kernels")) == "reference":
        return copy_out(reference.embed(tokens, table, images), out)
    rows, (words, width) = len(tokens), table.shape
    if table.dtype not in (torch.float32, torch.bfloat16) or not table.is_contiguous():
        raise ValueError(
            f"table {tuple(table.shape)} {table.dtype} must be contiguous fp32 or bf16"
        )
    if tokens.dim() != 1 or tokens.dtype != torch.int64 or not tokens.is_contiguous():
        raise ValueError(
            f"tokens {tuple(tokens.shape)} {tokens.dtype} must be a contiguous vector of int64"
        )
    # Address of the image feature that each row shows, 0 where it shows its token.
    feature_addresses = torch.zeros(rows if images else 0, dtype=torch.int64)
    for first_row, feature_rows, features in images:
        fits = features.dim() == 2 and features.shape[1] == width and features.is_contiguous()
        in_step = 0 <= first_row <= rows - len(feature_rows)
        if not fits or features.dtype != torch.float32 or not in_step:
            raise ValueError(
                f"features {tuple(features.shape)} {features.dtype} for {len(feature_rows)} rows"
                f" from {first_row} must be contiguous [m, {width}] fp32 within {rows} rows"
            )
        if len(feature_rows) and int(feature_rows.max()) >= len(features):
            raise IndexError(
                f"row {int(feature_rows.max())} of features is out of range; there are"
                f" {len(features)} rows"
            )
        addresses = features.data_ptr() + feature_rows * (4 * width)
        feature_addresses[first_row : first_row + len(feature_rows)] = torch.where(
            feature_rows >= 0, addresses, 0
        )
    out = alloc_out(out, rows, width)
    native.kernels().gemm.embed(
        out.data_ptr(),
        tokens.data_ptr(),
        feature_addresses.data_ptr() if images else 0,
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
    """Add `delta` to `hidden` in place and return its RMS norm, [T, width] fp32.

    Semantics: hidden += delta; hidden / sqrt(mean(hidden²) + eps) · weight, by row.

    hidden: [T, width] fp32, contiguous. delta: of the same shape, or None to add nothing.
    weight: [width] fp32. Raises ValueError for a wrong shape, type or layout.
    """
    if (backend or backends.backend_of("kernels")) == "reference":
        return copy_out(reference.add_norm(hidden, delta, weight, eps), out)
    _check_norm(hidden, weight)
    if delta is not None:
        _check_norm(delta, weight)
        if delta.shape != hidden.shape:
            raise ValueError(
                f"delta {tuple(delta.shape)} must have the shape of hidden {tuple(hidden.shape)}"
            )
    out = alloc_out(out, *hidden.shape)
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
    """Return silu(left half of x) · right half of x, [T, width] fp32.

    x: [T, 2 · width] fp32, contiguous. Raises ValueError for a wrong shape, type or layout.
    """
    if (backend or backends.backend_of("kernels")) == "reference":
        return copy_out(reference.gate(x), out)
    if x.dim() != 2 or x.shape[1] % 2 or x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} must be contiguous [rows, 2 · width] of fp32"
        )
    rows, width = x.shape[0], x.shape[1] // 2
    out = alloc_out(out, rows, width)
    native.kernels().gemm.gate(out.data_ptr(), x.data_ptr(), rows, width, torch.get_num_threads())
    return out


def argmax(x: torch.Tensor, *, backend: Backend | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index of each row's first largest value, and whether all its values are finite.

    x: [T, width] fp32, contiguous. Returns [T] int64 and [T] bool; the index of a row with a value
    that is not finite is meaningless. Raises ValueError for a wrong shape, type or layout.
    """
    if (backend or backends.backend_of("kernels")) == "reference":
        return reference.argmax(x)
    if x.dim() != 2 or x.shape[1] < 1 or x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} must be contiguous rows of fp32")
    rows = x.shape[0]
    indices, finite = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
    native.kernels().gemm.argmax(
        indices.data_ptr(), finite.data_ptr(), x.data_ptr(), *x.shape, torch.get_num_threads()
    )
    return indices, finite


def alloc_out(out: torch.Tensor | None, rows: int, width: int) -> torch.Tensor:
    """Return `out`, or a new [rows, width] fp32 tensor if it is None.

    Raises ValueError if `out` has a wrong shape, type or layout.
    """
    if out is None:
        return torch.empty(rows, width)
    if out.shape != (rows, width) or out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError(
            f"out {tuple(out.shape)} {out.dtype} with strides {out.stride()} must be contiguous"
            f" [{rows}, {width}] of fp32"
        )
    return out


def copy_out(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Return `result`, copied into `out` unless that is None."""
    return result if out is None else alloc_out(out, *result.shape).copy_(result)


def _check_norm(rows: torch.Tensor, weight: torch.Tensor) -> None:
    fits = rows.dim() == 2 and rows.shape[1:] == weight.shape and rows.is_contiguous()
    if not fits or rows.dtype != torch.float32 or weight.dtype != torch.float32:
        raise ValueError(
            f"rows {tuple(rows.shape)} {rows.dtype} do not fit a norm weight"
            f" {tuple(weight.shape)} {weight.dtype}; both must be fp32 and the rows contiguous"
            " [rows, width]"
        )
