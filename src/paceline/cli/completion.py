"""`paceline completion bash|zsh|fish`: a script for the shell, which asks `paceline completion --words` at each TAB.

What completes is what exists: verbs, the flags of the schema and of each verb's own --help, recipes, run folders and
tags. Where nothing of ours fits, the shell offers files as usual. torch is never imported.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from collections.abc import Iterable

from paceline.cli.main import VERBS
from paceline.errors import EXIT_FINISHED, PacelineError, UserError

_USAGE = """\
usage: paceline completion bash|zsh|fish

Print a script that makes the shell complete commands, flags, their values, recipes and runs. To keep it:
  bash  paceline completion bash > ~/.local/share/bash-completion/completions/paceline
  zsh   paceline completion zsh > DIR/_paceline     (DIR: a folder in your $fpath)
  fish  paceline completion fish > ~/.config/fish/completions/paceline.fish
For this shell only: eval "$(paceline completion bash)"     (fish: paceline completion fish | source)
"""
_BASH = """\
# bash completion of paceline
_paceline() {
  local word
  COMPREPLY=()
  while IFS= read -r word; do
    COMPREPLY+=("$(printf '%q' "$word")")
  done < <("${COMP_WORDS[0]}" completion --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -o default -F _paceline paceline
"""
_ZSH = """\
#compdef paceline
# zsh completion of paceline
_paceline() {
  local -a found
  found=(${(f)"$(${words[1]} completion --words "${(@)words[2,CURRENT]}" 2>/dev/null)"})
  if (( $#found )); then
    compadd -a found
  else
    _files
  fi
}
if [ "$funcstack[1]" = "_paceline" ]; then
  _paceline "$@"
else
  compdef _paceline paceline
fi
"""
_FISH = """\
# fish completion of paceline
function __paceline_words
    set -l given (commandline -opc)
    set -l current (commandline -ct)
    set -l found ($given[1] completion --words $given[2..] "$current" 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path "$current"
    end
end
complete -c paceline -f -a '(__paceline_words)'
"""
_SHELLS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
_SCHEDULERS = ("slurm", "kubernetes")
_OF_RUNS = ("tag", "untag", "note")
# What a flag of no recipe takes; recipe flags have their choices in the schema.
_TAKES_RUN = ("--resume", "--init-from")


def run(arguments: list[str]) -> int:
    if arguments[:1] == ["--words"]:
        with contextlib.suppress(PacelineError, OSError):  # at a TAB nobody wants to read an error
            print("".join(f"{word}\n" for word in complete(arguments[1:])), end="")
        return EXIT_FINISHED
    if not arguments or {"-h", "--help"} & set(arguments):
        print(_USAGE, end="")
        return EXIT_FINISHED
    if len(arguments) > 1 or arguments[0] not in _SHELLS:
        raise UserError("which shell?", got=" ".join(arguments), allowed=", ".join(_SHELLS))
    print(_SHELLS[arguments[0]], end="")
    return EXIT_FINISHED


def complete(words: list[str]) -> list[str]:
    """What could stand in place of the last word, after the others."""
    # bash takes --flag=value for three words, and may stand behind the second.
    asked = [*words[:-1], ""] if words[-1:] == ["="] else words or [""]
    *before, current = [word for word in asked if word != "="]
    found = _values(before) if len(before) > 1 and before[-1].startswith("--") else None
    if found is None:
        if not before:
            found = [*VERBS, "--help", "--version"]
        elif before[0] not in VERBS:
            found = []
        elif current.startswith("-"):
            found = sorted(flags_of(before[0], before[1:]))
        else:
            found = _subjects(before[0], [word for word in before[1:] if not word.startswith("-")])
    return [word for word in found if word.startswith(current)]


def flags_of(verb: str, rest: Iterable[str] = ()) -> set[str]:
    text = _help_of(verb, rest)
    flags = {*_FLAG.findall(text), "--help"}
    return flags | _recipe_flags() if _takes_recipe(text) else flags


def _help_of(verb: str, rest: Iterable[str] = ()) -> str:
    """A verb's own words. Those that print the whole schema under them keep theirs in `_HELP`."""
    name = next((f"submit_{word}" for word in rest if verb == "submit" and word in _SCHEDULERS), verb)
    module = importlib.import_module(f"paceline.cli.{name}")
    if hasattr(module, "_HELP"):
        return f"usage: paceline {verb} RECIPE\n{module._HELP}"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        module.run(["--help"])
    return out.getvalue()


def _takes_recipe(text: str) -> bool:
    return re.search(r"^usage: paceline [\w ]+RECIPE", text, re.MULTILINE) is not None


def _recipe_flags() -> set[str]:
    from paceline.settings.fields import field_table

    specs = field_table().values()
    return {spec.flag for spec in specs} | {f"--no-{spec.flag.removeprefix('--')}" for spec in specs if spec.is_bool}


def _values(before: list[str]) -> list[str] | None:
    """What the flag before takes; None where it takes nothing, or anything."""
    verb, flag = before[0], before[-1]
    if flag in _TAKES_RUN:
        return ["auto", *_runs()] if flag == "--resume" else _runs()
    if verb in ("runs", "clean"):
        from paceline.cli.runs import SORTS
        from paceline.runs.catalog import STATES

        own = {"--status": list(STATES), "--sort": list(SORTS), "--tag": _tags(), "--recipe": _recipes()}
        return own.get(flag)
    from paceline.settings.fields import find_field

    spec = find_field(flag.removeprefix("--"))
    return list(spec.choices) or None if spec is not None else None


def _subjects(verb: str, words: list[str]) -> list[str]:
    """What a verb is about, after the words it has already."""
    if verb == "completion":
        return list(_SHELLS) if not words else []
    if verb == "submit":
        return list(_SCHEDULERS) if not words else _recipes() if len(words) == 1 else []
    if verb == "runs":
        if not words:
            return list(_OF_RUNS)
        return _runs() if len(words) == 1 else _tags() if words[0] in ("tag", "untag") else []
    usage = _help_of(verb)
    if _takes_recipe(usage):
        return _recipes() if not words else []
    takes_run = re.search(r"^usage: paceline \w+ RUN(\.\.\.| RUN)?", usage, re.MULTILINE)
    return _runs() if takes_run and (not words or takes_run[1]) else []


def _recipes() -> list[str]:
    from paceline.settings.recipe_file import shipped_recipes

    return list(shipped_recipes())


def _runs() -> list[str]:
    """The newest first, where their names tell."""
    from paceline.runs.folder import RUNS

    marks = ("config.yaml", "job.json")
    folders = RUNS.iterdir() if RUNS.is_dir() else ()
    return sorted((str(path) for path in folders if any((path / mark).is_file() for mark in marks)), reverse=True)


def _tags() -> list[str]:
    from paceline.runs.catalog import list_runs
    from paceline.runs.folder import RUNS

    return sorted({tag for entry in list_runs(RUNS) for tag in entry.notes.tags})
