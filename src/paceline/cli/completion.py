"""`paceline completion bash|zsh|fish`: a script for the shell, which runs `paceline completion --words` at each TAB.

Everything comes from the settings dataclasses: commands, flags, choices, and which words are recipes, runs or tags.
Where nothing of these fits, the shell offers files as usual. torch is never imported.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal

from paceline.cli.command import Command, commands_of, find_command
from paceline.cli.main import VERBS
from paceline.errors import EXIT_FINISHED, PacelineError, UserError
from paceline.settings.declare import Arg, FieldSpec, collected_by, fields_of
from paceline.settings.values import find_in

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


@dataclass(frozen=True)
class Completion:
    """Print a script that makes the shell complete commands, flags, their values, recipes and runs.

    To keep it:
      bash  paceline completion bash > ~/.local/share/bash-completion/completions/paceline
      zsh   paceline completion zsh > DIR/_paceline     (DIR: a folder in your $fpath)
      fish  paceline completion fish > ~/.config/fish/completions/paceline.fish
    For this shell only: eval "$(paceline completion bash)"     (fish: paceline completion fish | source)
    """

    shell: Annotated[Literal["bash", "zsh", "fish"] | None, Arg("bash|zsh|fish", place="word")] = None
    """The shell."""
    words: Annotated[tuple[str, ...] | None, Arg(many="all", may_begin_with_dashes=True)] = None


def completion(settings: Completion) -> int:
    if settings.words is not None:
        with suppress(PacelineError, OSError):  # an error at TAB would only disturb the prompt
            print("".join(f"{word}\n" for word in complete(list(settings.words))), end="")
        return EXIT_FINISHED
    if settings.shell is None:
        raise UserError("the shell is missing", allowed=", ".join(_SHELLS))
    print(_SHELLS[settings.shell], end="")
    return EXIT_FINISHED


def complete(words: list[str]) -> list[str]:
    """The possible replacements of the last word, after the others."""
    # bash splits --flag=value into three words, and may stand behind the second.
    asked = [*words[:-1], ""] if words[-1:] == ["="] else words or [""]
    *before, current = [word for word in asked if word != "="]
    if not before:
        found = [*VERBS, "--help", "--version"]
    elif before[0] not in VERBS:
        found = []
    else:
        found = _after_verb(before[0], before[1:], current)
    return [word for word in found if word.startswith(current)]


def _after_verb(verb: str, before: list[str], current: str) -> list[str]:
    command, own = find_command(verb, before)
    table = _table(command)
    field = find_in(table, own[-1].removeprefix("--")) if own and own[-1].startswith("--") else None
    if field is not None and not field.is_bool:
        values = _values(field)
        if values is not None:
            return values
    if current.startswith("-"):
        return sorted({"--help", *_flags(table)})
    second = [name.split()[1] for name in commands_of(verb) if " " in name] if not before else []
    return [*second, *_words(table, [word for word in own if not word.startswith("-")])]


def _table(command: Command | None) -> dict[str, FieldSpec]:
    if command is None:
        return {}
    table: dict[str, FieldSpec] = {}
    for owner in collected_by(command.settings).values():
        table |= fields_of(owner)
    return table | fields_of(command.settings)


def _flags(table: dict[str, FieldSpec]) -> set[str]:
    fields = [field for field in table.values() if field.arg.place == "flag"]
    return {field.flag for field in fields} | {f"--no-{field.flag[2:]}" for field in fields if field.is_bool}


def _words(table: dict[str, FieldSpec], given: list[str]) -> list[str]:
    """What the next word can be."""
    places = [field for field in table.values() if field.arg.place == "word"]
    if not places or (len(given) >= len(places) and not places[-1].is_tuple):
        return []
    return _values(places[min(len(given), len(places) - 1)]) or []


def _values(field: FieldSpec) -> list[str] | None:
    """The values of a field; None if any text is allowed."""
    if field.arg.completes == "recipe":
        return _recipes()
    if field.arg.completes == "run":
        return ["auto", *_runs()] if field.name == "resume" else _runs()
    if field.arg.completes == "tag":
        return _tags()
    return list(field.choices) or None


def _recipes() -> list[str]:
    from paceline.settings.recipe_file import shipped_recipes

    return list(shipped_recipes())


def _runs() -> list[str]:
    """The newest first, if their names end with a time."""
    from paceline.runs.folder import RUNS

    marks = ("config.yaml", "job.json")
    folders = RUNS.iterdir() if RUNS.is_dir() else ()
    return sorted((str(path) for path in folders if any((path / mark).is_file() for mark in marks)), reverse=True)


def _tags() -> list[str]:
    from paceline.runs.catalog import list_runs
    from paceline.runs.folder import RUNS

    return sorted({tag for entry in list_runs(RUNS) for tag in entry.notes.tags})


COMMANDS = (Command("completion", Completion, completion, helps_without_arguments=True),)
