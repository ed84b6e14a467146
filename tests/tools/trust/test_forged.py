"""A forger writes a whole chain of hashes anew. What it says of the run is compared with the run, or is not proved."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.forged import rewrite_state
from harness.ranks import make_world
from paceline.checkpoints.format import MANIFEST, Manifest, read_manifest, step_folders
from paceline.checkpoints.ledger import hash_entry, hash_state
from paceline.cli.main import main
from paceline.data.fingerprint import pack_keys, unpack_keys
from paceline.data.sources import custom
from paceline.errors import EXIT_DIFFERENT, EXIT_FINISHED, EXIT_USER, UserError
from paceline.runs.folder import RunFolder
from paceline.runs.place import RunPlace
from paceline.runs.receipt import LINKS, NO_HASH, hash_file, make_receipt, read_receipt
from paceline.settings.load import load_config, to_yaml
from paceline.tools.trust.replayed import Draw
from paceline.tools.trust.verify import Proof, other_bits, verify_run
from paceline.training import components
from paceline.training.loop import train
from paceline.training.replay import Replay

ALL = Draw(steps=1000, at_most=0, tolerance=1e-3)
CODE = """
from pathlib import Path
import numpy as np

Path("executed").touch()

def data(data_dir):
    x, y = np.load("x.npy"), np.load("y.npy")
    return (x[:160], y[:160]), (x[160:], y[160:])
"""
MODEL = """
from torch import nn

def model(num_classes, input_shape):
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, num_classes))
"""
FLAGS = [
    *("--dataset", "mine.py:data", "--model-name", "mlp", "--hidden-size", "8", "--device", "cpu", "--exact"),
    *("--lanes", "2", "--global-batch-size", "16", "--epochs", "2", "--keep-every-epochs", "1", "--keep-last", "9"),
]
Links = dict[str, Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of 16 steps, its code and its data."""
    folder = tmp_path_factory.mktemp("forged")
    values = np.random.default_rng(0)
    np.save(folder / "x.npy", values.normal(size=(200, 8)).astype(np.float32))
    np.save(folder / "y.npy", values.integers(0, 3, size=200))
    (folder / "mine.py").write_text(CODE)
    custom.load.cache_clear()  # a process calls the function of a data set once
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        config = load_config("synthetic-mlp", FLAGS).config
        RunFolder(folder / "run").create()
        train(config, make_world(0, 1), RunPlace(folder / "run", None))
    (folder / "run" / "config.yaml").write_text(to_yaml(config))
    (folder / "executed").unlink()
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made, tmp_path / "copy", symlinks=True)
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setenv("PACELINE_TRUST_CODE", "1")
    custom.load.cache_clear()  # a process calls the function of a data set once
    return tmp_path / "copy" / "run"


def forge(run: Path, change: Callable[[Links], object] = lambda links: None) -> None:
    """Make a receipt that fits the files of the folder, after a change of its links."""
    links = read_receipt(run / "receipt.json").links
    change(links)
    links["metrics"] = {name: hash_file(run / name) for name in links["metrics"]}
    links["results"]["sha256"] = hash_file(run / "results.json")
    previous = NO_HASH
    for entry in links["checkpoints"]:
        stored = run / "checkpoints" / f"step-{entry['step']:08}"
        entry["state"] = hash_state(stored) if stored.exists() else entry["state"]
        entry["previous"] = previous
        entry["hash"] = previous = hash_entry(entry)
    (run / "receipt.json").write_text(json.dumps(make_receipt("run", links)))


def forge_results(run: Path, **values: Any) -> None:
    results = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(json.dumps({**results, **values}))


def check(run: Path, draw: Draw = ALL) -> Proof:
    return verify_run(run, read_receipt(run / "receipt.json"), [], draw)


def found(proof: Proof, kind: Any) -> set[str]:
    return {finding.what for finding in proof.findings.of(kind)}


def test_an_honest_run_with_a_new_chain_is_verified(copy: Path) -> None:
    forge(copy)
    proof = check(copy)
    assert found(proof, "different") == set()
    assert proof.replayed_steps == proof.total_steps == 16


def test_the_code_of_a_stranger_is_not_executed(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_TRUST_CODE")
    assert main(["verify", str(copy)]) == EXIT_USER
    assert main(["replay", str(copy), "--without", "3", "--dry-run"]) == EXIT_USER
    assert not (copy.parent / "executed").exists()


def say_other_results(run: Path) -> None:
    """The receipt keeps the true accuracy. People read results.json."""
    forge_results(run, test_accuracy=0.99)
    forge(run)


def say_other_settings(run: Path) -> None:
    """The checkpoints keep the true settings, and a replay uses them."""
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("weight_decay: 0.0\n", "weight_decay: 0.5\n"))
    assert (run / "config.yaml").read_text() != text
    forge(run, lambda links: links["config"].update(weight_decay=0.5))


def say_nothing_of_settings(run: Path) -> None:
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("global_batch_size: 16", "global_batch_size: 8"))
    assert (run / "config.yaml").read_text() != text
    forge(run, lambda links: links["config"].clear())


def say_fewer_steps(run: Path) -> None:
    """All steps of the short run can be replayed, so each would seem to be proved."""
    forge_results(run, steps=8)
    forge(run, lambda links: links["results"].update(steps=8))


def say_more_steps(run: Path) -> None:
    forge_results(run, steps=2**52)
    forge(run, lambda links: links["results"].update(steps=2**52))


def say_another_processor(run: Path) -> None:
    """Other bits are accepted then, but not another accuracy."""
    forge_results(run, test_accuracy=0.99, test_loss=0.01)
    forge(run, lambda links: links["machine"].update(processor="another"))
    forge(run, lambda links: links["results"].update(test_accuracy=0.99, test_loss=0.01))


@pytest.mark.parametrize(
    ("lie", "named"),
    [
        (say_other_results, "results"),
        (say_other_settings, "config"),
        (say_nothing_of_settings, "config"),
        (say_fewer_steps, "weights"),
        (say_more_steps, "steps"),
        (say_another_processor, "results"),
    ],
)
def test_a_lie_is_found(copy: Path, lie: Callable[[Path], None], named: str) -> None:
    lie(copy)
    assert named in found(check(copy), "different")


def test_earlier_settings_and_initial_weights_are_not_proved(copy: Path) -> None:
    first = min(step_folders(copy / "checkpoints"))
    rewrite_state(first, lambda state: state["config"].update(max_steps=8))  # the run was continued after this end
    forge(copy)
    proof = check(copy)
    assert found(proof, "different") == set()
    assert proof.replayed_steps == 16
    assert "config" in found(proof, "not proved")
    rewrite_state(first, lambda state: state["config"].update(init_from="elsewhere"))
    forge(copy)
    assert "weights" in found(check(copy, Draw(0, 0, 0.0)), "not proved")


def test_injected_faults_are_named(copy: Path) -> None:
    """config.yaml does not have them: a run that is started from it should not fail."""
    for checkpoint in step_folders(copy / "checkpoints"):
        rewrite_state(checkpoint, lambda state: state["config"].update(inject="nan rank=0 step=5"))
    forge(copy, lambda links: links["config"].update(inject="nan rank=0 step=5"))
    proof = check(copy)
    assert found(proof, "different") == set()
    assert "config" in found(proof, "not proved")


def test_steps_without_a_record_count_only_if_weights_prove_them(copy: Path) -> None:
    (copy / "steps.f64").write_bytes(b"")
    forge(copy)
    assert check(copy).replayed_steps == 16
    shutil.rmtree(min(step_folders(copy / "checkpoints")))
    forge(copy, lambda links: links["checkpoints"].pop(0))
    proof = check(copy, Draw(steps=5, at_most=5, tolerance=0.0))
    assert found(proof, "different") == set()
    assert proof.replayed_steps == 0
    assert "results" in found(proof, "not proved")  # of the best checkpoint, which is gone


def test_a_hostile_receipt_is_refused(copy: Path) -> None:
    links = read_receipt(copy / "receipt.json").links
    for name in LINKS:
        content: Any
        for content in (None, 7, "x", [7], {"steps": []}, {"fingerprint": {"train": 7}}):
            (copy / "receipt.json").write_text(json.dumps(make_receipt("run", {**links, name: content})))
            if name == "config" and isinstance(content, dict):
                continue  # any names and values
            with pytest.raises(UserError, match="not a receipt"):
                read_receipt(copy / "receipt.json")


def test_a_run_that_had_more_ranks_once_is_not_compared_by_bits(copy: Path) -> None:
    links = read_receipt(copy / "receipt.json").links
    config = load_config(str(copy / "config.yaml"), []).config
    assert other_bits(config, links) == []
    links["machine"]["lanes"] = 0
    assert other_bits(config, links) == []
    links["checkpoints"][0]["ranks"] = 2
    assert len(other_bits(config, links)) == 1


def test_batch_norm_of_three_ranks_is_not_called_a_forgery(copy: Path) -> None:
    """One rank cannot put the samples together as three ranks did."""
    with Replay(copy, ["--no-exact", "--lanes", "0", "--model-name", "bn.py:model"]) as replay:
        (copy.parent / "bn.py").write_text(MODEL)
        replay.start_at(0)
        assert replay.has_batches_of_run
        for path in replay.stored.values():
            about = read_manifest(path)
            (path / MANIFEST).write_bytes(Manifest(about.files, {**about.about, "world_size": 3}).to_bytes())
        replay.start_at(0)
        assert not replay.has_batches_of_run


def test_who_asks_for_a_signer_gets_a_difference_without_a_signature(copy: Path) -> None:
    for name in ("mine", "other"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", name], check=True, capture_output=True)
    alone = copy.parent / "alone.json"
    shutil.copy(copy / "receipt.json", alone)
    for receipt in (str(copy), str(alone)):
        ask = ["verify", receipt, "--steps", "0"]
        assert main(ask) == EXIT_FINISHED
        assert main([*ask, "--signers", "mine.pub"]) == EXIT_DIFFERENT
        assert main(["sign", receipt, "--key", "mine"]) == EXIT_FINISHED
        assert main([*ask, "--signers", "mine.pub"]) == EXIT_FINISHED
        assert main([*ask, "--signers", "other.pub"]) == EXIT_DIFFERENT


def test_a_signature_stays_if_the_next_one_fails(copy: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "mine"], check=True, capture_output=True)
    assert main(["sign", str(copy), "--key", "mine"]) == EXIT_FINISHED
    before = (copy / "receipt.json.sig").read_bytes()
    assert main(["sign", str(copy), "--key", "mine.py"]) == EXIT_USER  # no key
    assert (copy / "receipt.json.sig").read_bytes() == before


# --- States of checkpoints, from which a replay continues


def train_on(copy: Path, *flags: str, to: str = "again", start: Path | None = None) -> Path:
    """Train in the folder of the copy, perhaps on from a checkpoint of another run."""
    run = copy.parent / to
    config = load_config("synthetic-mlp", [*FLAGS, "--epochs", "3", *flags]).config
    RunFolder(run).create()
    train(config, make_world(0, 1), RunPlace(run, start))
    (run / "config.yaml").write_text(to_yaml(config))
    return run


def count_epochs_otherwise(state: dict[str, Any]) -> None:
    """The samples of one epoch are trained on again."""
    state.update(epochs_counted_from={"step": 8, "epoch": 0})


def hold_other_samples_out(state: dict[str, Any]) -> None:
    """Samples of the validation are trained on."""
    keys = unpack_keys(state["data"]["held_out"])
    state["data"].update(split="keys", held_out=pack_keys(keys[:3]))


@pytest.mark.parametrize(("change", "named"), [(count_epochs_otherwise, "order"), (hold_other_samples_out, "data")])
def test_a_state_that_leads_to_other_samples_is_found(
    copy: Path, change: Callable[[dict[str, Any]], None], named: str
) -> None:
    """All later steps are what the state says, so their replay agrees."""
    rewrite_state(copy / "checkpoints" / "step-00000008", change)
    run = train_on(copy, start=copy / "checkpoints" / "step-00000008")
    shutil.copytree(copy / "checkpoints" / "step-00000008", run / "checkpoints" / "step-00000008", dirs_exist_ok=True)
    forge(run)
    proof = check(run)
    assert named in found(proof, "different")
    assert proof.replayed_steps == 0


def test_excluded_samples_that_were_used_are_found(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on without samples that it has used, and says in its settings that it never had them."""
    with monkeypatch.context() as patch:
        patch.setattr(components, "require_unseen", lambda *_: None)
        run = train_on(copy, "--exclude", "3,5,9", start=copy / "checkpoints" / "step-00000008")
    shutil.copytree(copy / "checkpoints" / "step-00000008", run / "checkpoints" / "step-00000008", dirs_exist_ok=True)
    proof = check(run)
    assert found(proof, "different") == {"exclude"}
    assert "exclude" not in found(proof, "proved")


def test_steps_before_new_data_are_not_called_forged(copy: Path) -> None:
    samples = np.load("x.npy")
    samples[17] += 1
    np.save("x.npy", samples)
    custom.load.cache_clear()
    run = train_on(copy, "--accept-new-data", start=copy / "checkpoints" / "step-00000008")
    proof = check(run)
    assert found(proof, "different") == set()
    assert "data" in found(proof, "not proved")
    assert proof.replayed_steps < proof.total_steps == 24
    shutil.copytree(copy / "checkpoints" / "step-00000008", run / "checkpoints" / "step-00000008", dirs_exist_ok=True)
    assert check(run).replayed_steps == 16


def test_a_model_from_elsewhere_is_named_without_checkpoints(copy: Path) -> None:
    run = train_on(copy, "--init-from", str(copy), "--seed", "9")
    shutil.rmtree(run / "checkpoints")
    proof = check(run)
    assert found(proof, "different") == set()
    texts = [finding.text for finding in proof.findings.of("not proved") if finding.what == "weights"]
    assert any(str(copy) in text for text in texts)


def test_a_damaged_checkpoint_does_not_stop_the_replay(copy: Path) -> None:
    (copy / "checkpoints" / "step-00000008" / "model.safetensors").write_bytes(b"")
    proof = check(copy)
    assert found(proof, "different") == {"weights"}
    assert proof.replayed_steps == 16


def test_the_test_is_repeated_with_the_code_of_the_receipt(copy: Path) -> None:
    """A checkpoint holds the source of the model too. It is of the same person as the results."""
    (copy.parent / "bn.py").write_text(MODEL)
    run = train_on(copy, "--model-name", "bn.py:model")
    for checkpoint in step_folders(run / "checkpoints"):
        text = (checkpoint / "state.json").read_text()
        assert "nn.Linear(8, num_classes)" in text
        (checkpoint / "state.json").write_text(text.replace("nn.Linear(8, num_classes)", "cheat(num_classes)"))
        rewrite_state(checkpoint, lambda state: None)
    forge(run)
    proof = check(run)
    assert found(proof, "different") == set()
    assert "results" in found(proof, "proved")


def test_another_best_epoch_is_found(copy: Path) -> None:
    best = json.loads((copy / "results.json").read_text())["best_epoch"]
    forge_results(copy, best_epoch=3 - best)
    forge(copy, lambda links: links["results"].update(best_epoch=3 - best))
    assert found(check(copy), "different") == {"results"}


@pytest.mark.parametrize("kind", ["step", "epoch"])
def test_a_logged_loss_is_the_mean_of_its_steps(copy: Path, kind: str) -> None:
    rows = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    row = next(row for row in rows if row["kind"] == kind)
    row["loss"] *= 0.9
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    forge(copy)
    assert found(check(copy), "different") == {"metrics"}


@pytest.mark.parametrize("name", ["metrics.jsonl", "steps.f64", "results.json"])
def test_what_is_not_a_plain_file_differs(copy: Path, name: str) -> None:
    for make in (os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")):
        path = copy / name
        path.rmdir() if path.is_dir() else path.unlink()
        make(path)
        assert "metrics" in found(check(copy, Draw(0, 0, 0.0)), "different")
