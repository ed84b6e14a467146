"""`paceline predict RUN IMAGE...`: label pictures with the best weights of a run."""

from __future__ import annotations

from pathlib import Path

from paceline.cli.arguments import TRUST_HELP
from paceline.errors import UserError
from paceline.runs.find import locate_run
from paceline.runs.folder import require_run_folder

_SHOWN = 3


def run(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        usage = "usage: paceline predict RUN IMAGE... [--trust-code]"
        print(f"{usage}\n\nPrint the three likeliest classes of each picture.\n{TRUST_HELP}")
        return 0
    folder, *names = arguments
    if not names:
        raise UserError("no picture to label", hint=f"paceline predict {folder} PICTURE...")
    pictures = [Path(name) for name in names]
    for picture in pictures:
        if not picture.is_file():
            raise UserError("there is no such picture", got=picture)
    path = locate_run(folder)
    require_run_folder(path)
    from paceline.training.reuse import open_run, predict_pictures

    run_ = open_run(path, [])
    classes = run_.classes
    for picture, probabilities in zip(pictures, predict_pictures(run_, pictures), strict=True):
        ranked = sorted(zip(probabilities, classes, strict=True), reverse=True)[:_SHOWN]
        print(f"{picture}: " + ", ".join(f"{name} {probability:.1%}" for probability, name in ranked))
    return 0
