"""Checks a receipt against its run folder: files, code, data and stored checkpoints, then steps by replaying them."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline
from paceline.checkpoints.format import step_of
from paceline.checkpoints.resume import restore_weights
from paceline.checkpoints.store import Checkpoint, pointed_at
from paceline.data.fingerprint import differences, fingerprint_of
from paceline.data.registry import load_dataset
from paceline.errors import CheckpointError, DataError, PacelineError, UserError
from paceline.metrics.recorder import read_rows
from paceline.metrics.step_trace import UNKNOWN, read_trace
from paceline.runs.comparison import logged_losses
from paceline.runs.environment import versions_of_packages
from paceline.runs.folder import RunFolder
from paceline.runs.json_files import read_object
from paceline.runs.receipt import Receipt, hash_file, hash_package
from paceline.runs.trust import hash_code, require_trusted_code
from paceline.runtime.detect import ALONE, build_world
from paceline.settings.load import load_config
from paceline.settings.schema import Config
from paceline.tools.trust.findings import Findings
from paceline.tools.trust.replayed import Draw, replay_draw
from paceline.tools.trust.stored import (
    check_checkpoints,
    check_data_of_states,
    check_settings,
    complete,
    first_start,
)
from paceline.training.bad_numbers import RollBack
from paceline.training.receipt import config_link, describe_processor, metrics_link, results_link
from paceline.training.replay import Replay
from paceline.training.validate import evaluate_part

_ROUNDED = 1e-5  # a mean over steps is summed in another order than the run did


@dataclass(frozen=True)
class Proof:
    """The result of a verification."""

    findings: Findings
    total_steps: int
    replayed_steps: int
    tolerance: float = 0.0  # of the replayed numbers; 0: every bit was compared

    @property
    def detection(self) -> float:
        """The probability that one forged step, at any place of the run, would have been found.

        Of a step whose numbers are off by more than the tolerance.
        """
        return self.replayed_steps / max(self.total_steps, 1)


def verify_run(run: Path, receipt: Receipt, flags: list[Any], draw: Draw) -> Proof:
    """Check everything that can be checked here. Nothing in the run folder is changed."""
    findings, links = Findings(), receipt.links
    if receipt.broken_at is None:
        findings.add("proved", "chain", f"{len(links)} links, head {receipt.head[:12]}")
    else:
        findings.add(
            "different", "chain", f"the chain breaks at the link {receipt.broken_at}: it was changed afterwards"
        )
    config = load_config(str(run / "config.yaml"), flags).config
    require_trusted_code(run, config)  # the data set may be a function
    is_same_config = _check_config(run, links, findings)
    is_same_code = _check_code(config, links["code"], findings)
    _check_files(RunFolder(run), links, findings)
    _check_losses(RunFolder(run), config.run.log_frequency, findings)
    sound = check_checkpoints(run, links, findings)
    check_settings(config, sound, links, findings)
    reasons = other_bits(config, links)
    is_same_data = _check_data(config, links["data"], findings)
    total = int(links["results"]["steps"] or 0)
    replayed = 0
    if is_same_data and is_same_config and is_same_code:
        try:
            with Replay(run, flags) as replay:
                replay.stored = {checkpoint.step: checkpoint.path for checkpoint in sound}
                if check_data_of_states(sound, links, findings):
                    replayed = replay_draw(replay, sound, links, draw, reasons, findings)
                    _check_test(replay, sound, links, draw.tolerance if reasons else None, findings)
        except (CheckpointError, UserError, DataError) as error:
            is_other_run = isinstance(error.__cause__, RollBack) and not (reasons or links["config"].get("inject"))
            text = f"they cannot be replayed here: {error.what}"
            findings.add("different" if is_other_run else "not proved", "steps", text)
    else:
        findings.add("not proved", "steps", "not replayed: config, code or data have changed")
    return Proof(findings, total, replayed, draw.tolerance if reasons else 0.0)


def _check_config(run: Path, links: dict[str, Any], findings: Findings) -> bool:
    try:
        now = config_link(load_config(str(run / "config.yaml"), []).config)
    except PacelineError as error:
        findings.add("different", "config", f"config.yaml: {error.what}")
        return False
    then = complete(links["config"])
    now["inject"] = then["inject"]  # config.yaml never has it
    if then["inject"]:
        findings.add(
            "not proved", "config", f"faults were injected into the run, not into the replay: {then['inject']}"
        )
    return findings.compare("config", then, now, f"{len(links['config'])} settings of config.yaml")


def _check_code(config: Config, link: dict[str, Any], findings: Findings) -> bool:
    functions = {item.name: digest for item, digest in hash_code(config).items()}
    is_same = True
    if functions or link["functions"]:
        same = f"the source of {len(functions)} functions of yours"
        is_same = findings.compare("code", link["functions"], functions, same)
    if link["paceline"] != paceline.__version__:
        text = f"the run used Paceline {link['paceline']}, this is {paceline.__version__}"
        findings.add("not proved", "code", text)
    elif link["source_sha256"] != hash_package():
        findings.add("different", "code", f"the source of Paceline {paceline.__version__} is not that of the run")
    else:
        findings.add("proved", "code", f"Paceline {paceline.__version__}, every line of it")
    return is_same


def _check_files(folder: RunFolder, links: dict[str, Any], findings: Findings) -> None:
    files = {**links["metrics"], folder.results.name: links["results"]["sha256"]}
    now = {**metrics_link(folder), folder.results.name: hash_file(folder.results)}
    if findings.compare("metrics", files, now, f"{', '.join(files)} are the files of the receipt"):
        values = results_link(folder, read_object(folder.results))
        names = [name for name in links["results"] if links["results"][name] != values.get(name)]
        for name in names:
            text = f"{name}: {links['results'][name]} in the receipt, {values.get(name)} in {folder.results.name}"
            findings.add("different", "results", text)
    text = "accuracies and validation in metrics.jsonl, and all of results.json but the test, the steps and the weights"
    findings.add("not proved", "metrics", f"{text}: no validation is repeated")


def _check_losses(folder: RunFolder, log_frequency: int, findings: Findings) -> None:
    """The losses that people read are the means of the losses of the steps, which a replay compares.

    A row that was lost, on a full disk, makes the interval of the next one longer: such an interval is left out.
    """
    trace, rows = read_trace(folder.steps), read_rows(folder.metrics_jsonl)
    parts = [(f"step {end}", start, end, loss) for (start, end), loss in logged_losses(rows).items()]
    parts = [part for part in parts if part[2] - part[1] <= log_frequency]
    before = 0
    for row in rows:
        if row.get("phase") == "train":
            parts.append((f"epoch {row['epoch']}", before, row["step"], row["loss"]))
            before = row["step"]
    checked = 0
    for name, start, end, loss in parts:
        numbers = trace[start:end]
        losses = [loss for loss, _ in numbers if not math.isnan(loss)]
        if len(numbers) != end - start or UNKNOWN in numbers or not losses:
            continue
        mean, checked = sum(losses) / len(losses), checked + 1
        if not _is_close(mean, loss, _ROUNDED, _ROUNDED):
            text = f"{name}: loss {loss:.7g} in {folder.metrics_jsonl.name}, {mean:.7g} by its steps"
            findings.add("different", "metrics", text)
            return
    findings.add("proved", "metrics", f"{checked} logged training losses are the means of their steps")


def _check_data(config: Config, link: dict[str, Any], findings: Findings) -> bool:
    try:
        data = load_dataset(config.data, config.train.seed)
    except PacelineError as error:
        findings.add("not proved", "data", f"it cannot be read here: {error.what} (--data-dir PATH)")
        return False
    now = fingerprint_of(data)
    changed = differences(link["fingerprint"], now)
    if changed:
        findings.add("different", "data", "\n".join(changed))
        return False
    kind = now["train"]["kind"]
    how = {"pixels": "every value, by CRC-32", "files": "names and sizes of the pictures", "shards": "the checksums"}
    findings.add("proved", "data", f"{now['train']['samples']:,} training samples: {how.get(kind, 'some of them')}")
    if kind not in ("pixels", "shards"):
        findings.add("not proved", "data", "the contents of picture files: only their names and sizes are recorded")
    return True


def other_bits(config: Config, links: dict[str, Any]) -> list[str]:
    """Why this machine may give other bits than the run. Empty if it must give the same."""
    reasons = []
    device = build_world(config.parallel, ALONE).device
    here, machine = describe_processor(device), links["machine"]
    for name in here:
        if here[name] != machine[name]:
            reasons.append(f"the run used {machine[name]}, this is {here[name]}")
    now = {"python": platform.python_version(), **versions_of_packages()}
    if links["packages"].get("torch") != now.get("torch"):
        reasons.append(f"the run used torch {links['packages'].get('torch')}, this is {now.get('torch')}")
    if links["code"]["paceline"] != paceline.__version__:
        reasons.append("another version of Paceline")
    ranks = max([machine["ranks"], *(entry["ranks"] for entry in links["checkpoints"])])  # it may have changed
    if ranks > 1 and not machine["lanes"]:
        reasons.append(f"the run had {ranks} ranks without --exact, whose sums one rank rounds differently")
    return reasons


def _check_test(
    replay: Replay, sound: list[Checkpoint], links: dict[str, Any], tolerance: float | None, findings: Findings
) -> None:
    """The accuracy and the loss of the test, once more, by the code and the settings of the receipt.

    `tolerance`: None to compare bits.
    """
    link, last = links["results"], sound[-1] if sound else None
    if last is None:
        findings.add("not proved", "results", "the test cannot be repeated here: the run has no checkpoint")
        return
    best = pointed_at(replay.run / "checkpoints", "best")
    said = last.state.get("best_step")
    step = step_of(best) if best is not None else said if isinstance(said, int) and said > 0 else last.step
    checkpoint = next((one for one in sound if one.step == step), None)
    if checkpoint is None:
        findings.add("not proved", "results", f"the test used the checkpoint of step {step}, which is not stored")
        return
    if step <= first_start(links) and links["data"]["accepted"]:
        findings.add("not proved", "results", f"the test used the checkpoint of step {step}, of other data")
        return
    is_best = checkpoint.state.get("best_step") in (0, step)
    if not is_best or checkpoint.state.get("best_epoch") != link.get("best_epoch"):
        text = f"the best epoch is {link.get('best_epoch')}, and the test used the checkpoint of step {step}"
        findings.add("different", "results", text)
        return
    try:
        replay.start_at(step)
        restore_weights(checkpoint, replay.components.model.module)
        found = evaluate_part(replay.session, replay.components.test_data)
    except PacelineError as error:
        findings.add("not proved", "results", f"the test cannot be repeated here: {error.what}")
        return
    recorded = {"test_accuracy": link["test_accuracy"], "test_loss": link["test_loss"]}
    now = {"test_accuracy": found.accuracy, "test_loss": found.loss}
    rounding = tolerance or 0.0
    # On another machine the same weights may give another class to a sample or two at a boundary.
    share = max(rounding, 2 / max(found.samples, 1)) if tolerance is not None else 0.0
    is_same = _is_close(link["test_loss"], found.loss, rounding, rounding * 1e-3)
    if is_same and _is_close(link["test_accuracy"], found.accuracy, 0.0, share):
        how = "the same" if tolerance is None else f"within {tolerance:g}"
        findings.add("proved", "results", f"accuracy and loss of the test on {found.samples:,} samples: {how}")
    else:
        findings.compare("results", recorded, now, "")


def _is_close(then: float | None, now: float | None, relative: float, absolute: float) -> bool:
    if then is None or now is None:
        return then is now
    if math.isnan(then) or math.isnan(now):
        return math.isnan(then) and math.isnan(now)
    return math.isclose(then, now, rel_tol=relative, abs_tol=absolute)
