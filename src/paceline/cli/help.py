"""`--help` of the verbs that take the flags of `train`."""

from __future__ import annotations

from paceline.settings.load import print_help


def wants_help(arguments: list[str], verb: str, text: str) -> bool:
    if not {"-h", "--help"} & set(arguments):
        return False
    print_help(f"paceline {verb} RECIPE", text)
    return True
