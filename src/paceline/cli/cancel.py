"""`paceline cancel RUN`: its job in a cluster, or its supervisor on this machine, is asked to save and stop."""

from __future__ import annotations

import signal

from paceline.cli.status import RunView, look, note_cancel, parse_run_arguments
from paceline.errors import EXIT_FINISHED, PacelineError, UserError
from paceline.integrations.kubernetes.client import cluster_of
from paceline.integrations.slurm.client import cancel_job
from paceline.runs.process_handle import ProcessHandle

_USAGE = """\
usage: paceline cancel RUN

Ask a run to save and stop: scancel of its Slurm job, deletion of its Kubernetes job (its pods save within their grace),
or SIGTERM to its process on this machine.
"""


def run(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(_USAGE, end="")
        return EXIT_FINISHED
    folder, _ = parse_run_arguments(arguments, "cancel")
    view = look(folder)
    if view.record is not None and view.trouble:
        is_slurm = view.record.scheduler == "slurm"
        by_hand = f"scancel {view.record.job_id}, when Slurm answers again"
        raise PacelineError(
            f"job {view.record.job_id} could not be asked about",
            got=view.trouble,
            hint=by_hand if is_slurm else f"kubectl delete {view.record.api} {view.record.job_id}",
        )
    if view.record is not None and view.job is not None and view.job.is_active:
        if view.record.scheduler == "kubernetes":
            cluster_of(view.record).delete(view.record.job_id, view.record.api)
        else:
            cancel_job(view.record.job_id, view.record.cluster)
        note_cancel(view)
        saves = "; it saves before it ends" if view.job.state == "RUNNING" else ""
        print(f"job {view.record.job_id} is cancelled{saves}")
    elif view.owner is not None and not view.is_over:
        _stop_process(view)
    else:
        print(f"{folder.path} is not running ({view.state}); nothing to cancel")
    return EXIT_FINISHED


def _stop_process(view: RunView) -> None:
    owner = view.owner
    assert owner is not None
    if not owner.is_provably_alive:
        raise UserError(
            "this run belongs to another machine",
            where=str(view.folder.path),
            got=str(owner),
            hint=f"ssh {owner.host} kill -TERM {owner.pid}",
        )
    try:
        ProcessHandle(owner.pid, start=owner.process_start).send(signal.SIGTERM)
    except ProcessLookupError:
        print(f"{view.folder.path} is not running any more; nothing to cancel")
        return
    except PermissionError as error:
        raise UserError("this run belongs to somebody else", where=str(view.folder.path), got=str(owner)) from error
    print(f"SIGTERM to {owner}: it saves and ends; paceline status {view.folder.path} tells")
