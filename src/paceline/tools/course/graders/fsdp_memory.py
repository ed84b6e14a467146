"""Lesson 4, choices under FSDP: how long weights stay whole, and what a step costs under each choice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from paceline.tools.course.graders.fsdp_choices import PREDICTIONS, require_blocks
from paceline.tools.course.ranks import describe_error, on_ranks
from paceline.tools.course.sharded_step import (
    BLOCKS,
    Block,
    ShardedStepReport,
    Stack,
    count_weights,
    find_blocks,
    find_groups,
    full_weights,
    gather_by_rank,
    make_stack,
    take_step,
    time_steps,
    watch_step,
)
from paceline.tools.course.verdict import Failed, Item

_Cause = tuple[str, str, str]  # hint, what was seen, advice
_BF16_MODEL = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
_BF16_PART = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)


def _shard_ours(parts: Callable[[Stack], list[nn.Module]], is_bf16: bool, is_kept: bool) -> Stack:
    model = make_stack()
    plain = MixedPrecisionPolicy()
    for part in parts(model):
        fully_shard(part, mp_policy=_BF16_PART if is_bf16 else plain, reshard_after_forward=not is_kept)
    fully_shard(model, mp_policy=_BF16_MODEL if is_bf16 else plain)
    return model


def _blocks_of(model: Stack) -> list[nn.Module]:
    return list(find_blocks(model).values())


def _layers_of(model: Stack) -> list[nn.Module]:
    return [part for part in model.modules() if isinstance(part, nn.Linear)]


def _shard_by(person: ModuleType, rank: int, world_size: int, has_room: bool) -> ShardedStepReport | _Cause:
    """What a step does under the person's choices, or why it cannot be taken."""
    call = f"shard(..., has_room={has_room})"
    given = make_stack()
    try:
        model = person.shard(given, Block, has_room)
    except Exception as error:
        is_model_first = isinstance(given, FSDPModule) and not all(isinstance(b, FSDPModule) for b in _blocks_of(given))
        if not is_model_first:
            raise
        advice = "The call on the whole model takes all weights that are left. Shard the parts first, then the model."
        return "model-before-its-parts", f"{call}: {describe_error(error, Path(str(person.__file__)))}", advice
    if not isinstance(model, Stack):
        what = f"{call} returns a {type(model).__name__}"
        return "no-model", what, "fully_shard works in place: return the model itself."
    groups = gather_by_rank(find_groups(model), world_size)
    if any(found != groups[0] for found in groups):
        what = f"{call}: rank 0 makes {len(groups[0])} groups, rank 1 makes {len(groups[1])}"
        return "ranks-differ", what, "Every rank must make the same choices: they gather and sum together."
    if groups[0] and (whole := [name for name, one in model.named_parameters() if not isinstance(one, DTensor)]):
        what = f"{call}: {', '.join(whole[:4])} stay whole on each rank"
        advice = "fully_shard(model, ...) comes after the parts and takes all that belongs to none of them."
        return "not-sharded", what, advice
    report = watch_step(model, rank)
    if report.error or not report.groups:
        return report
    ours = _shard_ours(_blocks_of, is_bf16=True, is_kept=has_room)
    take_step(ours, rank)
    pairs = zip(full_weights(model), full_weights(ours), strict=True)
    report.difference = max((a - b).abs().max().item() for a, b in pairs)
    report.step_ms = time_steps(model, rank)
    return report


def _measure_others(person: ModuleType, rank: int, world_size: int) -> list[tuple[str, ShardedStepReport]]:
    """The same step under other choices, made by this check, for the table."""
    others = [
        ("model   float32   kept", _shard_ours(lambda model: [], is_bf16=False, is_kept=False)),
        ("blocks  float32   dropped", _shard_ours(_blocks_of, is_bf16=False, is_kept=False)),
        ("layers  bfloat16  dropped", _shard_ours(_layers_of, is_bf16=True, is_kept=False)),
    ]
    reports = []
    for name, model in others:
        report = watch_step(model, rank)
        report.step_ms = time_steps(model, rank)
        reports.append((name, report))
    return reports


def _read_predictions(person: ModuleType, rank: int, world_size: int) -> dict[str, int]:
    return {name: getattr(person, name) for name in PREDICTIONS}


def check_sharding(path: Path) -> str:
    dropped, kept = (_run_choice(path, has_room) for has_room in (False, True))
    _require_kept_only_with_room(dropped, kept)
    for report, has_room in ((dropped, False), (kept, True)):
        if report.difference:
            raise Failed(
                "cause-not-known",
                f"shard(..., has_room={has_room}): groups, types and sharding are right, but after one step the "
                f"weights differ by up to {report.difference:.2g} from those of the same choices made by this check",
                "This check does not know the cause. Does shard change the weights, or what a layer computes? Compare "
                "with paceline course show 4 --solution.",
            )
    predictions = on_ranks(path, 1, _read_predictions)[0]
    others = on_ranks(path, 2, _measure_others)[0]
    return "\n".join([*_compare_predictions(predictions, dropped, kept), *_table(dropped, kept, others)])


def _run_choice(path: Path, has_room: bool) -> ShardedStepReport:
    """One step under the person's choices, with everything right but how long weights stay whole."""
    report = on_ranks(path, 2, _shard_by, has_room)[0]
    call = f"shard(..., has_room={has_room})"
    if not isinstance(report, ShardedStepReport):
        raise Failed(*report)
    if not report.groups:
        raise Failed("not-sharded", f"{call} shards nothing", "fully_shard(part, ...) for each part, then the model.")
    require_blocks([name for name in report.groups if name], f"{call} makes groups of")
    if report.stored != ["float32"]:
        raise Failed(
            "shards-not-float32",
            f"{call}: the shards are {', '.join(report.stored)}",
            "The policy makes bfloat16 copies for a pass. The shards stay float32: an update that is smaller than "
            "1/256 of a bfloat16 weight changes nothing.",
        )
    _require_precision_used(report, call)
    return report


def _require_precision_used(report: ShardedStepReport, call: str) -> None:
    block_size = count_weights(Block())
    rest_size = count_weights(Stack()) - BLOCKS * block_size
    block_types = {name for name, size, _ in report.gathers if size == block_size}
    rest_types = {name for name, size, _ in report.gathers if size == rest_size}
    others = [size for _, size, _ in report.gathers if size not in (block_size, rest_size)]
    if others:
        raise Failed(
            "blocks-share-a-group",
            f"{call}: {max(others):,} weights are gathered at once; a block has {block_size:,}",
            "fully_shard with a list makes one group of all its modules. Call it once for each block.",
        )
    failed = f"; the step fails: {report.error}" if report.error else ""
    if not block_types or not rest_types:
        raise Failed(
            "cause-not-known",
            f"{call}: no gather of a block, or none of the rest, was seen{failed}",
            "This check does not know the cause. The types that choose_precision returns are right: does shard use "
            "them and nothing else?",
        )
    if rest_types != {"bfloat16"}:
        raise Failed(
            "model-without-precision",
            f"{call}: the weights outside of the blocks are gathered as {', '.join(rest_types)}{failed}",
            "Each fully_shard call has its own mp_policy: the model's is choose_precision(True).",
        )
    if block_types != {"bfloat16"}:
        raise Failed(
            "blocks-without-precision",
            f"{call}: the blocks' weights are gathered as {', '.join(block_types)}{failed}",
            "Each fully_shard call has its own mp_policy: a block's is choose_precision(False).",
        )
    if report.error:
        raise Failed(
            "float32-between-blocks",
            f"{call}: the blocks are gathered as bfloat16, but the step fails: {report.error}",
            "A block's output must stay bfloat16 for the next layer: choose_precision(False) for blocks, "
            "choose_precision(True) for the model only.",
        )
    if report.output != "float32":
        raise Failed(
            "logits-in-bfloat16",
            f"{call}: the model returns {report.output}",
            "choose_precision(True) belongs to the model, choose_precision(False) to its blocks.",
        )
    sums = {name for name, _, _ in report.sums}
    if sums != {"float32"}:
        raise Failed(
            "sums-in-bfloat16",
            f"{call}: gradients are summed as {', '.join(sorted(sums))}",
            "choose_precision sums in float32; does every fully_shard call use it?",
        )


def _require_kept_only_with_room(dropped: ShardedStepReport, kept: ShardedStepReport) -> None:
    without = f"without room {len(dropped.blocks_kept)} of {BLOCKS} blocks are whole after the forward pass"
    seen = f"{without}, with room {len(kept.blocks_kept)}"
    if len(dropped.blocks_kept) == BLOCKS and not kept.blocks_kept:
        raise Failed(
            "turned-around",
            seen,
            "reshard_after_forward=True drops whole weights. has_room allows to keep them: not has_room.",
        )
    if dropped.blocks_kept:
        raise Failed(
            "kept-without-room",
            f"{seen}; at most {dropped.most_whole_mb:.1f} MB of weights were whole at once",
            "After the forward pass each rank then holds the whole model, and memory ends there. Drop a block's "
            "weights after its forward pass: reshard_after_forward=True.",
        )
    if len(kept.blocks_kept) < BLOCKS:
        raise Failed(
            "dropped-with-room",
            f"{seen}; a step made {len(kept.gathers)} gathers, {len({*kept.groups})} groups need one each",
            "What is dropped is gathered again for the backward pass. Where memory holds all weights, keep them: "
            "reshard_after_forward=False, for the blocks too.",
        )
    for report, name in ((dropped, "without room"), (kept, "with room")):
        if not report.is_rest_kept:
            raise Failed(
                "rest-gathered-twice",
                f"{name} the weights outside of the blocks are dropped after the forward pass: {len(report.gathers)} "
                "gathers in a step",
                "The backward pass begins with the last layer, which belongs to this group: it is gathered again at "
                "once. Leave reshard_after_forward out for the model: FSDP then keeps its group.",
            )


def _compare_predictions(predicted: dict[str, int], dropped: ShardedStepReport, kept: ShardedStepReport) -> list[str]:
    block_size = count_weights(Block())
    sent = next(size * 2 // numbers for _, numbers, size in dropped.gathers if numbers == block_size)
    measured = {
        "BLOCKS_WHOLE_AT_ONCE": (dropped.most_blocks, "the next block is gathered when the last one is dropped"),
        "BYTES_PER_GATHERED_WEIGHT": (sent, "bfloat16 has 16 bits"),
        "GATHERS_IF_DROPPED": (len(dropped.gathers), "5 groups forward, and 4 of them again backward"),
        "GATHERS_IF_KEPT": (len(kept.gathers), "each of the 5 groups once"),
    }
    lines = [f"{'':<25} {'predicted':>10} {'measured':>9}"]
    for name, (value, why) in measured.items():
        lines.append(f"{name:<25} {predicted[name]:>10} {value:>9}")
        lines += [f"    {why}"] if predicted[name] != value else []
    return lines


def _table(
    dropped: ShardedStepReport, kept: ShardedStepReport, others: list[tuple[str, ShardedStepReport]]
) -> list[str]:
    """Not wider than a terminal of 80 columns leaves room for."""
    whole_model, float32, layers = others
    yours = [("blocks  bfloat16  dropped", dropped), ("blocks  bfloat16  kept", kept)]
    lines = [
        f"One step of {count_weights(Stack()):,} weights on two ranks of this machine:",
        f"{'groups  type      weights':<26} {'gathers':>7} {'whole MB':>9} {'sent MB':>8} {'ms':>4}",
    ]
    for name, report in (whole_model, float32, *yours, layers):
        mine = "  yours" if any(report is own for _, own in yours) else ""
        lines.append(
            f"{name:<26} {len(report.gathers):>7} {report.most_whole_mb:>9.1f} {report.sent_mb:>8.1f} "
            f"{report.step_ms:>4.0f}{mine}"
        )
    return lines


ITEMS = (Item("sharding: weights stay whole where there is room", check_sharding),)
