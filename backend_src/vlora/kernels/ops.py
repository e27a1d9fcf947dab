"""Interface of the step's kernels: products with the weights, embedding, norms, gate, argmax.

Activations are fp32, except on a GPU (`on_gpu`). Weights are fp32 or bf16, or fp16 on a GPU. The
tensors' device decides the backend, unless `backend` overrides it. `out` is a contiguous
[T, width] tensor of the activations' type for the result; it is allocated if None. All functions
raise ValueError for a wrong shape, type or layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from vlora import backends, native
from vlora.backends import Backend
from vlora.kernels import on_gpu, reference

# Function that adds to a product in place. Its arguments are: address of the product, row stride of
# the product in elements, address of x, row stride of x in elements, and number of rows.
Epilogue = Callable[[int, int, int, int, int], None]


class Matrix:
    """A weight with its bias. Both are checked once, for all steps that use them.

    weight: [d_out, d_in], contiguous, fp32 or bf16, or fp16 on a GPU.
    bias: None, or [d_out] in fp32; on a GPU, in fp32 or in the weight's type.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        for_gpu = backends.backend_of("kernels", weight.device.type) == "gpu"
        served = (torch.float32, torch.bfloat16, *[torch.float16] * for_gpu)
        if weight.dim() != 2 or weight.dtype not in served:
            raise ValueError(
                f"weight {tuple(weight.shape)} {weight.dtype} must be a matrix of fp32 or bf16,"
                " or of fp16 on a GPU"
            )
        if not weight.is_contiguous():
            raise ValueError(f"weight with strides {weight.stride()} must be contiguous")
        self._check_bias(bias, len(weight), weight.dtype if for_gpu else None)
        self.weight: Any = weight
        self.shape = (len(weight), weight.shape[1])
        self._bias = bias
        self._native: tuple[Any, ...] = (
            weight.data_ptr(),
            weight.dtype == torch.bfloat16,
            *self.shape,
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

        x: [T, d_in] fp32. The rows may be strided.
        epilogue: called once the product is complete.

        With a bf16 weight, x is rounded to bf16 if the CPU has an instruction for products of bf16
        pairs. Otherwise the weight is converted to fp32.
        """
        width = self.shape[0]
        chosen = backend or backends.backend_of("kernels", x.device.type)
        if chosen == "gpu":
            assert epilogue is None, "an epilogue of the CPU cannot read a GPU's memory"
            return on_gpu.linear(x, self.weight, self._bias, out)
        x_address, x_stride, rows = self._check_rows(x)
        if chosen == "reference":
            y = copy_out(self._reference(x), out)
        else:
            y = alloc_out(out, rows, width)
            self._multiply(y.data_ptr(), x)
        if epilogue is not None:
            epilogue(y.data_ptr(), width, x_address, x_stride, rows)
        return y

    def gated(
        self,
        x: torch.Tensor,
        *,
        scratch: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        backend: Backend | None = None,
    ) -> torch.Tensor:
        """Return `gate` of the product, [T, d_out / 2] fp32.

        scratch: [T, d_out] fp32 for the product, if the CPU cannot compute the result in one pass;
            allocated if None.
        """
        width = self.shape[0]
        if width % 2:
            raise ValueError(f"weight {self.shape} must have an even number of rows to be gated")
        chosen = backend or backends.backend_of("kernels", x.device.type)
        if chosen == "gpu":
            return on_gpu.gate(on_gpu.linear(x, self.weight, self._bias, scratch), out)
        rows = self._check_rows(x)[2]
        if chosen == "reference":
            return copy_out(reference.gate(self._reference(x)), out)
        scratch, out = alloc_out(scratch, rows, width), alloc_out(out, rows, width // 2)
        self._multiply_gated(out.data_ptr(), scratch.data_ptr(), x)
        return out

    def _reference(self, x: torch.Tensor) -> torch.Tensor:
        return reference.linear(x, self.weight, self._bias)

    def _multiply(self, y: int, x: torch.Tensor) -> None:
        native.kernels().gemm.multiply(y, *self._operands(x))

    def _multiply_gated(self, out: int, scratch: int, x: torch.Tensor) -> None:
        """Write the gated product to address `out`, with scratch memory for the product."""
        native.kernels().gemm.multiply_gated(out, scratch, *self._operands(x))

    def _operands(self, x: torch.Tensor) -> tuple[Any, ...]:
        rows = x.data_ptr(), x.stride(0), len(x)
        return self.shape[0], *rows, *self._native, torch.get_num_threads()

    @staticmethod
    def _check_bias(
        bias: torch.Tensor | None, width: int, other: torch.dtype | None = None
    ) -> None:
        types = (torch.float32, other)
        if bias is not None and (bias.shape != (width,) or bias.dtype not in types):
            raise ValueError(f"bias {tuple(bias.shape)} {bias.dtype} must be [{width}] of fp32")

    def _check_rows(self, x: torch.Tensor) -> tuple[int, int, int]:
        """Return the address, the row stride in elements and the number of rows of a valid x."""
        if x.dim() != 2 or x.shape[1] != self.shape[1]:
            raise ValueError(
                f"x {tuple(x.shape)} does not fit weight {self.shape}"
                f"; x must be [rows, {self.shape[1]}]"
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
    """Return x weightᵀ + bias, for a weight that is used rarely. See `Matrix` for the arguments."""
    return Matrix(weight, bias)(x, backend=backend)


def embed(
    tokens: torch.Tensor,
    table: torch.Tensor,
    images: Sequence[tuple[int, torch.Tensor, torch.Tensor]] = (),
    *,
    out: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Return [T, width] fp32: the embedding of each token, or the image feature that replaces it.

    tokens: [T] int64.
    table: [vocabulary, width], contiguous, fp32 or bf16, or fp16 on a GPU.
    images: (first_row, feature_rows, features) of each range of rows with images, where
        feature_rows is [n] int64, and features [m, width] fp32, contiguous. Row `first_row + i`
        becomes `features[feature_rows[i]]`, unless `feature_rows[i]` is negative.

    Raises IndexError for a token or a feature row that does not exist.
    """
    chosen = backend or backends.backend_of("kernels", table.device.type)
    if chosen == "gpu":
        return on_gpu.embed(tokens, table, images, out)
    if chosen == "reference":
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
    features = _feature_addresses(images, rows, width)
    out = alloc_out(out, rows, width)
    addresses = (out.data_ptr(), tokens.data_ptr(), features.data_ptr() if images else 0)
    source = (table.data_ptr(), table.dtype == torch.bfloat16, words)
    native.kernels().gemm.embed(*addresses, *source, rows, width, torch.get_num_threads())
    return out


def _feature_addresses(
    images: Sequence[tuple[int, torch.Tensor, torch.Tensor]], rows: int, width: int
) -> torch.Tensor:
    """Return the address of each row's image feature; 0 for a row with its token's embedding."""
    found = torch.zeros(rows if images else 0, dtype=torch.int64)
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
        shown = slice(first_row, first_row + len(feature_rows))
        found[shown] = torch.where(feature_rows >= 0, addresses, 0)
    return found


def gate(
    x: torch.Tensor, *, out: torch.Tensor | None = None, backend: Backend | None = None
) -> torch.Tensor:
    """Return silu(left half of x) · right half of x, [T, width] fp32.

    x: [T, 2 · width] fp32, contiguous.
    """
    chosen = backend or backends.backend_of("kernels", x.device.type)
    if chosen == "gpu":
        return on_gpu.gate(x, out)
    if chosen == "reference":
        return copy_out(reference.gate(x), out)
    if x.dim() != 2 or x.shape[1] % 2 or x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} must be contiguous [rows, 2 · width] of fp32"
        )
    rows, width = x.shape[0], x.shape[1] // 2
    out = alloc_out(out, rows, width)
    native.kernels().gemm.gate(out.data_ptr(), x.data_ptr(), rows, width, torch.get_num_threads())
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
    """Add `delta` to `hidden` in place and return the RMS norm of the sum, [T, width] fp32.

    Semantics: hidden += delta; return hidden / sqrt(mean(hidden²) + eps) · weight, for each row.

    hidden: [T, width] fp32, contiguous.
    delta: tensor of the same shape, or None to add nothing.
    weight: [width] fp32.
    """
    chosen = backend or backends.backend_of("kernels", hidden.device.type)
    if chosen == "gpu":
        return on_gpu.add_norm(hidden, delta, weight, eps, out)
    if chosen == "reference":
        return copy_out(reference.add_norm(hidden, delta, weight, eps), out)
    _check_norm(hidden, weight)
    if delta is not None:
        _check_norm(delta, weight)
        if delta.shape != hidden.shape:
            raise ValueError(
                f"delta {tuple(delta.shape)} must have the shape of hidden {tuple(hidden.shape)}"
            )
    out = alloc_out(out, *hidden.shape)
    addresses = (out.data_ptr(), hidden.data_ptr(), 0 if delta is None else delta.data_ptr())
    native.kernels().gemm.add_norm(
        *addresses, weight.data_ptr(), *hidden.shape, eps, torch.get_num_threads()
    )
    return out


class HeadNorms(NamedTuple):
    """Weights of the RMS norms of query heads and of key heads, each [dim] fp32, and their eps."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


def head_norm(
    qkv: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    heads: int,
    eps: float,
    *,
    backend: Backend | None = None,
) -> None:
    """Replace each query head and each key head by its RMS norm, in place.

    Semantics: head = head / sqrt(mean(head²) + eps) · weight.

    qkv: [T, (heads + 2 · kv_heads) · dim] fp32, contiguous: query heads, key heads, value heads.
    query_weight, key_weight: [dim] fp32.
    """
    rows, width = qkv.shape
    dim = len(query_weight)
    kv_heads, rest = divmod(width - heads * dim, 2 * dim)
    chosen = backend or backends.backend_of("kernels", qkv.device.type)
    if chosen == "gpu":
        on_gpu.launches().head_norm(qkv, query_weight, key_weight, heads, kv_heads, eps)
        return
    if rest or kv_heads < 1 or qkv.dtype != torch.float32 or not qkv.is_contiguous():
        raise ValueError(
            f"qkv {tuple(qkv.shape)} {qkv.dtype} must be contiguous fp32 rows of {heads} query"
            f" heads of {dim} values, and of as many key as value heads"
        )
    if key_weight.shape != (dim,) or {query_weight.dtype, key_weight.dtype} != {torch.float32}:
        raise ValueError(f"norm weights must both be [{dim}] of fp32")
    if chosen == "reference":
        reference.head_norm(qkv, query_weight, key_weight, heads, kv_heads, eps)
        return
    addresses = (qkv.data_ptr(), query_weight.data_ptr(), key_weight.data_ptr())
    sizes = (rows, heads, kv_heads, dim)
    native.kernels().gemm.head_norm(*addresses, *sizes, eps, torch.get_num_threads())


def _check_norm(rows: torch.Tensor, weight: torch.Tensor) -> None:
    fits = rows.dim() == 2 and rows.shape[1:] == weight.shape and rows.is_contiguous()
    if not fits or rows.dtype != torch.float32 or weight.dtype != torch.float32:
        raise ValueError(
            f"rows {tuple(rows.shape)} {rows.dtype} do not fit a norm weight {tuple(weight.shape)}"
            f" {weight.dtype}; both must be fp32 and the rows contiguous [rows, width]"
        )


def argmax(x: torch.Tensor, *, backend: Backend | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first maximum of each row and whether the row is finite, [T] int64 and [T] bool.

    x: [T, width] fp32, contiguous. The index of a row that is not finite has no meaning.
    """
    chosen = backend or backends.backend_of("kernels", x.device.type)
    if chosen == "gpu":
        indices, finite = on_gpu.draws().argmax(x)
        return indices, finite
    if chosen == "reference":
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
    """Return a valid `out`, or a new [rows, width] fp32 tensor if it is None."""
    if out is None:
        native.spoil_recording()
        return torch.empty(rows, width)
    if out.shape != (rows, width) or out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError(
            f"out {tuple(out.shape)} {out.dtype} with strides {out.stride()} must be contiguous"
            f" [{rows}, {width}] of fp32"
        )
    return out


def copy_out(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Return `result`, or `out` with its values if `out` is given."""
    return result if out is None else alloc_out(out, *result.shape).copy_(result)
