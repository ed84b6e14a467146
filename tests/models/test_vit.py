"""Our vision transformer: compared with torch's layers, its random numbers, its weights at another size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from harness.ranks import run_ranks
from harness.runs import read_results, step_losses, train_in
from paceline.errors import UserError
from paceline.models.dropout import SampleDropPath, share_keys
from paceline.models.registry import VIT_ARGS, VITS, build_model
from paceline.models.vit import SIZES, ViT
from paceline.models.weights import load_weights
from paceline.settings.schema import ModelConfig

TINY = ("patch_size=8", "width=16", "depth=2", "heads=2")
FLAGS = (
    *("--model-name", "vit-ti16", "--model-args", *TINY, "drop_path=0.3", "--dropout", "0.1", "--optimizer", "adamw"),
    *("--base-lr", "0.01", "--no-decay-norms-and-biases", "--epochs", "2"),
)


def tiny(side: int = 32, classes: int = 3, **changes: Any) -> ViT:
    return ViT("vit-ti16", (3, side, side), classes, **{"patch_size": 8, "width": 16, "depth": 2, "heads": 2} | changes)


def encoder_layer(block: nn.Module) -> nn.TransformerEncoderLayer:
    """torch's layer with the weights of a block."""
    layer = nn.TransformerEncoderLayer(16, 2, 64, 0.0, "gelu", 1e-6, batch_first=True, norm_first=True)
    state = block.state_dict()
    names = {"attn.qkv": "self_attn.in_proj_", "attn.proj": "self_attn.out_proj.", "mlp.fc1": "linear1."}
    names |= {"mlp.fc2": "linear2.", "norm1": "norm1.", "norm2": "norm2."}
    layer.load_state_dict({names[key.rpartition(".")[0]] + key.rpartition(".")[2]: state[key] for key in state})
    return layer


def test_a_block_is_the_encoder_layer_of_torch() -> None:
    torch.manual_seed(0)
    block, inputs = tiny().blocks[1], torch.randn(4, 17, 16)
    with torch.no_grad():
        # Another order of sums.
        assert torch.allclose(block(inputs), encoder_layer(block).train()(inputs), atol=1e-5)


@pytest.mark.parametrize(("name", "millions"), [("vit-ti16", 5.717), ("vit-s16", 22.051), ("vit-b16", 86.568)])
def test_published_sizes(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig(model_name=name), (3, 224, 224), 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, abs=1e-3)
    assert set(SIZES) == set(VITS)


def test_the_argument_list_without_torch_equals_the_constructors() -> None:
    assert set(VIT_ARGS) == set(ViT.__init__.__kwdefaults__ or {}) - {"dropout"}


def test_drop_path_is_drawn_per_sample() -> None:
    layer = SampleDropPath(0.5)
    keys = share_keys(layer)
    assert keys is not None
    keys.keys = torch.arange(64) * 7919
    whole = layer(torch.ones(64, 3, 2))
    assert set(whole.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(whole, whole[:, :1, :1].expand_as(whole))
    keys.keys = keys.keys[16:32]
    assert torch.equal(layer(torch.ones(16, 3, 2)), whole[16:32])
    assert torch.equal(layer.eval()(torch.ones(16, 1)), torch.ones(16, 1))


def test_weights_of_another_size_are_loaded_with_resized_positions(tmp_path: Path) -> None:
    saved, model = tiny(32), tiny(48, classes=5)
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    report = load_weights(model, "vit-ti16", str(tmp_path / "model.safetensors"))
    assert (report.resized, report.missing, report.unexpected) == (("pos_embed",), (), ())
    assert set(report.skipped_shape) == {"head.weight", "head.bias"}
    ours, theirs = model.state_dict(), saved.state_dict()
    assert torch.equal(ours["blocks.0.attn.qkv.weight"], theirs["blocks.0.attn.qkv.weight"])
    assert torch.equal(model.pos_embed[:, 0], saved.pos_embed[:, 0])
    constant = tiny(32)
    nn.init.constant_(constant.pos_embed, 0.25)
    save_file(constant.state_dict(), tmp_path / "model.safetensors")
    load_weights(model, "vit-ti16", str(tmp_path / "model.safetensors"))
    assert torch.allclose(model.pos_embed, torch.tensor(0.25))


def test_exact_runs_have_one_hash_on_one_and_two_ranks_and_after_a_resume(tmp_path: Path) -> None:
    flags = (*FLAGS, "--exact", "--lanes", "2")
    for ranks in (1, 2):
        run_ranks(ranks, train_in, str(tmp_path / str(ranks)), flags)
    for ranks, stop, resume in ((2, "5", False), (1, "18", True)):
        run_ranks(ranks, train_in, str(tmp_path / "stopped"), (*flags, "--max-steps", stop), resume)
    assert len({read_results(tmp_path / name)["weights_sha256"] for name in ("1", "2", "stopped")}) == 1


def test_fsdp_trains_a_vision_transformer(tmp_path: Path) -> None:
    run_ranks(1, train_in, str(tmp_path / "one"), FLAGS)
    run_ranks(2, train_in, str(tmp_path / "two"), (*FLAGS, "--strategy", "fsdp"))
    # Sums of floats in another order.
    assert step_losses(tmp_path / "one") == pytest.approx(step_losses(tmp_path / "two"), rel=1e-3)


@pytest.mark.parametrize(
    "arguments",
    [
        ("patch_size=9",),
        ("patch_size=0",),
        ("heads=5",),
        ("drop_path=1",),
        ("depth=-1",),
        ("depth=many",),
        ("patchsize=8",),
        ("dropout=0.1",),
        ("depth",),
        ("depth=1", "depth=2"),
        ("num_classes=3",),
    ],
)
def test_wrong_arguments_get_an_error_screen(arguments: tuple[str, ...]) -> None:
    with pytest.raises(UserError):
        build_model(ModelConfig(model_name="vit-ti16", model_args=arguments), (3, 224, 224), 10)
