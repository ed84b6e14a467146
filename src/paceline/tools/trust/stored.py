"""Checks the stored checkpoints of a run: their tensors and states are those of the receipt.

A replay starts at a stored state and continues with what it says: settings, the count of epochs, the samples that are
held out. So the states of an honest run agree with each other, and with the receipt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.checkpoints.format import STATE, step_folders, step_of
from paceline.checkpoints.ledger import Entry, hash_checkpoint, hash_entry, hash_state
from paceline.checkpoints.store import Checkpoint, open_checkpoint
from paceline.errors import CheckpointError, PacelineError
from paceline.runs.epoch_clock import EpochClock
from paceline.runs.receipt import NO_HASH
from paceline.settings.load import load_saved
from paceline.settings.schema import Config
from paceline.tools.trust.findings import Findings
from paceline.training.receipt import config_link
from paceline.training.replay import Replay
from paceline.training.run_data import POSITIONS, RunData
from paceline.training.unseen import find_usage, require_unseen


def check_checkpoints(run: Path, links: dict[str, Any], findings: Findings) -> list[Checkpoint]:
    """The stored ones have the recorded weights. The record itself is a chain, whose end is the weights of the run.

    Returns those that are what the receipt says, by step: a replay may start there.
    """
    entries: list[Entry] = links["checkpoints"]
    previous = NO_HASH
    for entry in entries:
        if entry["previous"] != previous or hash_entry(entry) != entry["hash"]:
            findings.add("different", "weights", f"the record of checkpoints breaks at step {entry['step']}")
            return []
        previous = entry["hash"]
    by_step = {int(entry["step"]): entry for entry in entries}
    stored = sorted(step_folders(run / "checkpoints"), key=step_of)
    sound, is_good = [], True
    for path in stored:
        try:
            checkpoint = open_checkpoint(path)
            fault = _fault_of(checkpoint, by_step.get(checkpoint.step))
        except CheckpointError as error:
            fault = error.what
        if fault:
            is_good = False
            findings.add("different", "weights", f"checkpoint of step {step_of(path)}: {fault}")
        else:
            sound.append(checkpoint)
    is_good &= _check_end(by_step, links["results"], findings)
    if stored and is_good:
        findings.add("proved", "weights", f"every bit of {len(stored)} stored checkpoints ({len(entries)} were saved)")
    elif not stored:
        text = f"none of its {len(entries)} checkpoints is stored: a replay starts at step 0"
        findings.add("not proved", "weights", text)
    return sound


def _fault_of(checkpoint: Checkpoint, entry: Entry | None) -> str:
    if entry is None:
        return "it is not in the receipt"
    hashes = hash_checkpoint(checkpoint)
    other = [kind for kind in sorted({*hashes, *entry["tensors"]}) if hashes.get(kind) != entry["tensors"].get(kind)]
    if other:
        return f"other bits in {', '.join(other)}"
    return "" if hash_state(checkpoint.path) == entry["state"] else "another state.json"


def _check_end(by_step: dict[int, Entry], results: dict[str, Any], findings: Findings) -> bool:
    """The record ends with the weights of the results."""
    steps, last = int(results["steps"]), by_step.get(int(results["steps"]))
    is_good = True
    if last is None:
        findings.add("not proved", "weights", f"the last ones: no checkpoint of step {steps} is recorded")
    elif last["tensors"].get("model") != results["weights_sha256"]:
        findings.add("different", "weights", "the last checkpoint does not have the weights of the results")
        is_good = False
    if max(by_step, default=0) > steps:
        text = f"a checkpoint of step {max(by_step)} is recorded, and results of step {steps}"
        findings.add("different", "weights", text)
        is_good = False
    return is_good


# --- Settings


def complete(link: dict[str, Any]) -> dict[str, Any]:
    """A setting that is newer than the receipt had its default then."""
    return {**config_link(Config()), **link}


def check_settings(config: Config, sound: list[Checkpoint], links: dict[str, Any], findings: Findings) -> None:
    """A replay uses the settings in the checkpoints. A resumed run may have changed some: they are named.

    `config`: of the run folder. It counts where no checkpoint is stored.
    """
    then, last = complete(links["config"]), int(links["results"]["steps"])
    first: Config | None = None
    others: dict[str, int] = {}  # the last step that was trained with other values, by the names of the settings
    for checkpoint in sound:
        try:
            stored = load_saved(checkpoint.state["config"], checkpoint.path / STATE).config
        except (PacelineError, KeyError, AttributeError):
            findings.add("different", "config", f"the checkpoint of step {checkpoint.step} has no valid settings")
            continue
        first = first or stored
        now = config_link(stored)
        names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
        if names and checkpoint.step == last:
            findings.compare("config", then, now, "")
        elif names:
            others[", ".join(names[:8])] = checkpoint.step
    for values, step in others.items():
        text = f"steps up to {step} were trained with another value of {values}; they are replayed with it"
        findings.add("not proved", "config", text)
    _name_other_models(first or config, findings)


def _name_other_models(config: Config, findings: Findings) -> None:
    """Models that a run takes from elsewhere. A replay takes them from the same place."""
    weights = "" if config.model.weights == "none" else config.model.weights
    models = {"init-from": config.run.init_from, "weights": weights}
    models |= {"teacher": config.objective.teacher, "keep-by": config.data.keep_by}
    for flag, model in models.items():
        if model:
            findings.add("not proved", "weights", f"how the model of --{flag} {model} was trained")


# --- States


def first_start(links: dict[str, Any]) -> int:
    """The step that a replay can start at earliest: the run had other data before, if its user accepted new data."""
    return max((int(change["step"]) for change in accepted_changes(links)), default=0)


def accepted_changes(links: dict[str, Any]) -> list[dict[str, Any]]:
    changes: list[dict[str, Any]] = links["data"].get("accepted", [])
    return changes


def check_data_of_states(sound: list[Checkpoint], links: dict[str, Any], findings: Findings) -> bool:
    """Only new data that the user has accepted changes which samples are held out, and the count of epochs."""
    accepted, start = accepted_changes(links), first_start(links)
    seen = ""
    for checkpoint in sound:
        where = f"the checkpoint of step {checkpoint.step}"
        try:
            data = RunData.from_json(checkpoint.state.get("data"), str(checkpoint.path))
            clock = EpochClock.from_json(checkpoint.state)
        except (PacelineError, ValueError):
            findings.add("different", "data", f"{where} does not say which data it used")
            return False
        if data.accepted != [change for change in accepted if change["step"] < checkpoint.step]:
            findings.add("different", "data", f"{where} accepts other changes of the data than the receipt")
            return False
        if data.split != POSITIONS and not data.accepted:
            findings.add("different", "data", f"{where} holds other samples out than the settings say")
            return False
        about = json.dumps([clock and clock.to_json(), data.split, data.held_out])
        if accepted and checkpoint.step > start and seen not in ("", about):
            findings.add("different", "data", f"{where} counts epochs or holds samples out as no other one does")
            return False
        seen = about if checkpoint.step > start else ""
    if accepted:
        findings.add("not proved", "data", f"steps up to {start}: they were trained with other data")
        findings.add("not proved", "order", f"the count of epochs and the split of the data after step {start}")
    return True


def check_use_of_samples(replay: Replay, sound: list[Checkpoint], links: dict[str, Any], findings: Findings) -> bool:
    """Checkpoints count epochs as the settings do, and have not used samples that the run excludes or relabels."""
    plan = replay.components.plan
    if accepted_changes(links):
        return True
    usage = find_usage(plan, replay.components.train_data.dataset, replay.components.model.module)
    for checkpoint in sound:
        clock = EpochClock.from_json(checkpoint.state)
        if clock not in (None, EpochClock(plan.steps_per_epoch)):
            text = f"the checkpoint of step {checkpoint.step} counts epochs differently than its settings give"
            findings.add("different", "order", text)
            return False
        try:
            require_unseen(checkpoint, plan.config, usage)
        except CheckpointError as error:
            findings.add("different", "exclude", f"the checkpoint of {error.got}")
            return False
    return True
