"""`paceline evaluate RUN`: the weights of a run, or of one checkpoint, on the test set, in this process."""

from __future__ import annotations

from paceline.checkpoints.named import find_named
from paceline.cli.arguments import TRUST_HELP
from paceline.errors import UserError
from paceline.runs.find import locate_run
from paceline.runs.folder import write_json

_USAGE = """\
usage: paceline evaluate RUN [--checkpoint best|latest|STEP] [--device cpu|cuda] [--data-dir PATH] [--trust-code]
       paceline evaluate CHECKPOINT [--device cpu|cuda] [--data-dir PATH] [--trust-code]

Test a run's best weights, or those of the checkpoint that --checkpoint names, and write evaluation.json beside its
results. CHECKPOINT is the folder of one checkpoint; without its run around it, nothing is written.
"""
_FLAG = "--checkpoint"


def run(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(_USAGE + TRUST_HELP)
        return 0
    path, (name, flags) = locate_run(arguments[0]), _split(arguments[1:])
    find_named(path, name)  # a mistake ends here, before torch is imported
    from paceline.training.reuse import evaluate_run, open_run

    run_ = open_run(path, flags, checkpoint=name)
    evaluation = evaluate_run(run_)
    classes = run_.classes
    print(f"{path}: weights of step {run_.checkpoint.step}, {run_.checkpoint.path.name}")
    print(f"test accuracy {evaluation.accuracy:.2%}, loss {evaluation.loss:.4f}, {evaluation.samples:,} samples")
    for label, accuracy in zip(classes, evaluation.class_accuracy(), strict=True):
        print(f"  {label:<16} {'no samples' if accuracy is None else f'{accuracy:.2%}'}")
    answers = evaluation.to_json(classes, step=run_.checkpoint.step, checkpoint=run_.checkpoint.path.name)
    if run_.folder is not None:
        try:
            write_json(run_.folder / "evaluation.json", answers)
        except OSError as error:  # another person's run, or a read-only disk
            print(f"note: evaluation.json was not written: {error.strerror}")
    return 0


def _split(arguments: list[str]) -> tuple[str, list[str]]:
    """The value of --checkpoint, and the flags of the run's config."""
    name, flags, rest = "", [], list(arguments)
    while rest:
        token = rest.pop(0)
        if token.partition("=")[0] != _FLAG:
            flags.append(token)
            continue
        name = token.partition("=")[2] or (rest.pop(0) if rest and not rest[0].startswith("--") else "")
        if not name:
            raise UserError(f"{_FLAG} needs a value", where="the command line", allowed="best, latest, or a step")
    return name, flags
