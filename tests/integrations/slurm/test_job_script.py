"""job.sbatch: valid shell for any names, the right lines for each way of starting, and correct quoting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.fake_slurm import FakeSlurm, clean_home
from paceline.cli.main import main
from paceline.errors import UserError
from paceline.integrations.slurm.script import write_array_script, write_script
from paceline.launch.job import JobSpec, count_gres_gpus, parse_time_s

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples" / "slurm"
GUIDE = ROOT / "docs" / "guides" / "slurm.md"
# An srun that prints its arguments, and on "node 1" runs its command with the variables of a task.
SRUN = """\
#!{python}
import json, os, sys
with open({record!r}, "w") as file:
    json.dump({{"arguments": sys.argv[1:], "environment": dict(os.environ)}}, file)
words = sys.argv[1:]
while words and words[0].startswith("--"):
    words.pop(0)
if words[0] == "bash":
    os.environ["SLURM_NODEID"] = "1"
    os.execvp(words[0], words)
"""
PYTHON = """\
#!{python}
import json, sys
with open({record!r}, "w") as file:
    json.dump(sys.argv[1:], file)
"""


def spec_in(folder: Path, **changes: object) -> JobSpec:
    spec = JobSpec(
        name="shapes-cnn",
        folder=folder / "run",
        work_dir=folder,
        train=("shapes-cnn", "--epochs=2"),
        python=str(folder / "python"),
        nodes=2,
        ranks_per_node=4,
        cpus_per_task=4,
        time="00:10:00",
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


def options(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def check_syntax(script: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    body = script.splitlines().index("set -euo pipefail")
    assert not any(line.startswith("#SBATCH") for line in script.splitlines()[body:]), "sbatch reads the head only"


def write_client(path: Path, text: str, record: Path) -> None:
    path.write_text(text.format(python=sys.executable, record=str(record)))
    path.chmod(0o755)


def run_script(script: str, folder: Path, **surroundings: str) -> dict[str, object]:
    """Run the script with an srun that only records its call. Returns the record."""
    clients = folder / "clients"
    clients.mkdir(exist_ok=True)
    write_client(clients / "srun", SRUN, folder / "srun.json")
    write_client(folder / "python", PYTHON, folder / "python.json")
    (clients / "scontrol").write_text("#!/bin/sh\nprintf 'n1\\nn2\\n'\n")
    (clients / "scontrol").chmod(0o755)
    environment = {
        "PATH": f"{clients}:/usr/bin:/bin",
        "SLURM_JOB_ID": "54321",
        "SLURM_JOB_NODELIST": "n[1-2]",
        **surroundings,
    }
    done = subprocess.run(
        ["bash"], input=script, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    content: dict[str, object] = json.loads((folder / "srun.json").read_text())
    return content


def test_agent_script_with_a_fake_srun(tmp_path: Path) -> None:
    script = write_script(spec_in(tmp_path))
    check_syntax(script)
    assert options(script) == [
        "--job-name=shapes-cnn",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=4",
        "--time=00:10:00",
        "--signal=USR1@120",
        "--requeue",
        "--open-mode=append",
        f"--output={tmp_path}/run/logs/slurm-%j.log",
        f"--chdir={tmp_path}",
    ]
    given = run_script(script, tmp_path)
    assert given["arguments"] == [
        *("--ntasks-per-node=1", "--cpus-per-task=4", "--kill-on-bad-exit=1"),
        *(f"{tmp_path}/python", "-P", "-m", "paceline", "train", "shapes-cnn", "--epochs=2"),
        *("--processes", "4", "--output-dir", f"{tmp_path}/run", "--resume", "auto"),
    ]
    environment = given["environment"]
    assert isinstance(environment, dict)
    assert environment["PACELINE_START"] == "agent"
    assert environment["PACELINE_MAX_REQUEUES"] == "3"


def test_stop_signals_wait_for_the_fake_srun(tmp_path: Path) -> None:
    """Slurm also signals the shell. If it ended at once, the ranks would be killed while they save."""
    (tmp_path / "srun").write_text("#!/bin/sh\nkill -USR1 $PPID\nkill -TERM $PPID\necho saved\nexit 75\n")
    (tmp_path / "srun").chmod(0o755)
    script = write_script(spec_in(tmp_path))
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (75, "saved\n"), done.stderr


@pytest.mark.parametrize(
    ("end", "restarts", "resume", "comes_back"),
    [
        ("exit 137", "0", "auto", True),
        ("exit 137", "3", "auto", False),
        ("exit 137", "0", "", False),
        ("exit 5", "0", "auto", False),
        ("kill -TERM $PPID; exit 137", "0", "auto", False),  # after a stop request
    ],
)
def test_a_killed_task_restarts_with_a_fake_srun(
    tmp_path: Path, end: str, restarts: str, resume: str, comes_back: bool
) -> None:
    for name, text in (("srun", end), ("scontrol", f'echo "$*" >>{tmp_path}/scontrol.calls')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = write_script(spec_in(tmp_path, resume=resume))
    check_syntax(script)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "54321", "SLURM_RESTART_COUNT": restarts}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == int(end.split()[-1]), done.stderr
    calls = tmp_path / "scontrol.calls"
    assert (calls.read_text() if calls.exists() else "") == ("requeue 54321\n" if comes_back else "")


def test_the_guide_shows_the_current_script() -> None:
    home = Path("/home/me")
    spec = JobSpec(
        name="shapes-cnn",
        folder=home / "runs" / "shapes-cnn-20261115-101500",
        work_dir=home,
        train=("shapes-cnn",),
        python="/home/me/.venv/bin/python",
        nodes=2,
        ranks_per_node=2,
        cpus_per_task=2,
        time="10",
    )
    assert f"```bash\n{write_script(spec)}```" in GUIDE.read_text()


def test_one_task_per_rank_with_a_fake_srun(tmp_path: Path) -> None:
    script = write_script(spec_in(tmp_path, start="ranks", cpus_per_task=1))
    check_syntax(script)
    assert "--ntasks-per-node=4" in options(script)
    given = run_script(script, tmp_path)
    assert given["arguments"] == [
        *("--ntasks-per-node=4", "--cpus-per-task=1", "--kill-on-bad-exit=1"),
        *(f"{tmp_path}/python", "-P", "-m", "paceline", "train", "shapes-cnn", "--epochs=2"),
        *("--output-dir", f"{tmp_path}/run", "--resume", "auto"),
    ]
    assert "PACELINE_START" not in script


def test_torchrun_with_a_fake_srun(tmp_path: Path) -> None:
    script = write_script(spec_in(tmp_path, start="torchrun"))
    check_syntax(script)
    given = run_script(script, tmp_path)
    arguments = given["arguments"]
    assert isinstance(arguments, list)
    assert arguments[0] == "--ntasks-per-node=1"
    assert json.loads((tmp_path / "python.json").read_text()) == [
        *("-P", "-m", "torch.distributed.run", "--node-rank=1", "--nnodes=2", "--nproc-per-node=4"),
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        *("--master-addr=n1", f"--master-port={20000 + 54321 * 64 % 20000}"),
        *("-m", "paceline", "train", "shapes-cnn", "--epochs=2"),
        *("--output-dir", f"{tmp_path}/run", "--resume", "auto"),
    ]


def test_torchrun_on_one_node_does_not_use_torchs_dynamic_rendezvous(tmp_path: Path) -> None:
    """SECURITY.md: torchrun's --standalone unpickles values that any user may write into its store."""
    script = write_script(spec_in(tmp_path, start="torchrun", nodes=1))
    check_syntax(script)
    assert "--standalone" not in script
    assert "rdzv" not in script
    assert '--master-addr="$host" --master-port="$port"' in script


def test_the_job_itself_creates_the_agents_secret(tmp_path: Path) -> None:
    """A fake srun gets a secret from the environment. It is new each time, and not in the script."""
    script = write_script(spec_in(tmp_path))
    secrets = []
    for _ in range(2):
        environment = run_script(script, tmp_path)["environment"]
        assert isinstance(environment, dict)
        secrets.append(environment["PACELINE_RUN_SECRET"])
    assert [len(bytes.fromhex(secret)) for secret in secrets] == [32, 32]
    assert secrets[0] != secrets[1]
    assert not any(secret in script for secret in secrets)
    assert "PACELINE_RUN_SECRET" not in write_script(spec_in(tmp_path, nodes=1))  # a single node needs none


@pytest.mark.parametrize("start", ["agent", "ranks", "torchrun"])
def test_odd_names_reach_a_fake_srun_unchanged(tmp_path: Path, start: str) -> None:
    odd = tmp_path / 'it\'s 100% "odd" $HOME #1'
    odd.mkdir()
    train = ("shapes-cnn", "--inject=kill rank=1 step=50; hang rank=0", "--data-dir=$(rm -rf x)`y`'z'")
    variable = "A=$HOME 'b' \"c\" \\"
    script = write_script(spec_in(odd, start=start, train=train, env=(variable,), name="odd 'name'"))
    check_syntax(script)
    given = run_script(script, odd)
    words = json.loads((odd / "python.json").read_text()) if start == "torchrun" else given["arguments"]
    for word in (*train, str(odd / "run")):
        assert word in words
    environment = given["environment"]
    assert isinstance(environment, dict)
    assert f"A={environment['A']}" == variable
    (output,) = (line for line in options(script) if line.startswith("--output="))
    assert "100%%" in output, "a percent sign is Slurm's own"


def test_gpus_site_and_extra_lines(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, gpus="a100:4", account="p", partition="gpu", qos="high", constraint="a|b", mem="64G")
    spec = replace(spec, reservation="r", sbatch=("--exclusive",), signal_notice_s=0)
    script = write_script(spec)
    check_syntax(script)
    lines = options(script)
    for line in ("--gpus-per-node=a100:4", "--account=p", "--partition=gpu", "--qos=high", "--constraint=a|b"):
        assert line in lines
    for line in ("--reservation=r", "--exclusive", "--mem=64G"):
        assert line in lines
    assert not any(line.startswith("--signal") for line in lines)
    assert "--gpus-per-node=4" not in options(write_script(replace(spec, gpus="4", gres="gpu:4")))


def test_modules_conda_and_venv(tmp_path: Path) -> None:
    script = write_script(spec_in(tmp_path, modules=("cuda/12.4", "gcc"), conda="my env"))
    check_syntax(script)
    assert "set +u\nmodule load cuda/12.4 gcc\n" in script
    assert "conda activate 'my env'\nset -u\n" in script
    script = write_script(spec_in(tmp_path, venv="/opt/my venv"))
    check_syntax(script)
    assert "\nsource '/opt/my venv/bin/activate'\n" in script


def test_containers_with_a_fake_srun(tmp_path: Path) -> None:
    mounts = (f"{tmp_path}:{tmp_path}", "/data:/data")
    script = write_script(spec_in(tmp_path, container_image="nvcr.io#x/y:1", container_mounts=mounts))
    check_syntax(script)
    words = run_script(script, tmp_path)["arguments"]
    assert isinstance(words, list)
    assert "--container-image=nvcr.io#x/y:1" in words
    assert f"--container-mounts={tmp_path}:{tmp_path},/data:/data" in words
    assert f"--container-workdir={tmp_path}" in words
    words = run_script(write_script(spec_in(tmp_path, environment="./edf.toml")), tmp_path)["arguments"]
    assert isinstance(words, list)
    assert "--environment=./edf.toml" in words


def test_a_named_checkpoint_is_used_for_the_first_start_only(tmp_path: Path) -> None:
    script = write_script(spec_in(tmp_path, resume="/other/checkpoints/best"))
    check_syntax(script)

    def resumed_from(restarts: str) -> object:
        words = run_script(script, tmp_path, SLURM_RESTART_COUNT=restarts)["arguments"]
        assert isinstance(words, list)
        return words[-1]

    assert resumed_from("0") == "/other/checkpoints/best"
    assert resumed_from("1") == "/other/checkpoints/best", "no checkpoint was saved yet"
    saved = tmp_path / "run" / "checkpoints" / "step-00000010"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    assert resumed_from("0") == "/other/checkpoints/best"
    assert resumed_from("1") == "auto"


def test_a_job_that_cannot_resume_is_not_requeued(tmp_path: Path) -> None:
    script = write_script(spec_in(tmp_path, resume=""))
    check_syntax(script)
    assert "--no-requeue" in options(script)
    assert "--resume" not in script


# --- Arrays -----------------------------------------------------------------------------------------------------------


def test_array_of_equal_runs_with_a_fake_srun(tmp_path: Path) -> None:
    script = write_script(spec_in(tmp_path, array="0-3%2"))
    check_syntax(script)
    assert "--array=0-3%2" in options(script)
    assert f"--output={tmp_path}/run/logs/slurm-%A_%a.log" in options(script)
    words = run_script(script, tmp_path, SLURM_ARRAY_TASK_ID="2")["arguments"]
    assert isinstance(words, list)
    assert words[words.index("--output-dir") + 1] == f"{tmp_path}/run/task-2"


def test_array_of_commands_with_a_fake_srun(tmp_path: Path) -> None:
    commands = [
        ["train", "shapes-cnn", "--seed", "1", "--output-dir", "a b"],
        ["train", "shapes-cnn", "--inject", "kill rank=1; 'x' $HOME *", "--output-dir", "c"],
    ]
    script, lines = write_array_script(spec_in(tmp_path, array="0-99%1"), commands, tmp_path / "com mands")
    check_syntax(script)
    (tmp_path / "com mands").write_text(lines)
    assert "--array=0-1%1" in options(script)
    for task, command in enumerate(commands):
        words = run_script(script, tmp_path, SLURM_ARRAY_TASK_ID=str(task))["arguments"]
        assert isinstance(words, list)
        assert words[words.index("paceline") + 1 :] == [*command, "--processes", "4"]
    with pytest.raises(UserError, match="contains a newline"):
        write_array_script(spec_in(tmp_path), [["a\nb"]], tmp_path / "c")
    with pytest.raises(ValueError, match="needs a command"):
        write_array_script(spec_in(tmp_path), [], tmp_path / "c")


# --- From the command line --------------------------------------------------------------------------------------------


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    clean_home(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    return FakeSlurm(tmp_path / "bin", monkeypatch)


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["submit", "slurm", *arguments, "--dry-run"]) == 0, capsys.readouterr().err
    script = capsys.readouterr().out
    check_syntax(script)
    return script


def test_dry_run_prints_and_does_not_call_the_fake_sbatch(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = dry_run(capsys, "shapes-cnn", "--processes-per-node", "2", "--output-dir", "run", "--no-amp", "--track")
    assert f"--output-dir {tmp_path}/run" in script
    assert f"{sys.executable} -P -m paceline train shapes-cnn --no-amp --track " in script
    assert "--cpus-per-task=2" in options(script), "every rank has a core"
    assert fake.calls("sbatch") == fake.calls("squeue") == []
    assert not (tmp_path / "run").exists()


def test_a_recipe_that_would_be_missing_after_a_requeue(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text("dataset: shapes\nload_policy: none\nbest_is_latest: true\nprocesses: 2\n")
    script = dry_run(capsys, "mine.yaml", "--processes-per-node", "4", "--start", "ranks")
    words = f"{tmp_path}/mine.yaml --load-policy=fresh --no-best-is-latest --processes=0 \\\n"
    assert words in script
    assert "--job-name=mine" in options(script)


def test_gpu_ranks_get_cores_for_their_threads(fake: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["shapes-cnn", "--gpus-per-node", "4", "--num-workers", "7"]
    assert "--cpus-per-task=32" in options(dry_run(capsys, *flags))
    assert "--cpus-per-task=8" in options(dry_run(capsys, *flags, "--start", "ranks"))


def test_mounts_of_a_container(fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["shapes-cnn", "--gpus-per-node", "2", "--container-image", "x/y", "--output-dir", "/var/tmp/run"]
    script = dry_run(capsys, *flags)
    assert f"--container-mounts={tmp_path}:{tmp_path},/var/tmp/run:/var/tmp/run " in script
    assert "\n    python -P -m paceline train" in script


def test_a_container_sees_every_file_of_the_request(
    fake: FakeSlurm, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folders of a loss, of metrics and of a recipe that are elsewhere are also mounted."""
    elsewhere = [tmp_path_factory.mktemp(name) for name in ("recipe", "loss", "metrics")]
    recipe, loss, metrics = elsewhere
    (loss / "own.py").write_text("def loss(logits, labels): ...\n")
    (metrics / "own.py").write_text("def near(logits, labels): ...\n")
    (recipe / "mine.yaml").write_text(f"loss: {loss}/own.py:loss\nmetrics: ['{metrics}/own.py:near']\n")
    script = dry_run(capsys, str(recipe / "mine.yaml"), "--gpus-per-node", "2", "--container-image", "x/y")
    mounts = next(word for word in script.split() if word.startswith("--container-mounts="))
    for folder in elsewhere:
        assert f"{folder}:{folder}" in mounts


# --- Small parts ------------------------------------------------------------------------------------------------------


def test_time_limits() -> None:
    limits = {"90": 5400, "2:30": 150, "02:00:00": 7200, "1-12": 129600, "1-12:30": 131400, "1-12:30:15": 131415}
    assert {text: parse_time_s(text) for text in limits} == limits


def test_gpus_of_generic_resources() -> None:
    counts = {"gpu:4": 4, "gpu:a100:2,shard:3": 2, "gpu": 1, "shard:3": 0, "": 0, "gpu:a:1,gpu:b:2": 3}
    assert {text: count_gres_gpus(text) for text in counts} == counts


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.sh")), ids=lambda path: path.name)
def test_examples_are_valid_shell(path: Path) -> None:
    script = path.read_text()
    check_syntax(script)
    assert os.access(path, os.X_OK)
    assert "--kill-on-bad-exit=1" in script
    assert "--requeue" in options(script)
