"""Metaflow, Runnable, Kubernetes: the guide's own venv, install line and first command, in a fresh clone."""

from __future__ import annotations

import json

import pytest
import yaml

from harness.guides import Newcomer, lines_of

pytestmark = [pytest.mark.guides, pytest.mark.timeout(1200)]


def test_metaflow_trains_on_two_nodes(person: Newcomer) -> None:
    """From the first line to a tested model. The run, the model and the cards are in Metaflow's folder."""
    lines = lines_of("docs/guides/metaflow.md", with_text="pip install", last="python flow.py run")

    answer = person.types(lines)

    assert answer.code == 0, answer.out + answer.err
    store = person.clone / "examples" / "metaflow" / ".metaflow"
    (run,) = (store / "PacelineFlow").glob("[0-9]*")
    assert {step.name for step in run.iterdir() if step.is_dir()} >= {"start", "train", "join", "test_model", "end"}
    assert f"python test_flow.py run --run PacelineFlow/{run.name}" in answer.out
    cards = list((store / "mf.cards" / "PacelineFlow" / "runs" / run.name).rglob("*.html"))
    assert {card.name.split("-")[1] for card in cards} >= {"training", "test"}


def test_runnable_trains_and_fills_the_catalog(person: Newcomer) -> None:
    """One run named `full`: its folder, its catalog, its log, and the lines that the guide shows."""
    lines = lines_of("docs/guides/runnable.md", with_text="pip install")

    answer = person.types(lines)

    assert answer.code == 0, answer.out + answer.err
    results = json.loads((person.clone / "runs" / "full" / "results.json").read_text())
    last = answer.out.splitlines()[-5:]
    assert [line.split()[0] for line in last] == ["recipe", "accuracy", "time", "weights", "folder"]
    assert last[3].split()[-1] == results["weights_sha256"]
    catalog = person.clone / ".catalog" / "full" / "runs" / "full" / "artifacts"
    promised: tuple[str, ...] = (
        "dataset_info.json",
        "distributed_training_results.json",
        "evaluation.json",
        "report.html",
    )
    promised += ("distributed_model_checkpoint/manifest.json", "best_model_checkpoint/manifest.json")
    assert [name for name in promised if not (catalog / name).is_file()] == []
    assert (person.clone / ".run_log_store" / "full.json").is_file()


def test_kubernetes_writes_its_manifest_without_a_cluster(person: Newcomer) -> None:
    """REGISTRY is a placeholder. All other text is used unchanged."""
    lines = lines_of("docs/guides/kubernetes.md", with_text="pip install", last="paceline submit kubernetes")
    lines[-1] = lines[-1].replace("REGISTRY", "registry.example")

    answer = person.types(lines)

    assert answer.code == 0, answer.out + answer.err
    manifest = answer.out[answer.out.index(f"$ {lines[-1]}\n") + len(f"$ {lines[-1]}\n") :]
    objects = {found["kind"]: found for found in yaml.safe_load_all(manifest)}
    assert set(objects) >= {"Job", "Service"}
    assert objects["Job"]["spec"]["completions"] == 2
    assert not (person.clone / "runs").exists()
