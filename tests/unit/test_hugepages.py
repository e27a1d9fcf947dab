"""Memory in huge pages: what asks for it gets zeros that begin on one."""

from __future__ import annotations

import pytest
import torch

from vlora.memory import hugepages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_begin_on_a_huge_page_and_outlive_what_they_were_made_from(
    dtype: torch.dtype,
) -> None:
    zeros = hugepages.hugepage_zeros(3, 5, 7, dtype=dtype)
    assert zeros.shape == (3, 5, 7)
    assert zeros.dtype == dtype
    assert zeros.is_contiguous()
    assert zeros.data_ptr() % hugepages.PAGE == 0
    assert not zeros.any()
    last = zeros[-1]
    del zeros
    last.fill_(1)
    assert last.sum() == 35
