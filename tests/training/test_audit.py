"""`--audit`: which steps it draws, who it names, and runs with a faulty rank."""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.cli import paceline
from harness.ranks import make_world, run_ranks
from harness.runs import quick_config, read_results, train_in
from harness.short_run import injected_faults, read_failures
from paceline.checkpoints.store import Retention, choose_kept
from paceline.data.augment import build_pipeline
from paceline.data.dataset import Dataset, ResidentDataset
from paceline.data.loader import Batch, LaneAudit, Loader
from paceline.data.registry import load_dataset
from paceline.errors import EXIT_CORRUPTION, EXIT_USER, Cause, UserError
from paceline.parallel.digests import digest_tensors
from paceline.training.audit_plan import audited_steps, plan_audits
from paceline.training.audit_votes import Dispute, Verdict, judge

TINY = (
    *("--dataset", "synthetic", "--input-size", "8", "--num-samples", "400", "--num-classes", "4", "--augment", "none"),
    *("--model-name", "mlp", "--hidden-size", "8", "--global-batch-size", "8", "--exact", "--lanes", "4"),
)


# --- Which steps


def test_a_lasting_fault_meets_an_audit_within_two_blocks() -> None:
    """At 1 % after at most 199 steps, whatever the seed: found within 300 steps with probability 1."""
    for seed in range(500):
        steps = list(audited_steps(0, 1000, seed=seed, share=0.01))
        assert [step // 100 for step in steps] == list(range(10))
        assert all(later - earlier < 200 for earlier, later in itertools.pairwise(steps))
    drawn = {step % 100 for seed in range(500) for step in audited_steps(0, 1000, seed=seed, share=0.01)}
    assert drawn == set(range(100))


@pytest.mark.parametrize("share", [1.0, 0.75, 0.3, 0.011, 1 / 3])
def test_the_draw_of_a_step_does_not_depend_on_where_the_question_begins(share: float) -> None:
    whole = list(audited_steps(0, 300, seed=7, share=share))
    parts = [
        step for first in range(0, 300, 7) for step in audited_steps(first, min(first + 7, 300), seed=7, share=share)
    ]
    assert parts == whole == sorted(set(whole))
    assert share != 1 or whole == list(range(300))


def test_every_rank_is_audited_by_another_one() -> None:
    config = quick_config("--exact", "--audit", "100%")
    plans = [plan_audits(config, make_world(rank, 4), 2, range(50, 90)) for rank in range(4)]
    for step in range(40):
        assert sorted(plan[step].rank for plan in plans) == [0, 1, 2, 3]
        assert all(plan[step].rank != rank for rank, plan in enumerate(plans))
        assert len({plan[step].lane for plan in plans}) == 1
    assert {plan[step].lane for plan in plans for step in plan} == {0, 1}


@pytest.mark.parametrize(
    "flags",
    [
        ("--audit", "1%"),
        ("--exact", "--audit", "101%"),
        ("--exact", "--audit", "often"),
        ("--inject", "flip rank=0 step=3"),
        ("--exact", "--inject", "flip rank=0 step=3 bit=32"),
    ],
)
def test_wrong_requests_are_refused(flags: tuple[str, ...]) -> None:
    with pytest.raises(UserError):
        quick_config(*flags)


# --- What is compared


class ReadData:
    """Like a resident data set, but read ahead by a thread."""

    def __init__(self, data: ResidentDataset) -> None:
        self._data = data
        self.labels = data.labels

    def __len__(self) -> int:
        return len(self._data)

    def read(self, indices: Tensor) -> Tensor:
        return self._data.read(indices)


def batches(dataset: Dataset, rank: int, audits: dict[int, LaneAudit] | None = None) -> Iterator[Batch]:
    config = quick_config()
    info = load_dataset(config.data, 1).info
    loader = Loader(dataset, torch.arange(640), build_pipeline(config.data, info, 1), make_world(rank, 4))
    return loader.train_epoch(seed=1, epoch=0, global_batch_size=64, first_step=2, audits=audits)


@pytest.mark.parametrize("is_resident", [True, False])
def test_the_share_of_another_rank_comes_with_the_own_one(is_resident: bool) -> None:
    resident = load_dataset(quick_config().data, 1).train
    assert isinstance(resident, ResidentDataset)
    dataset: Dataset = resident if is_resident else ReadData(resident)
    audits = {step: LaneAudit(rank, 0) for step, rank in ((0, 1), (3, 1), (5, 2), (6, 3), (9, 0))}
    own = list(batches(dataset, 3))
    for number, (batch, plain) in enumerate(zip(batches(dataset, 3, audits), own, strict=True), start=2):
        assert torch.equal(batch.inputs, plain.inputs)
        assert torch.equal(batch.labels, plain.labels)
        if number not in audits:
            assert batch.audit is None
        elif audits[number].rank == 3:
            assert batch.audit == audits[number]  # its own share: nothing is made twice
        else:
            assert batch.audit is not None
            assert batch.audit.share is not None
            expected = next(itertools.islice(batches(dataset, audits[number].rank), number - 2, None))
            assert torch.equal(batch.audit.share.inputs, expected.inputs)
            assert torch.equal(batch.audit.share.ids, expected.ids)


def test_a_digest_changes_with_any_bit_and_any_exchange() -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(2**17 + 5, generator=generator)

    def digest(values: Tensor | None) -> int:
        return int(digest_tensors([values], torch.device("cpu"))[0])

    for place in (0, 1, 2**16, 2**17 + 4):
        for bit in (0, 20, 31):
            other = tensor.clone()
            other.view(torch.int32)[place] ^= torch.tensor(1 << bit).to(torch.int32)
            assert digest(other) != digest(tensor)
    exchanged = torch.cat([tensor[2**16 : 2**17], tensor[: 2**16], tensor[2**17 :]])
    assert len({digest(exchanged), digest(tensor), digest(tensor.flip(0)), digest(None), digest(tensor * 0)}) == 5
    image = tensor[: 2 * 3 * 4 * 4].view(2, 3, 4, 4)
    assert digest(image) == digest(image.contiguous(memory_format=torch.channels_last))


# --- Who is wrong

RIGHT, WRONG, OTHER = (1, 2, 3), (1, 9, 3), (1, 9, 4)


@pytest.mark.parametrize(
    ("owner", "auditor", "trained", "audited", "votes", "expected"),
    [
        # Rank 2 of 4 is always wrong: as the owner of a lane, and as an auditor.
        (2, 0, WRONG, RIGHT, [RIGHT, RIGHT, WRONG, RIGHT], [Verdict(2, 1, is_permanent=True)]),
        (1, 2, RIGHT, WRONG, [RIGHT, RIGHT, OTHER, RIGHT], [Verdict(2, 1, is_permanent=True)]),
        # Wrong once, in training or in the audit.
        (2, 0, WRONG, RIGHT, [RIGHT] * 4, [Verdict(2, 1, is_permanent=False)]),
        (2, 0, RIGHT, WRONG, [RIGHT] * 4, [Verdict(0, 1, is_permanent=False)]),
        # Two ranks: they decide only if one of them contradicts itself.
        (0, 1, WRONG, RIGHT, [WRONG, RIGHT], []),
        (0, 1, WRONG, RIGHT, [RIGHT, RIGHT], [Verdict(0, 1, is_permanent=False)]),
        (0, 1, WRONG, RIGHT, [OTHER, RIGHT], [Verdict(0, 2, is_permanent=False)]),
        # Two of four are wrong, each in its own way: only the healthy ones agree.
        (
            1,
            2,
            WRONG,
            OTHER,
            [RIGHT, WRONG, OTHER, RIGHT],
            [Verdict(1, 1, is_permanent=True), Verdict(2, 1, is_permanent=True)],
        ),
        (0, 1, RIGHT, WRONG, [RIGHT, WRONG, OTHER], []),
        # Two of four agree with each other on each side.
        (0, 1, WRONG, RIGHT, [WRONG, RIGHT, WRONG, RIGHT], []),
        # One rank.
        (0, 0, WRONG, RIGHT, [RIGHT], [Verdict(0, 1, is_permanent=False)]),
    ],
)
def test_votes(owner: int, auditor: int, trained: Any, audited: Any, votes: list[Any], expected: list[Verdict]) -> None:
    assert judge([Dispute(owner, auditor, trained, audited, votes)]) == expected


def test_one_rank_is_named_once() -> None:
    once = Dispute(2, 1, WRONG, RIGHT, [RIGHT, RIGHT, RIGHT, RIGHT])
    again = Dispute(3, 2, RIGHT, WRONG, [RIGHT, RIGHT, WRONG, RIGHT])
    assert judge([once, again]) == [Verdict(2, 1, is_permanent=True)]


def test_the_newest_audited_checkpoint_is_kept() -> None:
    states = {step: {"step": step, "audited": min(step, 25)} for step in (50, 40, 30, 20, 10)}
    assert choose_kept(states, Retention(keep_last=2, keep_best=1)) == {50, 40, 20}
    states[20]["best_step"] = 10  # the best one if the run goes back to step 20
    assert choose_kept(states, Retention(keep_last=2, keep_best=1)) == {50, 40, 20, 10}
    plain: dict[int, dict[str, Any]] = {step: {"step": step} for step in states}
    assert choose_kept(plain, Retention(keep_last=2, keep_best=1)) == {50, 40}


# --- Runs


@pytest.mark.long
def test_a_thousand_clean_audits_find_nothing_and_change_nothing(tmp_path: Path) -> None:
    flags = (*TINY, "--epochs", "1000", "--max-steps", "500", "--save-epochs", "1000", "--log-frequency", "50")
    run_ranks(2, train_in, str(tmp_path / "audited"), (*flags, "--audit", "100%"))
    run_ranks(1, train_in, str(tmp_path / "plain"), flags)
    audited, plain = (read_results(tmp_path / name) for name in ("audited", "plain"))
    assert audited["audits"] == 500  # of two ranks each: a thousand comparisons
    assert audited["weights_sha256"] == plain["weights_sha256"]
    assert audited["optimizer_sha256"] == plain["optimizer_sha256"]
    assert not (tmp_path / "audited" / "audit.jsonl").exists()


LIFE = (*("train", "shapes-cnn", *TINY, "--epochs=9", "--save-steps=20", "--log-frequency=50", "--track"),)


def read_findings(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


def outcome(folder: Path) -> list[Any]:
    """The last weights, and the test of the best ones."""
    results = read_results(folder)
    return [results[name] for name in ("weights_sha256", "optimizer_sha256", "best_epoch", "test_loss")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    answer = paceline(*LIFE, "--processes=1", "--output-dir=run", cwd=folder)
    assert answer.code == 0, answer
    return outcome(folder / "run")


@pytest.mark.long
@pytest.mark.parametrize(("bit", "latest"), [(24, 429), (30, 130)])  # bit 30 makes a gradient infinite: found at once
def test_a_rank_that_is_always_wrong_is_named_and_left_out(
    tmp_path: Path, undisturbed: list[Any], bit: int, latest: int
) -> None:
    """At 1 % and within 300 steps. The checkpoints since the last audit without a finding are not used."""
    fault = ("--inject", f"flip rank=2 step=130 steps=100000 bit={bit} tensor=classifier.bias")
    answer = paceline(*LIFE, "--processes=4", "--audit=1%", *fault, "--output-dir=run", cwd=tmp_path)
    assert answer.code == 0, answer
    run = tmp_path / "run"
    assert injected_faults(run) == ["flip (rank 2, step 130)"]
    (found,) = read_findings(run)
    assert (found["rank"], found["is_permanent"]) == (2, True)
    assert found["tensor"] == "the gradient of classifier.bias"
    assert 130 <= found["step"] <= latest
    assert (run / "exclude.txt").read_text() == f"{socket.gethostname()}\n"
    (failure,) = read_failures(run)
    assert (failure["cause"], failure["rank"], failure["exit_code"]) == (Cause.CORRUPTION, 2, EXIT_CORRUPTION)
    # Steps after the last good audit are computed again, though newer checkpoints existed.
    assert failure["step"] - failure["lost_steps"] <= found["audited_step"] < 130
    results = read_results(run)
    assert (results["steps"], results["world_size"]) == (405, 2)
    assert outcome(run) == undisturbed


@pytest.mark.long
def test_a_transient_flip_on_the_only_rank(tmp_path: Path, undisturbed: list[Any]) -> None:
    """The same rank computes the lane twice. The second attempt is not disturbed."""
    flip = ("--inject", "flip rank=0 step=30 bit=24")
    answer = paceline(*LIFE, "--processes=1", "--audit=100%", *flip, "--output-dir=run", cwd=tmp_path)
    assert answer.code == 0, answer
    (found,) = read_findings(tmp_path / "run")
    assert (found["rank"], found["step"], found["is_permanent"], found["audited_step"]) == (0, 30, False, 29)
    assert outcome(tmp_path / "run") == undisturbed
    # Without the audit the same flip changes the result, and no check reports it.
    answer = paceline(*LIFE, "--processes=1", *flip, "--output-dir=unseen", cwd=tmp_path)
    assert answer.code == 0, answer
    assert injected_faults(tmp_path / "unseen") == ["flip (rank 0, step 30)"]
    assert outcome(tmp_path / "unseen") != undisturbed


@pytest.mark.long
def test_a_single_rank_that_is_always_wrong(tmp_path: Path) -> None:
    """Both computations of its lane are equal, but not the known weights: checked in the first audit of an epoch."""
    flip = ("--inject", "flip rank=0 step=70 steps=100000 bit=24")
    answer = paceline(*LIFE, "--processes=1", "--audit=10%", *flip, "--output-dir=run", cwd=tmp_path)
    assert answer.code == EXIT_CORRUPTION, answer
    run = tmp_path / "run"
    for found in read_findings(run):
        assert (found["rank"], found["is_permanent"]) == (0, True)
        # Epochs have 45 steps. The check of the second one passed; the fault begins after it.
        assert 45 < found["audited_step"] < 70
        assert 90 < found["step"] < 110
    failures = read_failures(run)
    assert [failure["cause"] for failure in failures] == [Cause.CORRUPTION] * 2
    assert failures[0]["step"] - failures[0]["lost_steps"] <= found["audited_step"]


@pytest.mark.long
def test_two_ranks_cannot_say_which_one_is_wrong(tmp_path: Path) -> None:
    flip = ("--inject", "flip rank=1 step=30 steps=1000 bit=24")
    answer = paceline(*LIFE, "--processes=2", "--audit=50%", *flip, "--output-dir=run", cwd=tmp_path)
    assert answer.code == EXIT_CORRUPTION, answer
    (found,) = read_findings(tmp_path / "run")
    assert (found["rank"], found["suspects"]) == (None, [0, 1])
    assert not (tmp_path / "run" / "exclude.txt").exists()
    (failure,) = read_failures(tmp_path / "run")
    assert (failure["cause"], failure["is_restarted"]) == (Cause.CORRUPTION, False)
    wrong = paceline(*LIFE, "--inject", "flip rank=0 step=3 tensor=head", "--output-dir=wrong", cwd=tmp_path)
    assert wrong.code == EXIT_USER, wrong
