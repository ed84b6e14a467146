"""The kernels of 2x2 max-pooling are bit-equal to torch's own. Run with `pytest -m gpu`; CI has no GPU."""

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
    """Few different values, so that the maximum is often there twice, and some NaNs."""
    torch.manual_seed(0)
    pixels = torch.randint(-4, 4, shape, device="cuda").to(dtype)
    pixels[torch.rand(shape, device="cuda") < 0.01] = float("nan")
    return pixels.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_equal_torchs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    compare(lambda x: torch.ops.paceline.max_pool_2x2(x)[0], make_pixels(shape, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_and_gradients_of_a_compiled_model_equal_torchs(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_another_memory_layout_and_evaluation_use_torchs_pooling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling_kernels, "launch_forward", lambda *_: pytest.fail("a kernel was used"))
    pixels = make_pixels((2, 8, 6, 6), torch.float32).nan_to_num()
    pool = torch.compile(max_pool_2x2, dynamic=False)
    for given in (pixels.contiguous().requires_grad_(), pixels):
        assert torch.equal(pool(given), F.max_pool2d(pixels, 2))


def test_the_operators_pass_torchs_own_check() -> None:
    pixels = make_pixels((2, 8, 6, 7), torch.float32).nan_to_num().requires_grad_()
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.paceline.max_pool_2x2.default, (pixels,), test_utils=tests)
