"""The kernels of 2x2 max-pooling against torch's own, to the bit. Run with `pytest -m gpu`; CI has no GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.models.pooling import max_pool_2x2

pooling_kernels = pytest.importorskip("paceline.models.pooling_kernels", reason="needs triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
SHAPES = [(3, 64, 30, 30), (5, 24, 31, 31), (2, 3, 7, 10), (1, 384, 2, 3), (4, 130, 9, 1025)]


def make_pixels(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Of few values, so that the largest is often there twice; and here and there none."""
    torch.manual_seed(0)
    pixels = torch.randint(-4, 4, shape, device="cuda").to(dtype)
    pixels[torch.rand(shape, device="cuda") < 0.01] = float("nan")
    return pixels.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_torchs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    compare(lambda x: torch.ops.paceline.max_pool_2x2(x)[0], make_pixels(shape, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_so_they_are_where_the_kernels_are_used(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    launch = pooling_kernels.launch_backward
    monkeypatch.setattr(pooling_kernels, "launch_backward", lambda *given: launched.append(launch(*given)))
    compare(torch.compile(max_pool_2x2, dynamic=False), make_pixels(SHAPES[1], dtype))
    assert len(launched) == 1


def compare(pool: Callable[[Tensor], Tensor], pixels: Tensor) -> None:
    ours, torchs = (pixels.clone().requires_grad_() for _ in range(2))
    values, expected = pool(ours), F.max_pool2d(torchs, 2)
    assert torch.equal(values.isnan(), expected.isnan())
    assert torch.equal(values.nan_to_num(), expected.nan_to_num())
    gradient = torch.randn_like(expected)
    values.backward(gradient)
    expected.backward(gradient)
    assert ours.grad is not None
    assert torchs.grad is not None
    assert torch.equal(ours.grad, torchs.grad)


def test_an_image_laid_out_otherwise_and_a_model_at_rest_take_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling_kernels, "launch_forward", lambda *_: pytest.fail("a kernel was used"))
    pixels = make_pixels((2, 8, 6, 6), torch.float32).nan_to_num()
    pool = torch.compile(max_pool_2x2, dynamic=False)
    for given in (pixels.contiguous().requires_grad_(), pixels):
        assert torch.equal(pool(given), F.max_pool2d(pixels, 2))


def test_torch_finds_no_fault_with_the_operators() -> None:
    pixels = make_pixels((2, 8, 6, 7), torch.float32).nan_to_num().requires_grad_()
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.paceline.max_pool_2x2.default, (pixels,), test_utils=tests)
