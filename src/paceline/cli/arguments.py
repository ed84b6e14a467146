"""Words and flags of the verbs that look at runs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from paceline.errors import UserError

TRUST_HELP = "--trust-code: execute functions that the run folder names, although you did not train it on this machine."


def read_words(
    arguments: list[str], *, switches: tuple[str, ...] = (), valued: tuple[str, ...] = ()
) -> tuple[list[str], dict[str, str]]:
    """What is no flag, in order, and the flags with their values."""
    words: list[str] = []
    flags: dict[str, str] = {}
    tokens = list(arguments)
    while tokens:
        token = tokens.pop(0)
        name, has_value, value = token.partition("=")
        if not token.startswith("-"):
            words.append(token)
        elif token in switches:
            flags[token] = ""
        elif name in valued:
            if not has_value and not tokens:
                raise UserError(f"{name} needs a value", where="the command line")
            flags[name] = value if has_value else tokens.pop(0)
        else:
            known = (*switches, *valued)
            raise UserError(
                f"unknown flag {token!r}", allowed=", ".join(known) or "none", hint=perhaps(name, known) or None
            )
    return words, flags


def perhaps(given: str, known: Iterable[str]) -> str:
    """The nearest of what exists, as a question back; empty where nothing is near."""
    close = difflib.get_close_matches(given, list(known), n=1, cutoff=0.5)
    return f"perhaps you meant {close[0]}" if close else ""
