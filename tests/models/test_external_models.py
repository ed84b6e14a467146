"""External models: a user's functions, timm and torchvision, and their possible errors."""

from __future__ import annotations

import fcntl
import importlib.util
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harness.torchvision_shim import import_timm, import_torchvision
from paceline.errors import DataError, UserError
from paceline.models import external
from paceline.models.external import build_external
from paceline.models.head import find_head, replace_head
from paceline.models.registry import build_model, check_model_name
from paceline.settings.extras import how_to_install
from paceline.settings.schema import ModelConfig

CIFAR = (3, 32, 32)
IMAGENET = (3, 224, 224)


def build(name: str, input_shape: tuple[int, ...] = CIFAR, num_classes: int = 10, **options: Any) -> nn.Module:
    return build_model(ModelConfig(model_name=name, **options), input_shape, num_classes)


def write(path: Path, source: str) -> Path:
    path.write_text("import math\nfrom torch import nn\n" + textwrap.dedent(source))
    return path


BODY = "nn.Linear(math.prod(input_shape), num_classes)"
BUILDERS = {
    "both": f"def build(num_classes, input_shape): return {BODY}",
    "keywords": f"def build(*, input_shape, num_classes): return {BODY}",
    "anything": "def build(**given): return nn.Linear(math.prod(given['input_shape']), given['num_classes'])",
    "classes": "def build(num_classes, width=12): return nn.Linear(width, num_classes)",
    "nothing": "def build(): return nn.Linear(12, 5)",
    "a class": "class build(nn.Linear):\n def __init__(self, num_classes): super().__init__(12, num_classes)",
}


@pytest.mark.parametrize("source", BUILDERS.values(), ids=BUILDERS.keys())
def test_a_function_gets_the_arguments_that_it_accepts(tmp_path: Path, source: str) -> None:
    path = write(tmp_path / "net.py", source)
    model = build(f"{path}:build", (12,), 5)
    assert model(torch.zeros(2, 12)).shape == (2, 5)


def test_a_relative_file_and_a_module_work_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "paceline_test_pack").mkdir()
    write(tmp_path / "paceline_test_pack" / "nets.py", BUILDERS["both"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("paceline_test_pack/nets.py:build", "paceline_test_pack.nets:build"):
        check_model_name(name)
        assert build(name, (12,), 5)(torch.zeros(2, 12)).shape == (2, 5)


def test_checking_a_file_does_not_run_it(tmp_path: Path) -> None:
    path = write(tmp_path / "net.py", "raise SystemExit('was run')\ndef build(): ...")
    check_model_name(f"{path}:build")


def test_a_users_model_builds_on_meta_and_loads_weights(tmp_path: Path) -> None:
    path = write(tmp_path / "net.py", BUILDERS["both"])
    config = ModelConfig(model_name=f"{path}:build", weights=str(tmp_path / "model.pth"))
    with torch.device("meta"):
        assert build_model(config, (12,), 5, load_weights=False).weight.is_meta
    saved = nn.Linear(12, 5).state_dict()
    torch.save(saved, tmp_path / "model.pth")
    assert torch.equal(build_model(config, (12,), 5).state_dict()["weight"], saved["weight"])


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        check_model_name(f"{tmp_path}/nowhere.py:build")
    assert "nowhere.py" in caught.value.screen()


def test_a_function_that_is_missing_gets_a_suggestion(tmp_path: Path) -> None:
    path = write(tmp_path / "net.py", "def build_net(): ...")
    with pytest.raises(UserError) as caught:
        check_model_name(f"{path}:biuld_net")
    assert "build_net" in str(caught.value.hint)


@pytest.mark.parametrize(
    "name", ["no_such_package.module:build", "json.nothing:build", "json:no_such_function", "json:", ":build"]
)
def test_modules_that_cannot_work(name: str) -> None:
    with pytest.raises(UserError):
        check_model_name(name)


def test_a_mistyped_collection_gets_a_suggestion() -> None:
    with pytest.raises(UserError) as caught:
        check_model_name("torchvison:resnet50")
    assert caught.value.hint == "did you mean torchvision?"


def test_a_file_with_a_syntax_error_is_named_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "net.py", "def build(:")
    with pytest.raises(UserError) as caught:
        check_model_name(f"{path}:build")
    assert "net.py, line 3" in caught.value.screen()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def build(depth): return nn.Identity()", "depth"),
        ("def build(): return 'no model'", "a value of type str"),
        ("build = 3", "build"),
        ("def build(num_classes):\n    return nn.Linear(num_classes, nothing)", "net.py, line 4"),
        ("import no_such_package\ndef build(): ...", "no_such_package"),
    ],
)
def test_functions_that_fail_are_a_user_error(tmp_path: Path, source: str, said: str) -> None:
    path = write(tmp_path / "net.py", source)
    with pytest.raises(UserError) as caught:
        build(f"{path}:build")
    assert said in caught.value.screen()


@pytest.mark.parametrize("collection", ["timm", "torchvision"])
def test_collections_need_a_name_and_their_package(collection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="names no model"):
        check_model_name(f"{collection}:")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="not installed") as caught:
        check_model_name(f"{collection}:resnet50")
    assert caught.value.hint == how_to_install(collection)


def test_a_linear_head_is_replaced_and_a_fitting_one_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 3, bias=False)))
    old = model[1][1]
    replace_head(model, 3, model_name="net")
    assert model[1][1] is old
    replace_head(model, 5, model_name="net")
    assert model[1][1].weight.shape == (5, 8)
    assert model[1][1].bias is None
    assert model[0].weight.shape == (8, 4)


def test_a_convolution_is_the_head_if_no_layer_is_linear() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 20, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    found = find_head(model)
    assert found is not None
    assert found[0] == "1"
    replace_head(model, 5, model_name="net")
    assert model(torch.zeros(2, 3, 8, 8)).shape == (2, 5, 1, 1)


def test_a_model_without_a_head_is_named() -> None:
    with pytest.raises(UserError, match=r"torchvision:strange has no head"):
        replace_head(nn.Sequential(nn.ReLU()), 5, model_name="torchvision:strange")


def is_locked(path: Path) -> bool:
    with path.open("ab") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.parametrize("collection", ["timm", "torchvision"])
def test_published_weights_with_fake_constructor_are_fetched_under_a_lock(
    collection: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "cache" / ".collection-weights.lock"
    monkeypatch.setenv("PACELINE_CACHE", str(lock.parent))
    held = []

    def construct(name: str, **options: Any) -> nn.Module:
        held.append(lock.exists() and is_locked(lock))
        return nn.Sequential(nn.Linear(4, 10))

    def names(**options: Any) -> list[str]:
        return ["net"]

    fake = SimpleNamespace(list_models=names, list_pretrained=names, create_model=construct)
    fake.models = SimpleNamespace(list_models=names, get_model=construct)
    monkeypatch.setitem(sys.modules, collection, fake)
    build_external(f"{collection}:net", CIFAR, 10, pretrained=True)
    assert held == [True]
    assert not is_locked(lock)
    lock.unlink()
    build_external(f"{collection}:net", CIFAR, 10)
    assert held == [True, False]
    assert not lock.exists(), "nothing is fetched, so no lock is taken"


# The collections themselves, if they are installed.


@pytest.mark.parametrize(
    "model", ["swin_v2_b", "resnet50", "squeezenet1_1", "mobilenet_v3_small", "vit_b_16", "inception_v3"]
)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # inception_v3 warns about a faster initialisation
def test_torchvision_models_get_a_head_for_the_data(model: str) -> None:
    import_torchvision()
    shape = (3, 299, 299) if model == "inception_v3" else IMAGENET
    with torch.device("meta"):
        config = ModelConfig(model_name=f"torchvision:{model}")
        built = build_model(config, shape, 10, load_weights=False)
        assert built.train()(torch.empty(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("model", ["resnet50d", "swinv2_base_window8_256", "convnext_tiny", "resnet18.a1_in1k"])
def test_timm_models_get_a_head_and_stem_for_the_data(model: str) -> None:
    import_timm()
    shape = (1, 256, 256)
    with torch.device("meta"):
        built = build_model(ModelConfig(model_name=f"timm:{model}"), shape, 10, load_weights=False)
        assert built(torch.empty(2, *shape)).shape == (2, 10)


def test_real_models_of_both_collections_run() -> None:
    import_timm()
    import_torchvision()
    for name in ("timm:resnet18", "torchvision:resnet18"):
        assert build(name)(torch.zeros(2, *CIFAR)).shape == (2, 10)


@pytest.mark.parametrize("collection", ["timm", "torchvision"])
def test_collections_suggest_a_near_name(collection: str) -> None:
    import_timm() if collection == "timm" else import_torchvision()
    with pytest.raises(UserError) as caught:
        build(f"{collection}:resnet5O")
    assert "resnet50" in str(caught.value.hint)


def test_torchvision_needs_three_channels() -> None:
    import_torchvision()
    with pytest.raises(UserError, match="3 channels"):
        build("torchvision:resnet18", (1, 32, 32))


@pytest.mark.parametrize("collection", ["timm", "torchvision"])
def test_unavailable_published_weights_are_a_data_error(
    collection: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    package = import_timm() if collection == "timm" else import_torchvision()

    def no_network(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no route to host")

    if collection == "timm":
        monkeypatch.setattr(package, "create_model", no_network)
    else:
        monkeypatch.setattr(package.models, "get_model", no_network)
    with pytest.raises(DataError, match="published weights") as caught:
        build(f"{collection}:resnet18", weights="imagenet")
    assert "--weights none" in caught.value.screen()


def test_fake_torchvision_weights_are_found_in_the_folder_of_torch_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the file name at the end of the URL."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    weights = SimpleNamespace(DEFAULT=SimpleNamespace(url="https://example.org/models/net-0123.pth"))
    fake = SimpleNamespace(models=SimpleNamespace(get_model_weights=lambda _: weights))
    monkeypatch.setattr(external, "_import_collection", lambda _: fake)
    assert external.is_fetched("torchvision:net") is False
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    (tmp_path / "hub" / "checkpoints" / "net-0123.pth").touch()
    assert external.is_fetched("torchvision:net") is True


def test_fake_timm_weights_are_found_in_the_cache_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the revision of the model. A model of unknown form is not checked."""
    cached: dict[tuple[str, str, str | None], str] = {}
    config = SimpleNamespace(file=None, url="", hf_hub_id="timm/net@v2", hf_hub_filename=None)
    hub = SimpleNamespace(try_to_load_from_cache=lambda name, file, revision: cached.get((name, file, revision)))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setattr(external, "_import_collection", lambda _: SimpleNamespace(get_pretrained_cfg=lambda _: config))
    assert external.is_fetched("timm:net") is False
    cached["timm/net", "model.safetensors", None] = "main"
    assert external.is_fetched("timm:net") is False
    cached["timm/net", "pytorch_model.bin", "v2"] = "file"
    assert external.is_fetched("timm:net") is True
    monkeypatch.setattr(external, "_import_collection", lambda _: SimpleNamespace(get_pretrained_cfg=lambda _: None))
    assert external.is_fetched("timm:net") is None
