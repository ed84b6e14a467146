"""`paceline evaluate RUN`: the best weights of a run on its test set, in this process."""

from __future__ import annotations

from pathlib import Path

from paceline.cli.arguments import TRUST_HELP
from paceline.runs.folder import require_run_folder, write_json

_USAGE = "usage: paceline evaluate RUN [--device cpu|cuda] [--data-dir PATH] [--trust-code]"


def run(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(_USAGE + "\n\nTest a run's best weights and write evaluation.json beside its results.\n" + TRUST_HELP)
        return 0
    path = Path(arguments[0])
    require_run_folder(path)
    from paceline.training.reuse import evaluate_run, open_run

    run_ = open_run(path, arguments[1:])
    evaluation = evaluate_run(run_)
    classes = run_.rig.plan.info.classes
    print(f"{path}: weights of step {run_.checkpoint.step}")
    print(f"test accuracy {evaluation.accuracy:.2%}, loss {evaluation.loss:.4f}, {evaluation.samples:,} samples")
    for name, accuracy in zip(classes, evaluation.class_accuracy(), strict=True):
        print(f"  {name:<16} {'no samples' if accuracy is None else f'{accuracy:.2%}'}")
    answers = {
        "test_accuracy": evaluation.accuracy,
        "test_loss": evaluation.loss,
        "samples": evaluation.samples,
        "step": run_.checkpoint.step,
        "class_accuracy": dict(zip(classes, evaluation.class_accuracy(), strict=True)),
        "confusion_matrix": evaluation.confusion,
    }
    try:
        write_json(path / "evaluation.json", answers)
    except OSError as error:  # another person's run, or a read-only disk
        print(f"note: evaluation.json was not written: {error.strerror}")
    return 0
