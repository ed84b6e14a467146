"""Dropout is a pure function of (seed, step, position in the global batch, layer, feature)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from harness.ranks import make_world
from harness.runs import train_in
from paceline.data.draws import draw_sequence, draw_sequence_on_host
from paceline.models.dropout import SampleDropout, ShareKeys, draw_kept, share_keys
from paceline.models.external import PER_RANK
from paceline.models.registry import BUILT_IN, build_model
from paceline.settings.schema import ModelConfig

SEED, STEP, SAMPLES = 3, 1000, 24
KEYS = [-2038915106950771996, 5480033281769997025]
MASK = [[0, 1, 1, 1, 0, 0, 1, 1, 1, 0], [1, 1, 0, 0, 1, 1, 0, 1, 1, 0]]


def keys_of_all(step: int = STEP, seed: int = SEED) -> Tensor:
    return ShareKeys(seed, 0, "cpu").of(step, SAMPLES)


def mask(keys: Tensor, *shape: int, p: float = 0.5, layer: int = 0) -> Tensor:
    return draw_kept(torch.Size((len(keys), *shape)), p, keys, layer)


def test_masks_are_the_published_constants() -> None:
    """Fixed: another value here changes every run with dropout."""
    keys = ShareKeys(1, 0, "cpu").of(7, 2)
    assert keys.tolist() == KEYS
    assert mask(keys, 10, p=0.25, layer=1).int().tolist() == MASK


@pytest.mark.parametrize("features", [1, 4, 7, 256])
def test_numpy_and_torch_draw_the_same_bits(features: int) -> None:
    """On a CPU numpy draws the masks. On a GPU and in a compiled model, torch does."""
    keys = torch.cat([keys_of_all(), torch.tensor([0, -1, 2**63 - 1, -(2**63)])])
    for first in (0, 3 * 2**32):
        by_torch = draw_sequence(keys[:, None], torch.arange(first, first + features))
        assert torch.equal(torch.from_numpy(draw_sequence_on_host(keys, first, features)), by_torch)


def test_several_ranks_have_the_keys_of_one_rank() -> None:
    """A sample's key depends on its position in the global batch, on any number of ranks."""
    for ranks in (2, 3, 4, 8):
        shares = [ShareKeys(SEED, rank, "cpu").of(STEP, SAMPLES // ranks) for rank in range(ranks)]
        assert torch.equal(torch.cat(shares), keys_of_all())


def test_the_keys_of_a_step_do_not_depend_on_the_first_step() -> None:
    """Earlier steps leave no state."""
    whole = ShareKeys(SEED, 1, "cpu")
    for step in (0, 1, 31, 32, 33, 95, 64, 5):
        assert torch.equal(whole.of(step, SAMPLES), ShareKeys(SEED, 1, "cpu").of(step, SAMPLES))


def test_seeds_steps_positions_and_layers_have_different_masks() -> None:
    """No two of them share a mask."""
    others = [keys_of_all(STEP + 1), keys_of_all(seed=SEED + 1), keys_of_all().flip(0)]
    masks = [mask(keys_of_all(), 64), mask(keys_of_all(), 64, layer=1), *(mask(keys, 64) for keys in others)]
    rows = torch.cat(masks)
    assert len(rows.unique(dim=0)) == 4 * SAMPLES  # the last has the rows of the first, in reverse


@pytest.mark.parametrize("features", [1, 3, 4, 63])
def test_parts_of_a_batch_have_the_rows_of_the_batch(features: int) -> None:
    """A mask does not depend on the other samples."""
    keys = keys_of_all()
    parts = [mask(part, features) for part in keys.tensor_split(5)]
    assert torch.equal(torch.cat(parts), mask(keys, features))


def test_the_mask_does_not_depend_on_the_memory_layout() -> None:
    """Channels-last inputs get the mask of plain ones."""
    layer = SampleDropout(0.5)
    source = share_keys(layer)
    assert source is not None
    source.keys = keys_of_all()
    inputs = torch.ones(SAMPLES, 6, 5, 7)
    expected = layer(inputs)
    assert torch.equal(layer(inputs.contiguous(memory_format=torch.channels_last)), expected)
    assert torch.equal(layer(inputs.transpose(1, 3).contiguous().transpose(1, 3)), expected)


@pytest.mark.parametrize("p", [0.1, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_dropped_fraction_is_the_configured_one(p: float, dtype: torch.dtype) -> None:
    """The other values are scaled to keep the mean."""
    keys = ShareKeys(SEED, 0, "cpu").of(STEP, 512)
    layer, inputs = SampleDropout(p), (torch.rand(512, 512) + 1).to(dtype)
    source = share_keys(layer)
    assert source is not None
    source.keys = keys
    found = layer(inputs)
    assert found.dtype is dtype
    dropped = found == 0
    assert torch.equal(dropped, ~mask(keys, 512, p=p))
    assert dropped.double().mean() == pytest.approx(p, abs=0.005)  # five standard deviations of 262,144 draws
    assert dropped.double().mean(0).std() == pytest.approx((p * (1 - p) / 512) ** 0.5, rel=0.15)
    assert dropped.double().mean(1).std() == pytest.approx((p * (1 - p) / 512) ** 0.5, rel=0.15)
    factor = found[~dropped].double().mean() / inputs[~dropped].double().mean()
    # In half precision each product is rounded. A rounded factor would be off by 1.6e-3 at p = 0.1.
    assert factor == pytest.approx(1 / (1 - p), rel=1e-4 if dtype.itemsize > 2 else 8e-4)


def test_dropout_is_the_identity_in_evaluation_and_with_p_0() -> None:
    """Also while keys of a step exist."""
    inputs = torch.randn(SAMPLES, 8)
    for layer in (SampleDropout(0.5).eval(), SampleDropout(0.0)):
        share_keys(layer)
        assert layer(inputs) is inputs or torch.equal(layer(inputs), inputs)


def test_without_keys_it_is_torchs_dropout() -> None:
    """A model works outside of a run."""
    inputs = torch.ones(4, 100)
    torch.manual_seed(0)
    found = SampleDropout(0.5)(inputs)
    torch.manual_seed(0)
    assert torch.equal(found, nn.Dropout(0.5)(inputs))


@pytest.mark.parametrize("name", BUILT_IN)
def test_our_models_do_not_use_a_generator(name: str) -> None:
    """All random numbers of our models are drawn from the samples' keys."""
    side = 32 if name.startswith(("vgg", "vit")) else 17
    config = ModelConfig(model_name=name, dropout=0.5)
    with torch.device("meta"):
        model = build_model(config, (3, side, side), 4).train()
    assert all(isinstance(layer, SampleDropout) for layer in model.modules() if isinstance(layer, nn.Dropout))
    source = share_keys(model)
    if source is not None:
        source.keys = torch.zeros(2, dtype=torch.int64, device="meta")
    with torch.device("meta"), NoGenerator():
        model(torch.empty(2, 3, side, side))


class NoGenerator(torch.utils._python_dispatch.TorchDispatchMode):
    """Refuses operations that draw random numbers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert torch.Tag.nondeterministic_seeded not in func.tags, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("flags", "is_stated"),
    [
        (("--model-name=harness.dropout_model:build",), True),
        (("--model-name=harness.dropout_model:build", "--exact"), False),  # drawn per lane, which is part of the run
        (("--dropout=0.5",), False),
    ],
)
def test_the_header_of_a_run_states_the_limit_of_external_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], is_stated: bool
) -> None:
    """Layers of other libraries draw per rank."""
    train_in(make_world(0, 1), str(tmp_path), (*flags, "--max-steps=1"))
    header = capsys.readouterr().out.partition("step 1/")[0]
    assert (PER_RANK in header) == is_stated


def build_mlp() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return build_model(ModelConfig(model_name="mlp", dropout=0.5, hidden_size=16), (12,), 4), torch.randn(SAMPLES, 12)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_a_recomputed_pass_has_the_same_dropout() -> None:
    """Activation checkpointing needs no generator state."""
    model, inputs = build_mlp()
    source = share_keys(model)
    assert source is not None
    found = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=False, preserve_rng_state=False)):
        source.keys = keys_of_all()
        model.zero_grad()
        run(inputs).square().sum().backward()
        found.append(gradients(model))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_a_compiled_model_takes_other_keys_without_recompiling() -> None:
    """One graph for all steps, with the gradients of the model without compilation."""
    model, inputs = build_mlp()
    source = share_keys(model)
    assert source is not None
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, dynamic=False, fullgraph=True, backend=counter)
    for step in range(3):
        found = []
        for run in (model, compiled):
            source.keys = keys_of_all(step)
            model.zero_grad()
            run(inputs).square().sum().backward()
            found.append(gradients(model))
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert counter.frame_count == 1
