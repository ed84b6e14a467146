"""Defaults, then recipe, then flags, and the origin of each value."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import UserError
from paceline.settings.faults import parse_faults
from paceline.settings.load import LoadedConfig, load_config, to_yaml
from paceline.settings.recipe_file import shipped_recipes
from paceline.settings.rules import check_config, check_world, fitting_worlds, nearest_divisors
from paceline.settings.schema import Config, field_table, flatten
from paceline.settings.syntax import ProcessRange, parse_processes

# Adding a flag is a decision: it must be added here too. The nine of the last line guard a run and do not change its
# result. `profile` shows the times of a real run; bench traces steps without a run. `accept_new_data`
# is the only way to continue a run whose data has changed on purpose. `fsdp_wrap`, `reshard_after_forward` and
# `bucket_cap_mb` are the options that the course compares. The flags from `crop_scale` to `mix_epochs` are the
# augmentations that published recipes of image models use. `folds` and `fold` are cross-validation: which samples a run
# validates with is part of its identity. `task`, `sampling`, and the flags from `bce_threshold` to `distill_weight` are
# the losses, targets and distillation of published recipes; `teacher_sha256` makes the teacher part of the config.
# `keep_share` to `keep_by_sha256` train on the samples that a proxy finds hard.
# `decay_norms_and_biases` to `unfreeze_at`, the parts of the schedule, the kinds of clipping and `stop_early` are used
# by published recipes for training and fine-tuning.
FLAGS = (
    "dataset task data_dir num_samples input_size num_classes train_split folds fold augment image_size "
    "resolution_schedule test_size crop_scale crop_ratio crop_from interpolation flip cutout vertical_flip "
    "policy policy_ops policy_magnitude policy_std "
    "color_jitter hue_jitter grayscale blur solarize erase mixup_alpha cutmix_alpha cutmix_share mix_epochs "
    "sampling epoch_samples repeat_augment keep_share keep_by keep_random keep_by_sha256 exclude relabel "
    "unreadable decoder num_workers cache_dir cache_gb "
    "model_name weights hidden_size dropout model_args "
    "optimizer base_lr momentum weight_decay decay_norms_and_biases layer_decay head_lr_factor freeze unfreeze_at "
    "schedule warmup_epochs warmup_start_lr min_lr cooldown_epochs lr_steps lr_step_factor "
    "clip_norm clip_value clip_agc label_smoothing ema_decay ema_warmup_epochs "
    "epochs max_steps global_batch_size accumulate test_batch_size test_views loss metrics stop_early "
    "seed deterministic amp amp_dtype compile activation_checkpointing "
    "bce_threshold focal_gamma class_weights best_by "
    "teacher distill distill_temperature distill_weight teacher_sha256 "
    "strategy processes lanes exact sync_bn cpu_offload fsdp_wrap reshard_after_forward bucket_cap_mb "
    "exchange_dtype device ranks_per_gpu omp_num_threads "
    "output_dir resume load_policy best_is_latest start_over_if_damaged init_from accept_new_data "
    "keep_every_epochs save_epochs save_steps keep_last keep_best async_save log_frequency metric_lines "
    "track rehearse profile "
    "max_restarts hang_timeout_s stop_signals notice_s on_nonfinite skip_nonfinite spike_factor auto_microbatch audit "
    "inject"
)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_flag_list_is_the_agreed_one() -> None:
    assert " ".join(field_table()) == FLAGS
    assert len(field_table()) <= 140


def test_flags_override_the_file_and_the_file_overrides_defaults(tmp_path: Path) -> None:
    recipe = write(tmp_path / "mine.yaml", "epochs: 3\nbase_lr: 3e-4\namp: false\ntrack: [mlflow, wandb]\n")
    loaded = load_config(recipe, ["--epochs", "5"])
    assert loaded.config.train.epochs == 5
    assert loaded.config.optim.base_lr == 3e-4
    assert loaded.config.train.amp is False
    assert loaded.config.run.track == ("mlflow", "wandb")
    assert [loaded.origin(name) for name in ("epochs", "base_lr", "momentum")] == ["flag", "file", "default"]
    assert loaded.where("base_lr") == f"{recipe}, line 2"


@pytest.mark.parametrize("lines", range(1, 7))
def test_the_first_wrong_setting_is_named(tmp_path: Path, lines: int) -> None:
    sound = ["epochs: 3", "momentum: 0.9", "seed: 1", "lanes: 2", "dropout: 0.1"][: lines - 1]
    recipe = write(tmp_path / "mine.yaml", "\n".join([*sound, "base_lr: fast", "workers: many"]) + "\n")
    with pytest.raises(UserError, match="base_lr: 'fast' is not valid") as refused:
        load_config(recipe, ["--strategy", "dpd"])
    assert refused.value.where == f"{recipe}, line {lines}"


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--world-size", "2"], "processes", "2"),
        (["--method", "fsdp"], "strategy", "fsdp"),
        (["--workers=3"], "num_workers", 3),
        (["--print_every", "32"], "log_frequency", 32),
        (["--no-amp"], "amp", False),
        (["--deterministic"], "deterministic", True),
        (["--track"], "track", ()),
        (["--epochs", "4", "--epochs", "6"], "epochs", 6),
    ],
)
def test_flags_of_the_seeds_keep_their_names(flags: list[str], name: str, value: object) -> None:
    assert flatten(load_config("shapes-cnn", flags).config)[name] == value


def test_resolved_config_is_a_recipe_for_the_same_run(tmp_path: Path) -> None:
    flags = ["--output-dir", "it's a 'folder'", "--base-lr", "1e-7", "--track", "--no-flip"]
    config = load_config("cifar10-vgg19", flags).config
    assert load_config(write(tmp_path / "again.yaml", to_yaml(config)), []).config == config


def test_a_default_stays_a_default_in_the_resolved_config(tmp_path: Path) -> None:
    """After writing and reading, every setting has its value, and only chosen settings count as chosen."""
    first = load_config("shapes-cnn", ["--track", "tensorboard", "--device", "auto", "--seed", "3"])
    again = load_config(write(tmp_path / "again.yaml", to_yaml(first.config, first.settings)), [])
    assert again.config == first.config
    is_chosen = {name: (first.origin(name) != "default", again.origin(name) == "file") for name in field_table()}
    assert all(before == after for before, after in is_chosen.values()), is_chosen
    assert is_chosen["track"] == is_chosen["device"] == (True, True)  # chosen, although it equals the default


def test_an_edited_default_in_the_resolved_config_is_a_choice(tmp_path: Path) -> None:
    """The mark of a default is valid only for the value of the default."""
    loaded = load_config("shapes-cnn", [])
    text = to_yaml(loaded.config, loaded.settings)
    edited = text.replace("track: ['tensorboard']", "track: ['mlflow']")
    assert edited != text
    again = load_config(write(tmp_path / "again.yaml", edited), [])
    assert (again.config.run.track, again.origin("track")) == (("mlflow",), "file")


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_are_valid_and_have_a_description(name: str) -> None:
    check_config(load_config(name, []))
    header = shipped_recipes()[name].read_text().split("\n\n")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    assert f"paceline train {name}" in header
    assert "# machine" in header


def check(*flags: str) -> LoadedConfig:
    loaded = load_config("shapes-cnn", list(flags))
    check_config(loaded)
    return loaded


def test_indivisible_batch_names_the_nearest_valid_sizes() -> None:
    with pytest.raises(UserError) as caught:
        check("--global-batch-size", "250", "--processes", "4", "--accumulate", "2")
    screen = caught.value.screen()
    assert "250 is not divisible by 8" in screen
    assert "248 or 256" in screen


def test_indivisible_world_size_names_the_nearest_valid_ones() -> None:
    with pytest.raises(UserError, match="not divisible by 3") as caught:
        check_world(check(), 3)
    assert "--processes 2 or 4" in caught.value.screen()


def test_lanes_must_divide_evenly() -> None:
    check_world(check("--lanes", "4"), 2)
    with pytest.raises(UserError, match="4 lanes"):
        check_world(check("--lanes", "4", "--global-batch-size", "255"), 3)
    with pytest.raises(UserError, match="not divisible by 4"):
        check_world(check("--lanes", "4", "--global-batch-size", "258"), 2)


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        (["--global-batch-size", "256"], [1, 2, 4]),
        (["--global-batch-size", "252"], [1, 2, 3, 4]),
        (["--global-batch-size", "251"], [1]),
        (["--global-batch-size", "256", "--lanes", "2"], [1, 2]),
        (["--global-batch-size", "256", "--accumulate", "128"], [1, 2]),
        (["--global-batch-size", "252", "--exact"], [1, 2, 4]),
    ],
)
def test_valid_world_sizes(flags: list[str], sizes: list[int]) -> None:
    config = load_config("shapes-cnn", flags).config
    assert fitting_worlds(config, ProcessRange(1, 4)) == sizes
    assert fitting_worlds(config, ProcessRange(2, 4)) == [size for size in sizes if size >= 2]


def test_nearest_divisors() -> None:
    assert nearest_divisors(256, 3) == [2, 4]


def test_processes_are_a_number_or_a_range() -> None:
    assert parse_processes("0").is_open
    assert (parse_processes("3").low, parse_processes("3").high) == (3, 3)
    assert (parse_processes("2:4").low, parse_processes("2:4").high) == (2, 4)
    for text in ("", "-1", "4:2", "0:2", "2:", "two", "2:3:4", "1025"):
        with pytest.raises(UserError, match="is not valid"):
            parse_processes(text)


def test_faults_are_read_word_by_word() -> None:
    first, second = parse_faults("kill rank=1 step=50; slow rank=* step=3 phase=data steps=4 seconds=0.5")
    assert (first.kind, first.rank, first.step, first.times, first.phase) == ("kill", 1, 50, 1, "")
    assert (second.number, second.rank, second.phase, second.values) == (1, -1, "data", {"steps": 4, "seconds": 0.5})
    for text in ("explode step=1", "kill", "kill step=x", "kill step=1 phase=lunch", "kill step=1 code=3", "kill 3"):
        with pytest.raises(UserError) as caught:
            parse_faults(text)
        assert text in caught.value.screen()


def test_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Config().train.epochs = 3  # type: ignore[misc]


def test_a_name_that_no_file_system_allows_is_no_recipe() -> None:
    """A user error, not an OSError."""
    with pytest.raises(UserError):
        load_config("x" * 5000, [])
