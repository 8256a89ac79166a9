from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minisgl.layers import blocked, linear, weight


@pytest.mark.parametrize("tokens", [0, 1, 7, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_a_blocked_weight_gives_the_same_product(tokens: int, bias: bool) -> None:
    plain = weight(37, 50)
    plain.normal_()
    b = torch.randn(37) if bias else None
    x = torch.randn(tokens, 60)[:, :50]  # rows that do not lie next to each other
    torch.testing.assert_close(linear(x, blocked(plain), b), F.linear(x, plain, b))


def test_a_blocked_weight_turns_back_into_what_it_was() -> None:
    plain = weight(37, 50)
    plain.normal_()
    layout = blocked(plain)
    assert layout.is_mkldnn
    assert layout.shape == plain.shape
    assert torch.equal(layout.to_dense(), plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_stay_as_they_are(dtype: torch.dtype) -> None:
    plain = torch.nn.Parameter(torch.randn(4, 6, dtype=dtype), requires_grad=False)
    assert blocked(plain) is plain
    x = torch.randn(3, 6, dtype=dtype)
    torch.testing.assert_close(linear(x, plain, None), F.linear(x, plain))


def test_without_onednn_the_weight_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    plain = weight(4, 6)
    assert blocked(plain) is plain
