"""Models as objects: instances of nn.Module, closures, lambdas and functools.partial reach the ranks as source."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import paceline
from paceline.errors import UserError
from paceline.library.functions import write_down
from paceline.library.modules import check_module

pytestmark = pytest.mark.long

X = np.random.default_rng(0).normal(size=(120, 6)).astype(np.float32)
Y = (X.sum(1) > 0).astype(int)
QUICK: dict[str, Any] = {
    **{"data": (X, Y), "global_batch_size": 16, "epochs": 1, "processes": 1, "track": (), "quiet": True},
    **{"omp_num_threads": 1, "seed": 3},
}


class Net(nn.Module):
    """Keeps its arguments as attributes of the same name."""

    def __init__(self, width: int, slope: float = 0.1) -> None:
        super().__init__()
        self.width, self.slope = width, slope
        self.first = nn.Linear(6, width, bias=False)
        self.last = nn.Linear(width, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(nn.functional.leaky_relu(self.first(inputs), self.slope))  # type: ignore[no-any-return]


class Forgetful(nn.Module):
    """Does not keep its arguments."""

    def __init__(self, width: int = 4, slope: float = 0.1) -> None:
        super().__init__()
        self.negative_slope = slope
        self.last = nn.Linear(6, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(inputs) * self.negative_slope  # type: ignore[no-any-return]


class Unknown(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.last = nn.Linear(6, width)


def build(width: int = 5) -> nn.Module:
    return Net(width, slope=0.3)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def executed(function: Any) -> Any:
    """The function from its written source, as a rank gets it."""
    namespace: dict[str, Any] = {}
    exec(write_down([function]), namespace)
    return next(reversed(namespace.values()))


def test_an_instance_is_trained_from_its_own_weights(tmp_path: Path) -> None:
    """Like a function that builds it, with --init-from and a file of its weights."""
    torch.manual_seed(11)
    net = Net(5, slope=0.3)
    before = torch.get_rng_state()
    run = paceline.train(model=net, output_dir="instance", **QUICK)
    assert torch.equal(torch.get_rng_state(), before)
    assert run.config.model.model_name.endswith("/instance/functions.py:build_Net")
    save_file(net.state_dict(), tmp_path / "weights.safetensors")
    by_function = paceline.train(model=build, output_dir="function", init_from="weights.safetensors", **QUICK)
    assert run.results["weights_sha256"] == by_function.results["weights_sha256"]
    stored = load_file(run.path / "initial.safetensors")
    assert all(torch.equal(stored[name], value) for name, value in net.state_dict().items())
    steps = run.results["steps"]
    assert run.resume(epochs=2, quiet=True).results["steps"] == 2 * steps


def test_a_closure_gives_the_same_model_as_its_function() -> None:
    width, slope = 5, 0.3

    def closed() -> nn.Module:
        return Net(width, slope=slope)

    models: list[Callable[..., nn.Module]] = [closed, functools.partial(build, width=5), lambda: Net(5, slope=0.3)]
    found = [paceline.train(model=model, **QUICK).results["weights_sha256"] for model in (build, *models)]
    assert len(set(found)) == 1


def test_modules_are_rebuilt_from_their_attributes() -> None:
    modules = [
        nn.Sequential(nn.Flatten(), nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4, eps=1e-3), nn.Dropout(0.2)),
        nn.Sequential(OrderedDict(body=nn.Conv2d(3, 8, (3, 1), stride=2, padding=1), out=nn.GELU())),
        Net(7, slope=0.2),
        nn.Sequential(Net(7), nn.ModuleList([nn.Linear(2, 2)])[0], nn.LayerNorm(2, elementwise_affine=False)),
    ]
    for module in modules:
        check_module(module)
        again = executed(module)()
        assert repr(again) == repr(module)
        assert {name: value.shape for name, value in again.state_dict().items()} == {
            name: value.shape for name, value in module.state_dict().items()
        }


def frozen() -> nn.Module:
    model = nn.Linear(6, 2)
    model.weight.requires_grad_(False)
    return model


def hooked() -> nn.Module:
    model = nn.Linear(6, 2)
    model.register_forward_hook(lambda *_: None)
    return model


def changed() -> nn.Module:
    model = Net(3)
    model.last = nn.Linear(3, 9)
    return model


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Unknown(3), "the argument 'width' of Unknown"),
        (Forgetful(slope=0.9), "negative_slope"),
        (Forgetful(width=8), "last.out_features"),
        (frozen(), "weight"),
        (hooked(), "_forward_hooks"),
        (changed(), "last.out_features"),
    ],
)
def test_an_instance_that_cannot_be_rebuilt_is_refused(model: nn.Module, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        paceline.train(model=model, **QUICK)
    assert said in str(caught.value.got)
    assert "function" in str(caught.value.hint)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", ["init_from", "weights"])
def test_an_instance_has_the_initial_weights(flag: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="two sets of initial weights"):
        paceline.train(model=Net(3), **{**QUICK, flag: "w.safetensors"})
    assert list(tmp_path.iterdir()) == []


def captures(value: Any) -> Callable[[], Any]:
    def inner() -> Any:
        return value

    return inner


@pytest.mark.parametrize("value", [torch.zeros(2), nn.Linear(2, 2), object(), np.zeros(3)])
def test_values_captured_by_a_closure_must_have_source(value: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        paceline.train(model=captures(value), **QUICK)
    assert "'value'" in caught.value.what
    assert list(tmp_path.iterdir()) == []


def test_source_of_closures_partials_and_lambdas() -> None:
    assert executed(captures(("a", 3, [1.5])))() == ("a", 3, [1.5])
    assert executed(captures(build))() is build
    assert executed(functools.partial(np.add, 2, 3))() == 5
    assert executed(functools.partial(captures, functools.partial(np.add, 2)))()()(3) == 5
    scale = 3
    assert executed(lambda value: value * scale)(2) == 6
    pair = (lambda: 1, lambda: 2)
    with pytest.raises(UserError, match="source of"):
        write_down([pair[0]])
    with pytest.raises(UserError, match="'inner'"):  # two closures, one name
        write_down([captures(1), captures(2)])


def test_a_decorated_function_is_written_with_its_decorator() -> None:
    def outer() -> Callable[..., Any]:
        @torch.no_grad()
        def metric(value: Tensor) -> bool:
            return torch.is_grad_enabled()

        return metric

    assert executed(outer())(torch.zeros(1)) is False
