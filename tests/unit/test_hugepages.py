"""Tests of memory in huge pages: it is zero and starts on a huge page."""

from __future__ import annotations

import pytest
import torch

from vlora.device import host_memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_start_on_a_huge_page_and_keep_their_memory_alive(
    dtype: torch.dtype,
) -> None:
    zeros = host_memory.hugepage_zeros(3, 5, 7, dtype=dtype)
    assert zeros.shape == (3, 5, 7)
    assert zeros.dtype == dtype
    assert zeros.is_contiguous()
    assert zeros.data_ptr() % host_memory.PAGE == 0
    assert not zeros.any()
    last = zeros[-1]
    del zeros
    last.fill_(1)
    assert last.sum() == 35
