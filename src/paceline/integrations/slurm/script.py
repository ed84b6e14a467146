"""Write the batch script of a Slurm job: #SBATCH lines, variables, and one srun."""

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
    """job.sbatch for one run, or for an array of identical runs."""
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
    """One job for several commands, for studies. Returns the script and the text of a file with one command per task.

    A command is a list of arguments of `paceline`, including its folder. Task 0 runs the first line.
    """
    if not commands:
        raise ValueError("an array needs a command")
    _check_lines(spec)
    for word in (*(word for command in commands for word in command), str(commands_file)):
        check_text(word, "a word of the command")
    limit = spec.array.partition("%")[2]  # "%4": at most four tasks at a time
    spec = replace(spec, array=f"0-{len(commands) - 1}" + (f"%{limit}" if limit else ""))
    lines = [
        *_header(spec),
        "",
        *_environment(spec),
        "",
        "# Task N runs line N + 1 of the commands.",
        f'line=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {shlex.quote(str(commands_file))})',
        "arguments=()",
        'eval "arguments=($line)"',
        "",
        *_start(spec, ['"${arguments[@]}"', *_ranks_flag(spec)]),
    ]
    return "\n".join(lines) + "\n", "".join(shlex.join(command) + "\n" for command in commands)


def _check_lines(spec: JobSpec) -> None:
    """Refuse a newline in a value: the shell would execute the rest as another line."""
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
        "agent": ["# One task per node: an agent that starts the node's ranks and restarts them if one fails."],
        "ranks": ["# One task per rank."],
        "torchrun": ["# One task per node: torchrun, which starts the node's ranks."],
    }[spec.start]


def _requeue_lines(spec: JobSpec) -> list[str]:
    if not spec.resume:
        return ["# This run cannot resume, so it is not requeued.", "#SBATCH --no-requeue"]
    lines = []
    if spec.signal_notice_s:
        lines += [
            f"# {spec.signal_notice_s} s before the time limit: the run saves, ends, and is requeued.",
            f"#SBATCH --signal=USR1@{spec.signal_notice_s}",
        ]
    return [
        *lines,
        "# Requeue also after a node failure, and append to the log.",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
    ]


def _environment(spec: JobSpec) -> list[str]:
    """Modules, Python, environment variables."""
    # Placed before the first command, so that it applies to the whole script.
    lines = ["# shellcheck disable=SC2016 # text in single quotes is expanded on each node, or not at all"]
    lines += ["set -euo pipefail"]
    if spec.modules or spec.conda:
        lines += ["", "# Scripts of modules and conda may read unset variables.", "set +u"]
        if spec.modules:
            lines += ["module load " + shlex.join(spec.modules)]
        if spec.conda:
            lines += ['eval "$(conda shell.bash hook)"', "conda activate " + shlex.quote(spec.conda)]
        lines += ["set -u"]
    if spec.venv:
        activate = shlex.quote(f"{spec.venv}/bin/activate")
        lines += ["", f"if [ ! -e {activate} ]; then", *_missing(activate, "no such file"), "fi"]
        lines += ["# shellcheck source=/dev/null", f"source {activate}"]
    lines += ["", "# Write lines to the log as soon as they are printed.", "export PYTHONUNBUFFERED=1"]
    if spec.start == "agent":
        lines += ["# The agents of the nodes find each other through Slurm's variables.", "export PACELINE_START=agent"]
        if spec.nodes > 1:
            lines += [
                "# The agents authenticate to each other with a secret. Each start creates a new one.",
                f"{RUN_SECRET}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",  # export would hide a failure
                f"export {RUN_SECRET}",
            ]
    if spec.resume:
        lines += [
            "# How often the job may be requeued without progress.",
            f"export PACELINE_MAX_REQUEUES={spec.max_requeues}",
        ]
    if spec.start == "torchrun":
        lines += [
            "# torchrun starts ranks without -P, so a file in the working folder could replace a module.",
            f"export {SAFE_PATH}={OURS}",
        ]
    if spec.start == "torchrun" and spec.signal_notice_s:
        lines += [
            "# By default torchrun kills ranks that are still saving after 30 s.",
            f"export PET_SHUTDOWN_TIMEOUT={spec.signal_notice_s}",
        ]
    own_file = f"{shlex.quote(str(spec.folder))}/.final-code-${{SLURM_JOB_ID:-}}-${{SLURM_RESTART_COUNT:-0}}"
    lines += [
        "# A process with a final error writes its exit code here. srun may return another one.",
        f"export {FINAL_CODE_FILE}={own_file}",
    ]
    for text in spec.env:
        name, is_set, value = text.partition("=")
        # Without a value, sbatch passes the variable from its environment. The value is not written to a file.
        lines.append(f"export {name}={shlex.quote(value)}" if is_set else f': "${{{name}?}}"; export {name}')
    return lines


def _choose_resume(spec: JobSpec) -> list[str]:
    """The first start uses the given checkpoint. Later starts use the run's own, newer checkpoints."""
    return [
        "# The first start uses the given checkpoint. After a requeue, use this run's own checkpoints.",
        f"resume={shlex.quote(spec.resume)}",
        f"saved=({shlex.quote(str(spec.folder))}/checkpoints/step-*/manifest.json)",
        'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [ -e "${saved[0]}" ]; then resume=auto; fi',
    ]


def _ranks_flag(spec: JobSpec) -> list[str]:
    return [f"--processes {spec.ranks_per_node}"] if spec.start == "agent" else []


def _start(spec: JobSpec, command: list[str]) -> list[str]:
    """The srun command. All tasks end together: a task without its peers would wait forever."""
    steps = [f"srun --ntasks-per-node={spec.tasks_per_node}"]
    if spec.cpus_per_task:
        steps.append(f"--cpus-per-task={spec.cpus_per_task}")  # srun does not inherit it from sbatch
    steps.append("--kill-on-bad-exit=1")
    if spec.container_image:
        steps.append(f"--container-image={shlex.quote(spec.container_image)}")
        steps.append(f"--container-mounts={shlex.quote(','.join(spec.container_mounts))}")
        steps.append(f"--container-workdir={shlex.quote(str(spec.work_dir))}")
    if spec.environment:
        steps.append(f"--environment={shlex.quote(spec.environment)}")
    python = shlex.quote(spec.python)
    check = _check_nodes(spec)
    lines = ["# The ranks handle stop signals. This shell waits until they have saved."]
    # The trap only records the signal. Without a trap, bash would exit.
    lines += ["stopped=no", "trap 'stopped=yes' TERM USR1"] if check or spec.resume else ["trap : TERM USR1"]
    lines += ["code=0", *check]
    if spec.start == "torchrun":
        lines += _torchrun(spec, " ".join(steps), python, command)
    else:
        lines += ["", _continued([" ".join(steps), f"{python} -P -m paceline {command[0]}", *command[1:]])]
    lines[-1] += " || code=$?"
    return [*lines, *_after(spec)]


def _check_nodes(spec: JobSpec) -> list[str]:
    """Check the installation before the ranks start. A node without Python would look like a killed task.

    Containers are not checked: they have the same Python on every node, and a second start may take minutes.
    """
    if spec.container_image or spec.environment:
        return []
    check = ['    said=$("$0" -P -c "import paceline" 2>&1) && exit', *_missing('"$0"', "${said##*: }")]
    # The batch script itself runs on the first node.
    others = f"srun --nodes={spec.nodes} --ntasks={spec.nodes} --ntasks-per-node=1 " if spec.nodes > 1 else ""
    return [
        "",
        "# Every node needs this Python with paceline installed. Otherwise the job ends here and is not requeued.",
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
    """Shell lines that report a missing installation on this node and exit."""
    return [
        '    echo "error: paceline cannot start on node ${SLURMD_NODENAME:-$(hostname)}" >&2',
        f'    echo "  where:  " {where} >&2',
        f'    echo "  got:     {got}" >&2',
        '    echo "  try:     an installation in a folder that all nodes share, or the same one on every node" >&2',
        f"    exit {EXIT_USER}",
    ]


def _after(spec: JobSpec) -> list[str]:
    """Requeue after an agent was killed, which it cannot do itself."""
    file = f'"${FINAL_CODE_FILE}"'
    lines = [
        "",
        "# Use the exit code of the process that failed first, not the signal that ended the others.",
        f'if [ "$code" -ne 0 ] && [ -s {file} ]; then',
        f"    code=$(cat {file})",
        f"    rm -f {file}",
        "fi",
    ]
    if spec.resume:
        back = '"${SLURM_RESTART_COUNT:-0}"'
        lines += [
            "# A task was killed without a stop request: requeue, to resume from the newest checkpoint.",
            f'if [ "$code" -gt 128 ] && [ "$stopped" = no ] && [ {back} -lt {spec.max_requeues} ]; then',
            '    scontrol requeue "$SLURM_JOB_ID" || true',
            "fi",
        ]
    return [*lines, 'exit "$code"']


def _torchrun(spec: JobSpec, srun: str, python: str, command: list[str]) -> list[str]:
    """Node 0 is the first of the list and hosts the store. The shell on each node knows its own number."""
    ranks = f"--nnodes={spec.nodes} --nproc-per-node={spec.ranks_per_node} --signals-to-handle={_TORCHRUN_SIGNALS}"
    train = [f"-m paceline {command[0]}", *command[1:]]
    # Do not use --standalone: torch's dynamic rendezvous unpickles data that any process can write into its store.
    return [
        "",
        "# The rendezvous is on the first node. The port differs from those of other jobs and earlier starts.",
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
    """sbatch parses quotes like a shell."""
    return shlex.quote(text) if re.search(r"[\s'\"\\#]", text) else text
