"""How torch calls the kernels of 2x2 max-pooling. The kernels need a GPU: tests/models/test_pooling_kernels.py."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.models import pooling
from paceline.models.pooling import max_pool_2x2


def launch_forward(x: Tensor, values: Tensor, places: Tensor) -> None:
    rows, columns = values.shape[2:]
    pixels = [x[:, :, row : 2 * rows : 2, column : 2 * columns : 2] for row in (0, 1) for column in (0, 1)]
    largest, place = torch.stack(pixels).max(0)
    values.copy_(largest)
    places.copy_(place)


def launch_backward(gradient: Tensor, places: Tensor, result: Tensor) -> None:
    rows, columns = gradient.shape[2:]
    result.zero_()
    for number in range(4):
        pixels = result[:, :, number // 2 : 2 * rows : 2, number % 2 : 2 * columns : 2]
        pixels.copy_(torch.where(places == number, gradient, 0.0))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of the fakes that replace the kernels on a CPU."""
    seen: list[str] = []
    stand_in = SimpleNamespace(
        launch_forward=lambda *given: (seen.append("forward"), launch_forward(*given)),
        launch_backward=lambda *given: (seen.append("backward"), launch_backward(*given)),
    )
    monkeypatch.setitem(sys.modules, "paceline.models.pooling_kernels", stand_in)
    monkeypatch.setattr(pooling, "_HAS_KERNELS", True)
    monkeypatch.setattr(pooling, "_suits_kernels", lambda x: x.requires_grad)
    return seen


@pytest.mark.parametrize("size", [(6, 8), (7, 5)])
def test_a_compiled_model_uses_stand_in_kernels_forward_and_backward(
    launches: list[str], size: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    pixels = torch.randn(3, 4, *size).contiguous(memory_format=torch.channels_last)
    ours, torchs = (pixels.clone().requires_grad_() for _ in range(2))
    pool = torch.compile(lambda x: max_pool_2x2(x * 2) * 3, backend="aot_eager", dynamic=False)
    values, expected = pool(ours), F.max_pool2d(torchs * 2, 2) * 3
    assert launches == ["forward"]
    assert torch.equal(values, expected)
    assert values.is_contiguous(memory_format=torch.channels_last)
    gradient = torch.randn_like(expected)
    values.backward(gradient)
    expected.backward(gradient)
    assert launches == ["forward", "backward"]
    assert ours.grad is not None
    assert torchs.grad is not None
    assert torch.equal(ours.grad, torchs.grad)


def test_a_plain_model_does_not_use_the_kernels(launches: list[str]) -> None:
    max_pool_2x2(torch.randn(1, 4, 6, 6, requires_grad=True)).sum().backward()
    assert launches == []
