"""The `paceline` command: runs one verb, and turns every ending into one screen and an exit code."""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType
from typing import NoReturn

import paceline
from paceline.errors import (
    EXIT_FINISHED,
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    Cause,
    EndsWithPrimary,
    PacelineError,
    Preempted,
    UserError,
    explain_exit,
    text_of,
)
from paceline.metrics.safe_output import discard_output, finish_console, outlive_readers, protect_console
from paceline.runtime.this_rank import OWN_LAUNCHER, early_exits_fail, own_rank

VERBS = {
    "train": "train a recipe, on one process or on many",
    "submit": "submit as a Slurm or Kubernetes job, after checking the request",
    "runs": "list all runs in a table; tags and notes",
    "status": "show the job, the progress and the last failure of a run",
    "watch": "show the status until the run has ended",
    "logs": "show the logs of a run's ranks",
    "cancel": "ask a run to save and stop",
    "plan": "show the resolved config, batches and memory; start nothing",
    "evaluate": "test a run's best weights",
    "predict": "classify pictures with a run's best weights",
    "export": "write a run's best weights for other programs",
    "compare": "show whether runs are equal, or where they first differ",
    "bisect": "find the first step, layer and sample at which two runs differ, and the cause",
    "equivalence": "check that 1, 2, 4 processes give the same result on this machine",
    "verify": "check the receipt of a run, and replay steps of it",
    "replay": "train a run again without some samples, from the last checkpoint before their first use",
    "inspect": "rebuild one step of a run: batch, losses, gradients, and samples over the checkpoints",
    "sign": "sign the receipt of a run with your ssh key",
    "sweep": "train a recipe with several values of some settings, and compare the results",
    "study": "measure how a recipe scales, and predict other sizes",
    "bench": "measure collectives, data and step against the limits of this machine",
    "find-lr": "try learning rates on a recipe, and plot the losses",
    "doctor": "check whether this machine or allocation is fit to train",
    "clean": "remove checkpoints that are not needed, or whole runs",
    "data": "look at data sets, pack pictures for speed, verify, fetch",
    "checkpoints": "list, verify and push the checkpoints of a run",
    "course": "twelve lessons in distributed training, with exercises checked on real ranks",
    "recipes": "list the recipes that come with paceline",
    "completion": "complete commands, flags, recipes and runs in bash, zsh or fish",
}
_ABOUT = "paceline {version}: distributed training of vision models, one command and one answer.\n"
_FIRST_COMMANDS = {
    "train shapes-cnn": "a first run: a small CNN, no download, about a minute",
    "recipes": "the other recipes that come with paceline",
    "doctor": "check whether this machine is fit to train",
    "runs": "list your runs",
    "course start": "twelve lessons in distributed training, for one laptop",
    "--help": "every command; the guides are in docs/",
}


# What other tools call a verb.
_ELSEWHERE = {
    **{"fit": "train", "run": "train", "launch": "train", "start": "train"},
    **{"eval": "evaluate", "test": "evaluate", "validate": "evaluate", "infer": "predict", "classify": "predict"},
    **{"ls": "runs", "list": "runs", "ps": "runs", "stop": "cancel", "kill": "cancel", "rm": "clean"},
    **{"tail": "logs", "log": "logs", "info": "status", "show": "status", "diff": "compare", "check": "doctor"},
    **{"sbatch": "submit slurm", "slurm": "submit slurm", "kubernetes": "submit kubernetes", "models": "train --help"},
    **{"config": "plan", "tag": "runs tag", "note": "runs note", "pack": "data pack", "fetch": "data fetch"},
}
_SWITCHES = {"--debug", "--trust-code"}
_LONG_VERBS = {"train", "study", "sweep", "equivalence", "replay"}  # these outlive a lost terminal and a closed pipe
_DRAWING_VERBS = ("train", "bench", "study", "sweep", "doctor", "course", "equivalence", "data", "plan")
# Verbs that follow a run end when their reader has closed the pipe, with the code of Ctrl-C. All others do their work.
_FOLLOWING_VERBS = {"logs": EXIT_FINISHED, "watch": EXIT_INTERRUPTED}


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    # Our supervisor detects a rank that ends early, and restarts it.
    is_watched = OWN_LAUNCHER in os.environ
    with nullcontext() if is_watched else early_exits_fail(_report_early_exit):
        return _record_exit_code(_run(arguments))


def _record_exit_code(code: int) -> int:
    if code != EXIT_FINISHED:
        from paceline.launch.policy import note_final_code  # imported late: --help must be fast

        note_final_code(code)
    return code


def _report_early_exit(error: UserError) -> int:
    code = _record_exit_code(_report(error.screen(), error, error.exit_code))
    finish_console()
    return code


@contextmanager
def _trusting() -> Iterator[None]:
    """--trust-code holds for the ranks, too: they inherit the variable."""
    from paceline.runs.trust import TRUST_VARIABLE  # imported late: --help must be fast

    before = os.environ.get(TRUST_VARIABLE)
    os.environ[TRUST_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(TRUST_VARIABLE, None)
        else:
            os.environ[TRUST_VARIABLE] = before


def _run(arguments: list[str] | None) -> int:
    given, switches = _split_switches(list(sys.argv[1:] if arguments is None else arguments))
    is_debugging, is_trusting = "--debug" in switches, "--trust-code" in switches
    _escape_unencodable_output()
    verb = given[0] if given else ""
    if verb in _LONG_VERBS:
        protect_console()
    elif verb not in _FOLLOWING_VERBS:
        outlive_readers()
    try:
        with _trusting() if is_trusting else nullcontext():
            code = _dispatch(given)
        if sys.stdout is not None:  # the user's code may have set it
            # Here, where a closed pipe is handled. Python's own flush at the end would exit with 120.
            sys.stdout.flush()
        return code
    except PacelineError as error:
        if is_debugging:
            traceback.print_exc()
        return _report(error.screen(), error, error.exit_code)
    except EndsWithPrimary as error:
        from paceline.launch.causes import write_rank_exit
        from paceline.runtime.this_rank import leave_error_file

        code = int(error.code or EXIT_INTERNAL)
        leave_error_file(error.screen, code, is_consequence=True)
        # Without an exit record the supervisor would assume that this rank was killed, and restart it.
        write_rank_exit("rank 0 has failed, and says why", code, error)
        return code
    except KeyboardInterrupt as error:
        return _report("\ninterrupted", error, EXIT_INTERRUPTED)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and verb in _FOLLOWING_VERBS:
            discard_output()
            return _FOLLOWING_VERBS[verb]
        if is_debugging:
            traceback.print_exc()
        limit = _explain_limit(error)
        if limit is not None and own_rank() is None:
            return _report(limit.screen(), limit, limit.exit_code)
        if limit is not None:  # the limit may be gone when the rank is restarted
            return _report(limit.screen(), error, EXIT_INTERNAL)
        where = traceback.extract_tb(error.__traceback__)[-1]
        screen = PacelineError(
            f"unexpected {type(error).__name__}: {text_of(error)}",
            where=f"{where.filename}:{where.lineno}",
            hint="run again with --debug for the traceback; if it looks like our fault, please report it",
        ).screen()
        return _report(screen, error, EXIT_INTERNAL)
    except BaseException as error:  # SystemExit, GeneratorExit and others, raised by the user's code
        explained = explain_exit(error)
        return _report(explained.screen(), explained, explained.exit_code)


def _split_switches(given: list[str]) -> tuple[list[str], set[str]]:
    """The arguments of the verb, and the switches that every verb has. What follows `--` is for another program."""
    end = given.index("--") if "--" in given else len(given)
    end = 2 if given[:2] == ["runs", "note"] else end  # the words of a note are text
    own = [argument for argument in given[:end] if argument not in _SWITCHES]
    return [*own, *given[end:]], _SWITCHES & set(given[:end])


def _explain_limit(error: Exception) -> UserError | None:
    """For an error that comes from a limit of this user or container."""
    from paceline.launch.causes import cause_of, explain_error  # imported late: --help must be fast

    cause = cause_of(error)
    if cause not in (Cause.OPEN_FILES, Cause.THREADS):
        return None
    found = explain_error(cause, fitted=0)
    return UserError(found.what, got=f"{type(error).__name__}: {text_of(error)}", hint=found.hint, cause=cause)


def _escape_unencodable_output() -> None:
    """Escape characters that the terminal's encoding does not have: a file name must not end a run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")


def console_main() -> NoReturn:
    """The entry point of the `paceline` script. Ranks and supervisors exit without unloading torch.

    Threads of a rank may still wait for peers. After Ctrl-C inside `exec`, which dataclasses use, Python also ignores
    the exit code that it is given; `os._exit` keeps it.
    """
    if _LONG_VERBS & set(sys.argv[1:2]) and own_rank() is None and hasattr(signal, "SIGHUP"):
        # A closed terminal does not end a run. (torchrun passes this signal on to its ranks before it kills them.)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        if sys.argv[1] == "train":
            signal.signal(signal.SIGTERM, _exit_before_start)
    code = main()
    is_supervisor = "paceline.launch.attempt" in sys.modules
    if own_rank() is None and not is_supervisor and code != EXIT_INTERRUPTED:
        finish_console()
        sys.exit(code)
    finish_console()
    os._exit(code)


def rank_main(arguments: list[str]) -> None:
    """What a rank of our own supervisor runs: the same command again. The environment says which rank it is."""
    code = main(arguments)
    finish_console()
    if code != EXIT_FINISHED:
        os._exit(code)  # without waiting for threads that may wait for a lost peer


def _exit_before_start(number: int, frame: FrameType | None) -> NoReturn:
    """Used until the supervisor handles signals. Nothing has to be saved, and a scheduler restarts the run."""
    with suppress(OSError):
        os.write(2, f"\nstopped ({signal.Signals(number).name})\n".encode())
    os._exit(EXIT_PREEMPTED)


def _dispatch(given: list[str]) -> int:
    if not given:
        print(_ABOUT.format(version=paceline.__version__))
        for words, text in _FIRST_COMMANDS.items():
            print(f"  paceline {words:<18} {text}")
        return EXIT_FINISHED
    if given[0] in ("-h", "--help", "help"):
        print(_ABOUT.format(version=paceline.__version__))
        for verb, text in VERBS.items():
            print(f"  paceline {verb:<12} {text}")
        print("\nfirst run:    paceline train shapes-cnn\nevery flag:   paceline train --help")
        return EXIT_FINISHED
    if given[0] == "--version":
        print(f"paceline {paceline.__version__}")
        return EXIT_FINISHED
    verb, *rest = given
    if verb not in VERBS:
        import difflib

        close = difflib.get_close_matches(verb, VERBS, n=1)
        meant = _ELSEWHERE.get(verb) or (close[0] if close else "--help")
        hint = f"paceline {meant}" if verb != "resume" else _resume_hint(rest)
        raise UserError(f"unknown command {verb!r}", allowed=", ".join(VERBS), hint=hint)
    from paceline.cli.command import run_verb
    from paceline.metrics.screen import plain_output

    with nullcontext() if verb in _DRAWING_VERBS else plain_output():
        return run_verb(verb, rest)


def _resume_hint(words: list[str]) -> str:
    """The command that continues a run with its own settings."""
    import shlex

    from paceline.runs.catalog import locate_run

    run = str(locate_run(words[0])) if words and not words[0].startswith("-") else "RUN"
    return f"paceline train {shlex.quote(f'{run}/config.yaml')} --resume auto"


def _report(screen: str, error: BaseException, code: int) -> int:
    """Print the screen, unless the launcher of this rank does: our supervisor, or torchrun in its summary."""
    from paceline.launch.causes import is_consequence, write_rank_exit
    from paceline.launch.child import report_error
    from paceline.metrics.screen import fit_to
    from paceline.runtime.this_rank import is_summary_expected, leave_error_file

    if write_rank_exit(screen, code, error):
        return code
    if report_error(error.to_json() if isinstance(error, PacelineError) else None):
        return code
    was_stopped = isinstance(error, Preempted | KeyboardInterrupt)  # torchrun prints no summary if it was asked to stop
    is_left = leave_error_file(screen, code, is_consequence=was_stopped or is_consequence(error))
    if was_stopped or not (is_left and is_summary_expected()):
        print(fit_to(sys.stderr, screen), file=sys.stderr)
    return code
