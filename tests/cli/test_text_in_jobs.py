"""Users' text in job scripts, manifests and terminals: one line stays one line, and secrets stay secret."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.cli import paceline
from harness.fake_slurm import FakeSlurm, clean_home
from harness.made_runs import make_run
from paceline.cli.main import main
from paceline.errors import UserError
from paceline.integrations.kubernetes.job import KubernetesJob
from paceline.integrations.kubernetes.manifest import build_objects, write_manifest
from paceline.integrations.kubernetes.values import Volume
from paceline.integrations.slurm.script import write_array_script, write_script
from paceline.launch.job import JobSpec
from paceline.launch.job_record import JobRecord, hide_values, read_record, write_private
from paceline.settings.text import find_fault

USER = 2
SLURM = ["submit", "slurm", "shapes-cnn", "--processes-per-node", "2"]
KUBERNETES = ["submit", "kubernetes", "shapes-cnn", "--image", "a/b:1", "--runs", "claim", "--processes-per-node", "2"]
INJECTED = ["x\ntouch owned", "x\rtouch owned", "x\x1b[2J", "x\x85y", "x\u2028y", "x\u202ey", "x\udcffy"]
ESCAPES = "\x1b]0;title\x07\x1b[2J\x1b[31m\x9b1A\r\x08\u202e"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    clean_home(tmp_path, monkeypatch)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The screen of a command that is refused as a user error."""
    assert main(list(arguments)) == USER
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "\x1b" not in captured.err
    return captured.err


# --- Refused before the first write -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", INJECTED, ids=ascii)
@pytest.mark.parametrize(
    "flag", ["--output-dir={}", "--data-dir={}", "--loss={}", "--env=A={}", "--job-name={}", "--time={}", "{}"]
)
@pytest.mark.parametrize("command", [SLURM, KUBERNETES], ids=["slurm", "kubernetes"])
def test_no_text_adds_a_line_to_a_job(
    command: list[str], flag: str, text: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every flag of a submission refuses newlines and control characters."""
    before = sorted(home.rglob("*"))
    refused(capsys, *command, flag.format(text), "--dry-run")
    assert sorted(home.rglob("*")) == before


@pytest.mark.parametrize("text", ["a\ntouch owned", "a\x1b[31m"], ids=ascii)
@pytest.mark.parametrize("flag", ["--account", "--partition", "--modules", "--venv", "--sbatch", "--constraint"])
def test_no_setting_of_slurm_adds_a_line(flag: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Lists and #SBATCH lines as well."""
    refused(capsys, *SLURM, f"{flag}={text}", "--dry-run")


@pytest.mark.parametrize("text", ["a\n#SBATCH --wrap=id", "caf\udce9"], ids=ascii)
def test_a_working_directory_is_checked_at_submit(
    home: Path, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script contains the working directory: a newline or an invalid name in it is refused."""
    (home / text).mkdir()
    monkeypatch.chdir(home / text)
    assert "working directory" in refused(capsys, *SLURM, "--output-dir=/tmp/x", "--dry-run")


def test_a_recipe_with_a_newline_in_its_name_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The job has the recipe's name."""
    (home / "a\ntouch owned.yaml").write_text("epochs: 3\n")
    for command in (SLURM, KUBERNETES):
        refused(capsys, *command[:2], "a\ntouch owned.yaml", *command[3:], "--dry-run")


@pytest.mark.parametrize("name", [name for name, value in vars(JobSpec()).items() if isinstance(value, str)])
def test_the_script_itself_refuses_a_second_line(name: str) -> None:
    """For any JobSpec: no text with a newline reaches the script."""
    with pytest.raises(UserError):
        write_script(JobSpec(**{name: "a\nb"}))  # type: ignore[arg-type]
    with pytest.raises(UserError):
        write_array_script(JobSpec(), [["train", "a\nb"]], Path("commands"))


@pytest.mark.parametrize("name", ["image", "name", "namespace", "queue", "memory", "command", "train", "env"])
def test_the_manifest_itself_refuses_a_second_line(name: str) -> None:
    """For any KubernetesJob: no text with a newline reaches the manifest."""
    values: dict[str, object] = {"image": "a/b:1", "runs": Volume("claim", "/runs")}
    lists: dict[str, object] = {"command": ("x\n---\nkind: Pod",), "train": ("a\nb",), "env": (("A", "a\nb"),)}
    with pytest.raises(UserError):
        write_manifest(KubernetesJob(**{**values, name: lists.get(name, "a\n---\nb")}))  # type: ignore[arg-type]


# --- Accepted text is unchanged ---------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.text(max_size=20).filter(lambda text: find_fault(text) is None))
@example("$(touch owned)`id`;'\"\\ && x=${y} #")
@example("--x")
def test_scripts_and_manifests_keep_accepted_text_as_it_is(text: str) -> None:
    """The number of lines does not depend on a text, and the shell and YAML return the same text."""
    spec = JobSpec(folder=Path("/r"), work_dir=Path("/w"), train=("shapes-cnn",), env=("A=x",))
    plain = write_script(spec)
    odd = JobSpec(folder=Path(f"/r{text}"), work_dir=Path(f"/w{text}"), train=("shapes-cnn", text), env=(f"A={text}",))
    script = write_script(odd)
    assert script.count("\n") == plain.count("\n")
    line = next(line for line in script.splitlines() if line.startswith("export A="))
    assert shlex.split(line) == ["export", f"A={text}"]
    job = KubernetesJob(
        image="a/b:1", runs=Volume("claim", "/runs"), train=(text,), env=(("A", text),), command=(text,)
    )
    manifest = write_manifest(job)
    objects = list(yaml.safe_load_all(manifest))
    container = objects[-1]["spec"]["template"]["spec"]["containers"][0]
    assert [item["kind"] for item in objects] == [item["kind"] for item in build_objects(job)]
    assert container["args"][-1].replace("$$(", "$(") == text
    assert container["env"][-1]["value"].replace("$$(", "$(") == text


@settings(max_examples=60)
@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=40))
@example("a\r\nb\rc\x85d\u2028e\ufefff\n")
@example(" leading\n\ttab \n\n---\n...\n")
def test_the_content_of_shipped_files_is_unchanged(text: str) -> None:
    """A user's file, with any line breaks, is unchanged in the ConfigMap."""
    text = "".join(c for c in text if c in "\t\n\r\x85" or ord(c) >= 32)
    job = KubernetesJob(image="a/b:1", runs=Volume("claim", "/runs"), files=(("mine.py", text),))
    [files] = [item for item in yaml.safe_load_all(write_manifest(job)) if item["kind"] == "ConfigMap"]
    assert files["data"] == {"mine.py": text}


# --- Secrets ----------------------------------------------------------------------------------------------------------


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_owner_can_read_the_files_of_a_job(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """job.sbatch and job.json have mode 0600, also if an older file had another mode; with a fake sbatch."""
    fake = FakeSlurm(home / "bin", monkeypatch)
    fake.forget_job()
    folder = home / "run"
    folder.mkdir()
    for name in ("job.sbatch", "job.json"):
        (folder / name).write_text("{}")
        (folder / name).chmod(0o666)
    before = os.umask(0)
    try:
        assert main([*SLURM, "--output-dir=run", "--env=TOKEN=hunter2", "--env", "KEY=hunter2"]) == 0
    finally:
        os.umask(before)
    assert [mode_of(folder / name) for name in ("job.sbatch", "job.json")] == [0o600, 0o600]
    assert "hunter2" in (folder / "job.sbatch").read_text()
    assert "hunter2" not in (folder / "job.json").read_text()
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_a_private_file_is_never_readable_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary file has mode 0600 before its rename, and a failure leaves no file."""
    seen = []
    monkeypatch.setattr("os.fsync", lambda descriptor: seen.append(stat.S_IMODE(os.fstat(descriptor).st_mode)))
    before = os.umask(0)
    try:
        write_private(tmp_path / "job.json", "x")
    finally:
        os.umask(before)
    assert seen == [0o600]
    with pytest.raises(UnicodeEncodeError):
        write_private(tmp_path / "job.json", "\ud800")
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]


def test_a_secret_by_reference_is_in_no_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--env NAME` takes the value from the environment of the submission; with a fake sbatch."""
    fake = FakeSlurm(home / "bin", monkeypatch)
    monkeypatch.setenv("TOKEN", "hunter2")
    assert main([*SLURM, "--output-dir=run", "--env", "TOKEN"]) == 0
    assert fake.calls("sbatch") == [f"--parsable --export=ALL {home}/run/job.sbatch"]
    for path in (home / "run").iterdir():
        assert path.is_dir() or "hunter2" not in path.read_text()
    lines = (home / "run" / "job.sbatch").read_text().splitlines()
    line = next(line for line in lines if line.endswith("export TOKEN"))
    script = f"set -euo pipefail\n{line}\nprintenv TOKEN\n"
    assert bash(script, TOKEN="hunter2") == (0, "hunter2\n")
    assert bash(script)[0] != 0


def bash(script: str, **variables: str) -> tuple[int, str]:
    variables |= {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_kubernetes_uses_a_key_of_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    """`--env NAME=secret:SECRET/KEY` becomes a secretKeyRef; other values are hidden in the comment."""
    assert main([*KUBERNETES, "--env", "A=secret:mine/token", "--env=B=hunter2", "--dry-run"]) == 0
    manifest = capsys.readouterr().out
    assert [line for line in manifest.splitlines() if line.startswith("#") and "hunter2" in line] == []
    rows = {
        row["name"]: row
        for item in yaml.safe_load_all(manifest)
        if item["kind"] == "Job"
        for row in item["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert rows["A"] == {"name": "A", "valueFrom": {"secretKeyRef": {"name": "mine", "key": "token"}}}
    assert rows["B"] == {"name": "B", "value": "hunter2"}
    for wrong in ("A", "A=secret:", "A=secret:mine", "A=secret:Mine/token", "A=secret:mine/a b"):
        assert "hunter2" not in refused(capsys, *KUBERNETES, "--env", wrong, "--env", "B=hunter2", "--dry-run")


@pytest.mark.parametrize("wrong", ["SLURM_X=hunter2", "1A=hunter2", "A B=hunter2", "A=hunter2\n", "RANK=hunter2"])
@pytest.mark.parametrize("command", [SLURM, KUBERNETES], ids=["slurm", "kubernetes"])
def test_error_screens_do_not_show_values(command: list[str], wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A refused variable is named without its value."""
    assert "hunter2" not in refused(capsys, *command, "--env", wrong, "--dry-run")


def test_status_does_not_show_values(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The stored command line has no values of variables."""
    folder = make_run(home / "run").path
    command = ["paceline", "submit", "--env", "A=hunter2", "--env=B=hunter2", "--env", "C=secret:a/b", "--epochs=3"]
    JobRecord("17", "", "job.sbatch", command).write(folder)
    kept = ["paceline", "submit", "--env", "A=...", "--env=B=...", "--env", "C=secret:a/b", "--epochs=3"]
    assert hide_values(command) == kept
    record = read_record(folder)
    assert record is not None
    assert record.command == kept
    assert main(["status", "run", "--json"]) == 0
    assert "hunter2" not in capsys.readouterr().out


# --- On a terminal ----------------------------------------------------------------------------------------------------


def hostile_run(path: Path) -> Path:
    folder = make_run(path, "failed", recipe=f"r{ESCAPES}", reason=f"because{ESCAPES}")
    (path / "notes.json").write_text(json.dumps({"tags": [f"t{ESCAPES}"], "note": f"n{ESCAPES}\nsecond"}))
    (path / "failure.json").write_text(json.dumps({"what": ESCAPES, "done": ESCAPES, "attempt": ESCAPES}))
    (path / "mirror.json").write_text(json.dumps({"url": f"s3://{ESCAPES}", "says": ESCAPES}))
    (path / "run.lock").write_text(
        json.dumps({"host": ESCAPES, "pid": 7, "since": ESCAPES, "boot_id": None, "process_start": None})
    )
    folder.log_of(0).write_bytes(f"line{ESCAPES}\n".encode() + b"\xff\x1b[0m\n")
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        *(["runs"], ["runs", "--tag", "t"], ["status", "runs/a"], ["logs", "runs/a"], ["watch", "runs/a"]),
        *(["compare", "runs/a", "runs/b"], ["checkpoints", "runs/a"], ["clean"], ["runs", "untag", "runs/a", "x"]),
    ],
    ids=lambda arguments: arguments[0],
)
def test_escape_sequences_of_files_do_not_reach_the_terminal(home: Path, arguments: list[str]) -> None:
    """Notes, reasons, names and logs are printed without control characters."""
    hostile_run(home / "runs" / "a")
    hostile_run(home / "runs" / "b")
    hostile_run(home / "runs" / f"c{ESCAPES}")
    answer = paceline(*arguments, cwd=home)
    assert "unexpected" not in answer.err
    printed = answer.out + answer.err
    assert printed
    assert set(printed) & set("\x1b\x07\x9b\r\x08\u202e") == set()


@pytest.mark.parametrize("text", ["a\x1b[31m", "a\u202eb", "a\x9bb", "a\udcff"], ids=ascii)
def test_notes_and_tags_are_checked_on_write(home: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A note with control characters is refused, so no command reads one that we wrote."""
    make_run(home / "runs" / "a")
    refused(capsys, "runs", "note", "runs/a", text)
    refused(capsys, "runs", "tag", "runs/a", text)


HOSTILE_JSON = ["[" * 100_000, '{"a":' * 50_000, "[1]", '"x"', "9" * 5000, "", "\xff", "null"]
HOSTILE_VALUES: list[Any] = [
    10**400,
    -(10**400),
    1e308,
    float("nan"),
    float("inf"),
    True,
    None,
    "x",
    [],
    {},
    "9999-12-31",
]


@pytest.mark.parametrize("name", ["status", "notes", "job", "environment", "mirror", "run.lock"])
def test_listing_works_with_any_json(home: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`runs` and `status` show a run with any content of its small files."""
    path = make_run(home / "runs" / "a", step=3, last_step=10).path
    texts = [*HOSTILE_JSON]
    keys = ("status", "step", "last_step", "eta_s", "test_accuracy", "updated", "reason", "tags", "note", "pid", "host")
    texts += [json.dumps(dict.fromkeys((*keys, "recipe", "url", "says"), value)) for value in HOSTILE_VALUES]
    texts += [json.dumps({"status": "running", "host": "h", "pid": 3, "step": value}) for value in HOSTILE_VALUES]
    texts += [json.dumps({"job_id": value, "cluster": "", "script": "", "command": value}) for value in HOSTILE_VALUES]
    for text in texts:
        (path / (name if "." in name else f"{name}.json")).write_bytes(text.encode("latin-1"))
        for arguments in (["runs"], ["runs", "--json"], ["status", "runs/a"], ["status", "runs/a", "--json"]):
            assert main(arguments) == 0, (text[:80], capsys.readouterr().err)
    capsys.readouterr()


@pytest.mark.parametrize("job_id", ["--me", "-u root", "1 2", "", "a\nb"])
def test_a_job_id_of_a_foreign_folder_is_never_an_option_of_a_client(home: Path, job_id: str) -> None:
    """`paceline cancel` passes job ids to scancel. A text that is an option is not a job id."""
    folder = make_run(home / "runs" / "a").path
    JobRecord(job_id, "", "", []).write(folder)
    assert read_record(folder) is None
