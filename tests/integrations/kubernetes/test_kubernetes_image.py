"""The text of the Dockerfile, because there is no engine here: stages, versions, user, and the copied files."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
from pathlib import Path

import pytest

from paceline.integrations.kubernetes.job import KubernetesJob
from paceline.integrations.kubernetes.values import DATA_PATH, RUNS_PATH

pytestmark = pytest.mark.flows

ROOT = Path(__file__).resolve().parents[3]
VARIANTS = ("cpu", "cuda")
FLOWS = {"plain": "constraints.txt", "metaflow": "constraints-flows.txt", "runnable": "constraints-flows.txt"}


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1].strip()) for line in lines if line.strip()]


def stages() -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """For each stage: its parent, and its instructions."""
    found: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    name = ""
    for word, rest in instructions():
        if word == "FROM":
            parent, _, name = rest.split()
            found[name] = (parent, [])
        elif name:
            found[name][1].append((word, rest))
    return found


def line_of(name: str, variant: str, flow: str = "plain") -> list[tuple[str, str]]:
    """All instructions of a stage and its parents."""
    parent, own = stages()[name]
    parent = parent.replace("${VARIANT}", variant).replace("${FLOW}", flow)
    return (line_of(parent, variant, flow) if parent in stages() else []) + own


def test_every_instruction_is_valid() -> None:
    known = {"ARG", "FROM", "ENV", "WORKDIR", "COPY", "RUN", "LABEL", "USER", "ENTRYPOINT", "CMD"}
    assert {word for word, _ in instructions()} <= known


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_stages_use_other_stages_or_one_exact_image(variant: str, flow: str) -> None:
    for name, (written, own) in stages().items():
        parent = written.replace("${VARIANT}", variant).replace("${FLOW}", flow)
        if parent not in stages():
            assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", parent), f"{name} uses {parent}"
        for word, rest in own:
            source = re.match(r"--from=(\S+)", rest) if word == "COPY" else None
            assert source is None or source[1] in stages()
    # Before the first stage. Otherwise FROM would not know them.
    assert instructions()[:2] == [("ARG", "VARIANT=cpu"), ("ARG", "FLOW=plain")]


@pytest.mark.parametrize(("flow", "constraints"), FLOWS.items())
def test_each_use_has_its_extra_and_its_constraints_read_not_built(flow: str, constraints: str) -> None:
    """One Dockerfile for plain, Metaflow and Runnable use: FLOW chooses the versions and the extra."""
    made_by = line_of("build", "cpu", flow)
    copied = [rest.split()[0] for word, rest in made_by if word == "COPY" and rest.endswith("/build/constraints.txt")]
    assert copied == [constraints]
    command = next(rest for word, rest in made_by if word == "RUN" and 'pip install ".[' in rest)
    script = command.replace("pip install", "echo")
    for extras in ("", "wandb,timm"):
        words = subprocess.run(
            ["sh", "-c", script], env={"FLOW": flow, "EXTRAS": extras}, capture_output=True, text=True, check=True
        )
        assert words.stdout.strip() == f".[{extras or {'plain': 'tensorboard'}.get(flow, flow)}]"


def test_the_image_has_compilers_at_run_time_read_not_built() -> None:
    """Triton needs a C compiler and torch on CPUs a C++ compiler, also in the last stage."""
    installed = [rest for word, rest in line_of("final", "cpu") if word == "RUN" and "apt-get install" in rest]
    assert len(installed) == 1
    for word in (" gcc ", " g++ ", "--no-install-recommends", "rm -rf /var/lib/apt/lists"):
        assert word in installed[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_package_has_its_version(variant: str) -> None:
    made_by = line_of("build", variant)
    installs = [rest for word, rest in made_by if word == "RUN" and "pip install" in rest]
    assert len(installs) == 2
    constrained = [
        number for number, (_, rest) in enumerate(made_by) if "PIP_CONSTRAINT=/build/constraints.txt" in rest
    ]
    first = next(number for number, (_, rest) in enumerate(made_by) if "pip install" in rest)
    assert constrained[0] < first
    pins = (ROOT / "constraints.txt").read_text()
    for name in (
        "torch",
        "numpy",
        "PyYAML",
        "safetensors",
        "isal",
        "rich",
        "pillow",
        "tensorboard",
        "setuptools",
    ):
        assert re.search(rf"^{name}==[\d.]+$", pins, re.MULTILINE | re.IGNORECASE), f"{name} is not pinned"
    assert ("whl/cpu" in installs[0]) == (variant == "cpu")


def test_the_user_of_the_image_is_not_root_and_matches_the_manifest() -> None:
    final = dict(stages()["final"][1])
    assert final["USER"] == f"{KubernetesJob.user.uid}:{KubernetesJob.user.gid}"
    assert json.loads(final["ENTRYPOINT"]) == ["python", "-P", "-m", "paceline"]
    assert RUNS_PATH in final["RUN"]
    assert DATA_PATH in final["RUN"]
    words = [word for word, _ in stages()["final"][1]]
    assert words.index("USER") > max(number for number, word in enumerate(words) if word in ("RUN", "COPY"))


def test_only_copied_files_are_in_the_build_context() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    let_in = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = set()
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            copied |= set(rest.split()[:-1])
    assert copied == let_in
    assert all((ROOT / name).exists() for name in copied)
    left_out = [rule for rule in rules[1:] if not rule.startswith("!")]
    assert any(fnmatch.fnmatch("src/paceline/__pycache__", rule) for rule in left_out)


def test_no_download_is_piped_into_a_shell() -> None:
    text = (ROOT / "Dockerfile").read_text()
    for word in (":latest", "curl", "wget", "sudo", "chmod 777"):
        assert word not in text
