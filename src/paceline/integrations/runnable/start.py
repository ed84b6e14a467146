"""Start a Runnable pipeline. Wrong parameters and failed steps end with one error screen and an exit code."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from paceline.errors import EXIT_FINISHED, EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_PREEMPTED, PacelineError, UserError
from paceline.integrations.runnable import steps
from paceline.integrations.runnable.child import hide_other_output
from paceline.integrations.runnable.parameters import PREFIX, make_request, read_parameters
from paceline.settings.extras import how_to_install

PARAMETERS_FILE = "RUNNABLE_PARAMETERS_FILE"
_NAMES_OF_RUNNABLE = ("runnable", "extensions")  # packages that Runnable installs
CONFIGURATION_FILE = "RUNNABLE_CONFIGURATION_FILE"


def run_pipeline(main: Callable[[], object], *, script: str, parameters_file: str) -> int:
    """Check everything, run the pipeline that `main` executes, and return the exit code for the shell."""
    try:
        _check(script, parameters_file)
        return _run(main, script)
    except PacelineError as error:
        print(error.screen(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # not in the step train, which saves
        print(f"\ninterrupted; to continue after the completed steps: {_retry(script)}", file=sys.stderr)
        return EXIT_INTERRUPTED


def _check(script: str, parameters_file: str) -> None:
    if importlib.util.find_spec("runnable") is None:
        raise UserError("Runnable is not installed", hint=how_to_install("runnable"))
    place = Path(script).resolve()
    if not place.is_relative_to(Path.cwd().resolve()):
        raise UserError(
            "Runnable finds a pipeline only below the folder it is started in",
            where=str(Path.cwd()),
            got=script,
            hint=f"cd {Path(script).parent}, or copy the pipeline's folder to where you want to work",
        )
    top = place.relative_to(Path.cwd().resolve()).parts[0]
    if top in _NAMES_OF_RUNNABLE:
        raise UserError(
            f"a pipeline cannot be in a folder named {top}: Runnable imports it by that name",
            where=str(Path.cwd()),
            got=os.path.relpath(script),
            hint="rename the folder, or cd into it",
        )
    configuration = os.environ.get(CONFIGURATION_FILE)
    if configuration and not Path(configuration).is_file():
        raise UserError(
            "there is no such configuration file", where=f"environment variable {CONFIGURATION_FILE}", got=configuration
        )
    retried, run_id = os.environ.get(steps.RETRY_RUN_ID), os.environ.get(steps.RUN_ID)
    _check_run_id(steps.RETRY_RUN_ID if retried else steps.RUN_ID, retried or run_id)
    if retried:
        # Runnable uses the parameters of the first start.
        ignored = sorted(name for name in os.environ if name.startswith(PREFIX) or name == PARAMETERS_FILE)
        if ignored:
            print(f"note      a retry keeps the parameters of its first start; not used: {', '.join(ignored)}")
        return
    if run_id and steps.run_folder().holds_a_run:
        raise UserError(
            "there is a run of this id already",
            where=str(steps.run_folder().path),
            hint=f"{steps.RETRY_RUN_ID}={run_id} continues it; or use another id",
        )
    make_request(read_parameters(os.environ.get(PARAMETERS_FILE) or parameters_file))


def _check_run_id(variable: str, run_id: str | None) -> None:
    if run_id and not re.fullmatch(r"\w[\w.-]*", run_id):
        raise UserError(
            "a run id is the name of a folder",
            where=f"environment variable {variable}",
            got=run_id,
            allowed="letters, digits, points, dashes and underscores",
        )


def _run(main: Callable[[], object], script: str) -> int:
    with hide_other_output(lambda: steps.run_folder().path):
        from runnable import exceptions  # prints a greeting on import, so check the parameters first

    try:
        with hide_other_output(lambda: steps.run_folder().path):
            main()
    except exceptions.RunLogExistsError as error:
        raise UserError(
            "there is a run of this id already", got=str(error), hint="take another RUNNABLE_RUN_ID"
        ) from None
    except exceptions.RetryValidationError as error:
        raise UserError(
            "this run cannot be retried", where=f"environment variable {steps.RETRY_RUN_ID}", got=str(error)
        ) from None
    except exceptions.ExecutionFailedError:
        return _print_failure(script)
    summary = steps.artifacts() / "report.txt"
    if summary.is_file():  # missing if the pipeline was only compiled
        print(summary.read_text(), end="")  # print it again at the end, after Runnable's long summary
    return EXIT_FINISHED


def _print_failure(script: str) -> int:
    failure = steps.first_failure
    code = failure.exit_code if failure else EXIT_INTERNAL
    is_stopped = code in (EXIT_PREEMPTED, EXIT_INTERRUPTED)
    error = PacelineError(
        "the pipeline was stopped" if is_stopped else "a step of the pipeline failed",
        where=str(steps.run_folder().path),
        got="\n".join(_reasons(failure)),
        hint=_retry(script),
    )
    print(error.screen(), file=sys.stderr)
    return code


def _retry(script: str) -> str:
    return f"{steps.RETRY_RUN_ID}={os.environ.get(steps.RUN_ID, '')} python {os.path.relpath(script)}"


def _reasons(failure: PacelineError | None) -> list[str]:
    """The error of the step, and the reason in the training's status."""
    status_reason = steps.run_folder().read_status().get("reason")  # of the last attempt
    return [reason for reason in (failure.what if failure else None, status_reason) if reason] or ["see above"]
