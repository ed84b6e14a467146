"""Slurm: the script of a job. It is what a careful person would write by hand: #SBATCH lines, variables, one srun."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

from paceline.errors import EXIT_PREEMPTED, EXIT_USER
from paceline.launch.job import JobSpec, count_gres_gpus
from paceline.launch.policy import FINAL_CODE_FILE
from paceline.runs.interpreter import OURS, SAFE_PATH
from paceline.runtime.secret import RUN_SECRET
from paceline.settings.text import check_fields, check_text

SCRIPT = "job.sbatch"
_TORCHRUN_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def write_script(spec: JobSpec) -> str:
    """job.sbatch for one run, or for an array of equal ones."""
    _check_lines(spec)
    folder = str(spec.folder)
    if spec.array:
        task_folder = shlex.quote(folder) + '/task-"$SLURM_ARRAY_TASK_ID"'
    else:
        task_folder = shlex.quote(folder)
    lines = [*_header(spec), "", *_environment(spec), ""]
    resume: list[str] = []
    if spec.resume == "auto":
        resume = ["--resume auto"]
    elif spec.resume:
        lines += [*_choose_resume(spec), ""]
        resume = ['--resume "$resume"']
    train = ["train", *spec.train]
    command = [shlex.join(train), *_ranks_flag(spec), f"--output-dir {task_folder}", *resume]
    return "\n".join([*lines, *_start(spec, command)]) + "\n"


def write_array_script(spec: JobSpec, commands: list[list[str]], commands_file: Path) -> tuple[str, str]:
    """One job for several commands, for studies: the script, and the text of a file with one command per task.

    A command is a list of arguments of `paceline`, its folder included; task 0 takes the first line.
    """
    if not commands:
        raise ValueError("an array needs a command")
    _check_lines(spec)
    for word in (*(word for command in commands for word in command), str(commands_file)):
        check_text(word, "a word of the command")
    limit = spec.array.partition("%")[2]  # "%4" of a given array: at most four at a time
    spec = replace(spec, array=f"0-{len(commands) - 1}" + (f"%{limit}" if limit else ""))
    lines = [
        *_header(spec),
        "",
        *_environment(spec),
        "",
        "# Task N takes line N + 1 of the commands.",
        f'line=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {shlex.quote(str(commands_file))})',
        "arguments=()",
        'eval "arguments=($line)"',
        "",
        *_start(spec, ['"${arguments[@]}"', *_ranks_flag(spec)]),
    ]
    return "\n".join(lines) + "\n", "".join(shlex.join(command) + "\n" for command in commands)


def _check_lines(spec: JobSpec) -> None:
    """Each text becomes part of one line: a newline in it would begin another, which the shell executes."""
    check_text(str(spec.folder), "the run folder")
    check_text(str(spec.work_dir), "the working directory", hint="submit from another folder")
    check_fields(spec, secret=("env",))


def _header(spec: JobSpec) -> list[str]:
    ranks = f"{spec.world_size} rank" + ("s" if spec.world_size > 1 else "")
    nodes = f"{spec.nodes} node" + ("s" if spec.nodes > 1 else "")
    lines = [
        "#!/bin/bash",
        f"# {spec.name}: {ranks} on {nodes}. Written by `paceline submit slurm`.",
        "",
        _option("job-name", spec.name),
        _option("nodes", spec.nodes),
        *_tasks_comment(spec),
        _option("ntasks-per-node", spec.tasks_per_node),
    ]
    if spec.cpus_per_task:
        lines.append(_option("cpus-per-task", spec.cpus_per_task))
    if spec.gpus and not count_gres_gpus(spec.gres):
        lines.append(_option("gpus-per-node", spec.gpus))
    for name in ("gres", "mem", "time", "account", "partition", "qos", "constraint", "reservation", "array"):
        if value := getattr(spec, name):
            lines.append(_option(name, value))
    lines += _requeue_lines(spec)
    log = "slurm-%A_%a.log" if spec.array else "slurm-%j.log"
    lines += [
        f"#SBATCH --output={_quoted(str(spec.folder / 'logs').replace('%', '%%') + '/' + log)}",
        _option("chdir", str(spec.work_dir)),
    ]
    return lines + [f"#SBATCH {line}" for line in spec.sbatch]


def _tasks_comment(spec: JobSpec) -> list[str]:
    return {
        "agent": ["# One task per node: an agent that starts the node's ranks, and starts them again when one dies."],
        "ranks": ["# One task per rank."],
        "torchrun": ["# One task per node: torchrun, which starts the node's ranks."],
    }[spec.start]


def _requeue_lines(spec: JobSpec) -> list[str]:
    if not spec.resume:
        return ["# It begins anew each time, so it is not to be started twice.", "#SBATCH --no-requeue"]
    lines = []
    if spec.signal_notice_s:
        lines += [
            f"# {spec.signal_notice_s} s before the time limit: the run saves, leaves, and goes back into the queue.",
            f"#SBATCH --signal=USR1@{spec.signal_notice_s}",
        ]
    return [
        *lines,
        "# Back into the queue after the loss of a node, too; the log goes on where it stopped.",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
    ]


def _environment(spec: JobSpec) -> list[str]:
    """Modules, python, variables."""
    # Before the first command: it holds for the whole script.
    lines = ["# shellcheck disable=SC2016 # words in single quotes are expanded on each node, or not at all"]
    lines += ["set -euo pipefail"]
    if spec.modules or spec.conda:
        lines += ["", "# The scripts of modules and conda read variables that may not be set.", "set +u"]
        if spec.modules:
            lines += ["module load " + shlex.join(spec.modules)]
        if spec.conda:
            lines += ['eval "$(conda shell.bash hook)"', "conda activate " + shlex.quote(spec.conda)]
        lines += ["set -u"]
    if spec.venv:
        activate = shlex.quote(f"{spec.venv}/bin/activate")
        lines += ["", f"if [ ! -e {activate} ]; then", *_missing(activate, "no such file"), "fi"]
        lines += ["# shellcheck source=/dev/null", f"source {activate}"]
    lines += ["", "# Lines reach the log when they are printed.", "export PYTHONUNBUFFERED=1"]
    if spec.start == "agent":
        lines += ["# The agents of the nodes find each other by Slurm's own variables.", "export PACELINE_START=agent"]
        if spec.nodes > 1:
            lines += [
                "# They prove to each other that they belong to this job. The secret is made anew at each start.",
                f"{RUN_SECRET}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",  # export would hide a failure
                f"export {RUN_SECRET}",
            ]
    if spec.resume:
        lines += [
            "# So often the job may come back from the queue without a step of progress.",
            f"export PACELINE_MAX_REQUEUES={spec.max_requeues}",
        ]
    if spec.start == "torchrun":
        lines += [
            "# torchrun starts the ranks without -P, so a file in the working folder could take the place of a module.",
            f"export {SAFE_PATH}={OURS}",
        ]
    if spec.start == "torchrun" and spec.signal_notice_s:
        lines += [
            "# torchrun would end ranks that are still saving after half a minute.",
            f"export PET_SHUTDOWN_TIMEOUT={spec.signal_notice_s}",
        ]
    own_file = f"{shlex.quote(str(spec.folder))}/.final-code-${{SLURM_JOB_ID:-}}-${{SLURM_RESTART_COUNT:-0}}"
    lines += [
        "# A process that must not be started again writes its exit code here. srun may return another one.",
        f"export {FINAL_CODE_FILE}={own_file}",
    ]
    for text in spec.env:
        name, is_set, value = text.partition("=")
        # Without a value the variable comes from the environment of sbatch, and its value is in no file.
        lines.append(f"export {name}={shlex.quote(value)}" if is_set else f': "${{{name}?}}"; export {name}')
    return lines


def _choose_resume(spec: JobSpec) -> list[str]:
    """A given checkpoint is where the first start begins; what the run saved itself is newer."""
    return [
        "# At first from there; back from the queue, from what this run has saved itself.",
        f"resume={shlex.quote(spec.resume)}",
        f"saved=({shlex.quote(str(spec.folder))}/checkpoints/step-*/manifest.json)",
        'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [ -e "${saved[0]}" ]; then resume=auto; fi',
    ]


def _ranks_flag(spec: JobSpec) -> list[str]:
    return [f"--processes {spec.ranks_per_node}"] if spec.start == "agent" else []


def _start(spec: JobSpec, command: list[str]) -> list[str]:
    """The one srun. Tasks end together: one that has lost its peers would wait for nothing."""
    steps = [f"srun --ntasks-per-node={spec.tasks_per_node}"]
    if spec.cpus_per_task:
        steps.append(f"--cpus-per-task={spec.cpus_per_task}")  # srun does not take it over from sbatch
    steps.append("--kill-on-bad-exit=1")
    if spec.container_image:
        steps.append(f"--container-image={shlex.quote(spec.container_image)}")
        steps.append(f"--container-mounts={shlex.quote(','.join(spec.container_mounts))}")
        steps.append(f"--container-workdir={shlex.quote(str(spec.work_dir))}")
    if spec.environment:
        steps.append(f"--environment={shlex.quote(spec.environment)}")
    python = shlex.quote(spec.python)
    check = _check_nodes(spec)
    lines = ["# Stop signals are for the ranks; this shell waits until they have saved."]
    # A trap that only notes the signal: without one, bash would end.
    lines += ["stopped=no", "trap 'stopped=yes' TERM USR1"] if check or spec.resume else ["trap : TERM USR1"]
    lines += ["code=0", *check]
    if spec.start == "torchrun":
        lines += _torchrun(spec, " ".join(steps), python, command)
    else:
        lines += ["", _continued([" ".join(steps), f"{python} -P -m paceline {command[0]}", *command[1:]])]
    lines[-1] += " || code=$?"
    return [*lines, *_after(spec)]


def _check_nodes(spec: JobSpec) -> list[str]:
    """Before the ranks: a node without the python would end them all, and look like a killed task.

    A container brings its own python, the same on every node, and may take minutes to start twice.
    """
    if spec.container_image or spec.environment:
        return []
    check = ['    said=$("$0" -P -c "import paceline" 2>&1) && exit', *_missing('"$0"', "${said##*: }")]
    # The batch script itself runs on the first node.
    others = f"srun --nodes={spec.nodes} --ntasks={spec.nodes} --ntasks-per-node=1 " if spec.nodes > 1 else ""
    return [
        "",
        "# Every node needs this python with paceline in it. Without it the job ends here, and is not requeued.",
        "check='",
        *check,
        "'",
        f"python=$(type -P {shlex.quote(spec.python)} || echo {shlex.quote(spec.python)})",
        f'{others}bash -c "$check" "$python" || code=$?',
        f'if [ "$code" -eq {EXIT_USER} ]; then exit "$code"; fi',
        f'if [ "$stopped" = yes ]; then exit "$((code ? code : {EXIT_PREEMPTED}))"; fi',
        "code=0",
    ]


def _missing(where: str, got: str) -> list[str]:
    """Shell lines that say that this node lacks the installation, and end."""
    return [
        '    echo "error: paceline cannot start on node ${SLURMD_NODENAME:-$(hostname)}" >&2',
        f'    echo "  where:  " {where} >&2',
        f'    echo "  got:     {got}" >&2',
        '    echo "  try:     an installation in a folder that all nodes share, or the same one on every node" >&2',
        f"    exit {EXIT_USER}",
    ]


def _after(spec: JobSpec) -> list[str]:
    """What a node's agent cannot do for itself: come back after it was killed."""
    file = f'"${FINAL_CODE_FILE}"'
    lines = [
        "",
        "# The exit code of the process that failed first explains more than the signal that ended the others.",
        f'if [ "$code" -ne 0 ] && [ -s {file} ]; then',
        f"    code=$(cat {file})",
        f"    rm -f {file}",
        "fi",
    ]
    if spec.resume:
        back = '"${SLURM_RESTART_COUNT:-0}"'
        lines += [
            "# A task was killed from outside, and nobody asked for the end: once more, from the newest checkpoint.",
            f'if [ "$code" -gt 128 ] && [ "$stopped" = no ] && [ {back} -lt {spec.max_requeues} ]; then',
            '    scontrol requeue "$SLURM_JOB_ID" || true',
            "fi",
        ]
    return [*lines, 'exit "$code"']


def _torchrun(spec: JobSpec, srun: str, python: str, command: list[str]) -> list[str]:
    """Node 0 is the first of the list, and holds the store; the shell on each node knows which one it is."""
    ranks = f"--nnodes={spec.nodes} --nproc-per-node={spec.ranks_per_node} --signals-to-handle={_TORCHRUN_SIGNALS}"
    train = [f"-m paceline {command[0]}", *command[1:]]
    # Not --standalone: torch's dynamic rendezvous unpickles what anybody writes into its store.
    return [
        "",
        "# The nodes meet on the first one, on a port that neither another job nor this one's earlier start has.",
        'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "host=${hosts%%$'\\n'*}",
        "port=$((20000 + (SLURM_JOB_ID * 64 + ${SLURM_RESTART_COUNT:-0}) % 20000))",
        "",
        _continued(
            [
                srun,
                f"""bash -c 'exec "$0" -P -m torch.distributed.run --node-rank="$SLURM_NODEID" "$@"' {python}""",
                ranks,
                '--master-addr="$host" --master-port="$port"',
                *train,
            ]
        ),
    ]


def _continued(parts: list[str]) -> str:
    return " \\\n    ".join(parts)


def _option(name: str, value: object) -> str:
    return f"#SBATCH --{name}={_quoted(str(value))}"


def _quoted(text: str) -> str:
    """sbatch reads its lines as a shell does, as far as quotes go."""
    return shlex.quote(text) if re.search(r"[\s'\"\\#]", text) else text
