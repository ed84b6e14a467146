"""The rules between fields. Pure functions of numbers; no files, no torch.

`check_config` needs only the config. `check_world` also needs the number of ranks. Both run before anything
starts, so a mistake costs a second and not a wait in the queue.
"""

from __future__ import annotations

import math

from paceline.errors import UserError
from paceline.settings.audit import check_audit
from paceline.settings.faults import parse_faults
from paceline.settings.keep_rules import check_kept
from paceline.settings.load import LoadedConfig
from paceline.settings.optimization_rules import check_optimization
from paceline.settings.resolution import check_resolution
from paceline.settings.schema import SHARDED, Config
from paceline.settings.syntax import ProcessRange, parse_processes
from paceline.settings.tasks import check_task


def check_config(loaded: LoadedConfig) -> None:
    """The rules between fields. The rules of single fields are checked when their values are converted."""
    _check_strategy(loaded)
    _check_modes(loaded)
    check_task(loaded)
    check_optimization(loaded)
    check_resolution(loaded)
    _check_repeats(loaded)
    _check_folds(loaded)
    check_kept(loaded)
    _check_samples(loaded)
    parse_faults(loaded.config.guard.inject, loaded.where("inject"))
    check_audit(loaded)


def _check_samples(loaded: LoadedConfig) -> None:
    """The order of other samplings depends on the labels, weights or losses of all samples."""
    data = loaded.config.data
    for name, value in (("exclude", data.exclude), ("relabel", data.relabel)):
        if value and (data.sampling != "uniform" or data.keep_share < 1):
            raise UserError(
                f"{name} needs uniform sampling",
                where=loaded.where(name),
                got=f"sampling {data.sampling}, keep_share {data.keep_share:g}",
                hint="--sampling uniform --keep-share 1",
            )
    if data.relabel and data.task != "single-label":
        what = "only samples of one class each can get another label"
        raise UserError(what, where=loaded.where("relabel"), got=f"task {data.task}")


def _check_strategy(loaded: LoadedConfig) -> None:
    parallel = loaded.config.parallel
    processes = parse_processes(parallel.processes, loaded.where("processes"))
    if parallel.strategy == "single" and processes.high > 1:
        raise UserError(
            "strategy single runs on one process",
            where=loaded.where("strategy"),
            got=f"processes {parallel.processes}",
            hint="--strategy ddp, or --processes 1",
        )
    _check_choices_of_strategy(loaded)
    if parallel.exact:
        _check_exact(loaded)
    if not processes.is_open:
        _check_processes(loaded, processes)


def _check_choices_of_strategy(loaded: LoadedConfig) -> None:
    """Refuse settings that the strategy would ignore."""
    parallel = loaded.config.parallel
    is_ddp = parallel.strategy in ("auto", "ddp") and not parallel.exact
    choices = (
        ("cpu_offload", parallel.cpu_offload, "--cpu-offload", "fsdp"),
        ("fsdp_wrap", parallel.fsdp_wrap != "blocks", "--fsdp-wrap", "fsdp"),
        ("reshard_after_forward", not parallel.reshard_after_forward, "--no-reshard-after-forward", "fsdp"),
        ("bucket_cap_mb", parallel.bucket_cap_mb > 0, "--bucket-cap-mb", "ddp"),
    )
    for name, is_given, flag, needed in choices:
        if is_given and not (is_ddp if needed == "ddp" else parallel.strategy in SHARDED):
            exact = " with --exact, which has its own exchange" if parallel.exact and needed == "ddp" else ""
            raise UserError(
                f"{name} needs strategy {needed}",
                where=loaded.where(name),
                got=f"strategy {parallel.strategy}{exact}",
                hint=f"add --strategy {needed}, or leave {flag} out",
            )


def _check_processes(loaded: LoadedConfig, processes: ProcessRange) -> None:
    """A single number must fit; of a range, at least one must fit."""
    if not fitting_worlds(loaded.config, processes):
        check_world(loaded, processes.high)


def _check_exact(loaded: LoadedConfig) -> None:
    parallel = loaded.config.parallel
    if parallel.exchange_dtype != "auto":
        raise UserError(
            "exact sums float32 gradients in one fixed tree",
            where=f"{loaded.where('exact')} and {loaded.where('exchange_dtype')}",
            got=f"exchange_dtype {parallel.exchange_dtype}",
            hint="leave --exact or --exchange-dtype out",
        )
    if parallel.strategy in SHARDED or parallel.sync_bn:
        raise UserError(
            "exact needs whole models and separate lanes",
            where=loaded.where("exact"),
            got=f"strategy {parallel.strategy}" if parallel.strategy in SHARDED else "sync_bn",
            hint="--strategy ddp without --sync-bn, or leave --exact out",
        )
    if parallel.lanes & (parallel.lanes - 1):
        powers = [2 ** (parallel.lanes.bit_length() - 1), 2 ** parallel.lanes.bit_length()]
        raise UserError(
            "exact needs a power of two of lanes, to sum them in one tree",
            where=loaded.where("lanes"),
            got=parallel.lanes,
            allowed="1, 2, 4, 8, ...",
            hint=f"--lanes {_either(powers)}",
        )


def _check_modes(loaded: LoadedConfig) -> None:
    config = loaded.config
    if config.train.amp_dtype != "auto" and not config.train.amp:
        raise UserError(
            "mixed precision is both switched off and given a type",
            where=f"{loaded.where('amp')} and {loaded.where('amp_dtype')}",
            hint="leave out --no-amp or --amp-dtype",
        )
    if config.run.init_from and config.run.resume not in ("", "auto"):
        raise UserError(
            "a run either starts from weights or continues from a checkpoint",
            got=f"--init-from {config.run.init_from} with --resume {config.run.resume}",
            hint="leave one out",
        )
    if config.run.rehearse and config.run.resume:
        raise UserError("a rehearsal always starts a new run", got="--rehearse with --resume", hint="leave one out")
    _check_unused_flags(loaded)
    if config.data.mix_epochs and not (config.data.mixup_alpha or config.data.cutmix_alpha):
        raise UserError(
            "mix_epochs needs mixup or CutMix",
            where=loaded.where("mix_epochs"),
            hint="--mixup-alpha 0.2, or leave it out",
        )


def _check_repeats(loaded: LoadedConfig) -> None:
    """A global batch holds all repeats of its samples, and at least two samples."""
    batch, repeats = loaded.config.train.global_batch_size, loaded.config.data.repeat_augment
    if batch % repeats or (repeats > 1 and batch < 2 * repeats):
        near = [size for size in nearest_multiples(batch, repeats) if size >= 2 * repeats] or [2 * repeats]
        raise UserError(
            "the repeats of a sample do not fit into the global batch",
            where=loaded.where("repeat_augment"),
            got=f"{repeats} repeats and global_batch_size {batch}",
            allowed=f"a global batch that is a multiple of {repeats}, with at least two samples",
            hint=f"--global-batch-size {_either(near)}",
        )


def _check_folds(loaded: LoadedConfig) -> None:
    folds, fold = loaded.config.data.folds, loaded.config.data.fold
    if folds == 1 or (fold and not folds):
        name = "folds" if folds == 1 else "fold"
        raise UserError(
            "cross-validation needs at least two folds",
            where=loaded.where(name),
            got=f"--folds {folds}" + (f" --fold {fold}" if fold else ""),
            hint="--folds 5 --fold 1",
        )
    if folds and not 1 <= fold <= folds:
        raise UserError(
            "a run of a cross-validation needs the number of its fold",
            where=loaded.where("fold" if fold else "folds"),
            got=f"--folds {folds}" + (f" --fold {fold}" if fold else " without --fold"),
            allowed=f"--fold 1 to --fold {folds}",
            hint=f"--fold 1; in Python paceline.cross_validate(folds={folds}) trains all of them",
        )
    if folds and loaded.origin("train_split") == "flag":
        raise UserError(
            "--train-split has no effect: the folds decide which samples are the validation set",
            where=loaded.where("train_split"),
            got=f"--train-split {loaded.config.data.train_split:g} with --folds {folds}",
            hint="leave --train-split or --folds out",
        )


def _check_unused_flags(loaded: LoadedConfig) -> None:
    """Refuse flags of an augmentation that is switched off. In a recipe they may stay for the day it is switched on."""
    data = loaded.config.data
    needed = {
        "--policy randaugment": (data.policy == "randaugment", ("policy_ops", "policy_magnitude", "policy_std")),
        "--augment resized-crop": (data.augment == "resized-crop", ("crop_scale", "crop_ratio", "interpolation")),
        "--mixup-alpha and --cutmix-alpha": (bool(data.mixup_alpha and data.cutmix_alpha), ("cutmix_share",)),
    }
    for other, (is_on, names) in needed.items():
        for name in names:
            if not is_on and loaded.origin(name) == "flag":
                raise UserError(
                    f"--{name.replace('_', '-')} has no effect without {other}",
                    where=loaded.where(name),
                    hint=f"add {other}, or leave it out",
                )


def check_world(loaded: LoadedConfig, world_size: int) -> None:
    """The global batch must be divisible into equal parts on this many ranks."""
    config = loaded.config
    batch, accumulate = config.train.global_batch_size, config.train.accumulate
    lanes = config.parallel.lanes or world_size
    if lanes % world_size:
        raise UserError(
            f"{lanes} lanes cannot be shared equally by {world_size} ranks",
            where=loaded.where("lanes"),
            allowed=f"a multiple of {world_size}",
            hint=f"--lanes {_either(nearest_multiples(lanes, world_size))}, "
            f"or --processes {_either(nearest_divisors(lanes, world_size))}",
        )
    if config.parallel.exact and lanes & (lanes - 1):
        raise UserError(
            "exact needs a power of two of ranks, or --lanes",
            where=loaded.where("exact"),
            got=f"{world_size} ranks",
            allowed="1, 2, 4, 8, ...",
        )
    # Under exact every lane is cut into microbatches, otherwise every rank's share.
    parts = lanes * accumulate if config.parallel.exact else math.lcm(lanes, world_size * accumulate)
    if batch % parts:
        detail = f"{world_size} ranks" + (f" x {accumulate} microbatches" if accumulate > 1 else "")
        detail += f" in {lanes} lanes" if lanes != world_size else ""
        sizes = _either(nearest_divisors(batch // accumulate if batch % accumulate == 0 else batch, world_size))
        raise UserError(
            f"global_batch_size {batch} is not divisible by {parts}",
            where=loaded.where("global_batch_size"),
            got=f"{batch} over {detail}",
            allowed=f"a multiple of {parts}",
            hint=f"--global-batch-size {_either(nearest_multiples(batch, parts))}, or --processes {sizes}",
        )
    _check_mixing(loaded, world_size)
    if config.parallel.exchange_dtype != "auto" and world_size == 1:
        raise UserError(
            "exchange_dtype has no effect: one rank exchanges no gradients",
            where=loaded.where("exchange_dtype"),
            got=f"{world_size} rank",
            hint="--processes 2 or more, or leave --exchange-dtype out",
        )


def _check_mixing(loaded: LoadedConfig, world_size: int) -> None:
    """Neighbours in the global batch are mixed, so each rank needs whole pairs."""
    config = loaded.config
    alphas = [name for name in ("mixup_alpha", "cutmix_alpha") if getattr(config.data, name)]
    share = config.train.global_batch_size // world_size
    if alphas and share % 2:
        raise UserError(
            "mixup and CutMix need an even number of samples on each rank",
            where=loaded.where(alphas[0]),
            got=f"{share} samples of global_batch_size {config.train.global_batch_size} on each of {world_size} ranks",
            allowed=f"a multiple of {2 * world_size}",
            hint=f"--global-batch-size {_either(nearest_multiples(config.train.global_batch_size, 2 * world_size))}",
        )


def check_faults(loaded: LoadedConfig, world_size: int) -> None:
    """Refuse a fault for a rank that does not exist."""
    for fault in parse_faults(loaded.config.guard.inject):
        if fault.rank >= world_size:
            raise UserError(
                f"there is no rank {fault.rank} to inject a fault into",
                where=loaded.where("inject"),
                got=loaded.config.guard.inject,
                allowed=f"rank=0 to rank={world_size - 1}, or rank=*",
            )


def fitting_worlds(config: Config, processes: ProcessRange) -> list[int]:
    """The allowed numbers of ranks that divide the batch (and the lanes, if given) equally."""
    batch, accumulate, lanes = config.train.global_batch_size, config.train.accumulate, config.parallel.lanes
    sizes = range(max(processes.low, 1), processes.high + 1)
    return [size for size in sizes if _fits(size, batch, accumulate, lanes, exact=config.parallel.exact)]


def batches_for(config: Config, size: int) -> list[int]:
    """The global batches nearest to the config's that this many ranks can divide. Empty: none, because of the lanes."""
    accumulate, exact = config.train.accumulate, config.parallel.exact
    lanes = config.parallel.lanes or size
    parts = lanes * accumulate if exact else math.lcm(lanes, size * accumulate)
    return nearest_multiples(config.train.global_batch_size, parts) if lanes % size == 0 else []


def _fits(size: int, batch: int, accumulate: int, lanes: int, *, exact: bool) -> bool:
    lanes = lanes or size
    parts = lanes * accumulate if exact else math.lcm(lanes, size * accumulate)
    is_tree = not exact or lanes & (lanes - 1) == 0
    return lanes % size == 0 and batch % parts == 0 and is_tree


def nearest_multiples(value: int, of: int) -> list[int]:
    """The multiples just below and just above a value that is not one."""
    below = value // of * of
    return [number for number in (below, below + of) if number > 0]


def nearest_divisors(number: int, near: int) -> list[int]:
    """The divisors of a number just below and just above a value, if they are close enough to be useful."""
    below = next(d for d in range(min(near, number), 0, -1) if number % d == 0)
    above = next((d for d in range(near + 1, min(number, near + 10_000) + 1) if number % d == 0), None)
    return [below] if above is None else [below, above]


def _either(values: list[int]) -> str:
    return " or ".join(str(value) for value in values)
