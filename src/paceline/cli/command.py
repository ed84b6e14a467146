"""A command: a settings dataclass and a function that takes it. Each file of `cli/` lists its commands in COMMANDS."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass
from typing import Annotated, Any

from paceline.errors import EXIT_FINISHED, UserError
from paceline.settings.command_line import COMMAND_LINE, described, help_text, parse_command, usage
from paceline.settings.declare import Arg, FlagsOf, collected_by, fields_of
from paceline.settings.recipe_file import DEFAULT_RECIPE
from paceline.settings.schema import Config
from paceline.settings.values import Setting, closest

_MOST_NAMED = 3
# The files of commands, if they have other names.
_FILES = {
    **{"plan": ("train",), "watch": ("status",), "cancel": ("status",), "predict": ("evaluate",)},
    **{"find-lr": ("find_lr",), "submit": ("submit_slurm", "submit_kubernetes"), "study": ("study", "study_predict")},
    **{"data": ("data", "data_look"), "recipes": ("train",), "export": ("evaluate",), "compare": ("evaluate",)},
    "sign": ("verify",),
}


@dataclass(frozen=True)
class Command:
    name: str  # of one word, or of two, for example "data pack"
    settings: type
    run: Callable[[Any], int]
    lists_recipe_flags: bool = False  # its help lists the flags of a recipe, too
    helps_without_arguments: bool = False
    other_names: tuple[str, ...] = ()  # of its second word, for the hint of an error

    @property
    def help(self) -> str:
        text = help_text(self.settings, self.name, without=() if self.lists_recipe_flags else (Config,))
        if Config in collected_by(self.settings).values() and not self.lists_recipe_flags:
            text += "\nIt also takes the flags of `paceline train`: paceline train --help\n"
        return text


@dataclass(frozen=True)
class RecipeSettings:
    """What every command has that trains a recipe."""

    recipe: Annotated[str, Arg(place="word", completes="recipe")] = DEFAULT_RECIPE
    """A recipe that comes with paceline (see `paceline recipes`), or a YAML file."""
    flags: Annotated[tuple[Setting, ...], FlagsOf(Config)] = ()

    def as_arguments(self, first: Sequence[Setting] = ()) -> list[str]:
        """Recipe and flags as arguments; other settings `first`."""
        return [self.recipe, *(token for setting in (*first, *self.flags) for token in setting.tokens())]


def commands_of(verb: str) -> dict[str, Command]:
    """The commands that begin with this word, by name."""
    modules = [importlib.import_module(f"paceline.cli.{name}") for name in _FILES.get(verb, (verb,))]
    commands = [command for module in modules for command in module.COMMANDS]
    return {command.name: command for command in commands if command.name.split()[0] == verb}


def find_command(verb: str, arguments: Sequence[str]) -> tuple[Command | None, list[str]]:
    """The command that these arguments are for, and its own arguments. None: a second word is needed."""
    commands = commands_of(verb)
    words = [argument for argument in arguments[:1] if not argument.startswith("-")]
    command = commands.get(" ".join([verb, *words])) if words else None
    return (command, list(arguments[1:])) if command is not None else (commands.get(verb), list(arguments))


def run_verb(verb: str, arguments: Sequence[str]) -> int:
    command, own = find_command(verb, arguments)
    before_rest = own[: own.index("--")] if "--" in own else own
    if {"-h", "--help"} & set(before_rest):
        print(_help_of(verb, command), end="")
        return EXIT_FINISHED
    if command is None:
        if not own:
            print(_help_of(verb, command), end="")
            return EXIT_FINISHED
        raise _unknown_second_word(verb, own)
    is_group = command.name == verb and len(commands_of(verb)) > 1
    if is_group and own and not own[0].startswith("-") and not _takes_words(command):
        raise _unknown_second_word(verb, own)
    if not own and (command.helps_without_arguments or (is_group and _needs_words(command))):
        print(_help_of(verb, command), end="")
        return EXIT_FINISHED
    if not own and _needs_run(command):
        raise _missing_run(command)
    return command.run(parse_command(own, command.settings, command.name))


def _takes_words(command: Command) -> bool:
    return any(field.arg.place == "word" for field in fields_of(command.settings).values())


def _needs_words(command: Command) -> bool:
    fields = fields_of(command.settings).values()
    return any(field.default is MISSING and field.arg.place == "word" for field in fields)


def _needs_run(command: Command) -> bool:
    fields = fields_of(command.settings).values()
    return any(field.default is MISSING and field.arg.completes == "run" for field in fields)


def _missing_run(command: Command) -> UserError:
    """With the newest runs, of which one is probably meant."""
    from paceline.runs.catalog import list_runs
    from paceline.runs.folder import RUNS

    names = [str(entry.path) for entry in list_runs(RUNS)[:_MOST_NAMED]]
    line = usage(command.settings, command.name).removesuffix(" [flags]")
    return UserError(
        "RUN is missing",
        where=COMMAND_LINE,
        got="none",
        allowed=f"the newest runs: {', '.join(names)}" if names else f"a run folder; {RUNS}/ has none yet",
        hint=line.replace("RUN", names[0], 1) if names else "paceline train shapes-cnn",
    )


def _help_of(verb: str, command: Command | None) -> str:
    """The help of a command; of a word that several commands begin with, also one line for each of them."""
    others = {name: other for name, other in commands_of(verb).items() if name != verb}
    if not others or (command is not None and command.name != verb):
        return command.help if command is not None else ""
    lines = []
    for other in others.values():
        lines += [f"  {usage(other.settings, other.name)}", f"      {described(other.settings)[0].splitlines()[0]}"]
    first = next(iter(others))
    more = "\n".join(["usage:" if command is None else "also:", *lines, "", f"flags of each: paceline {first} --help"])
    return f"{command.help}\n{more}\n" if command is not None else f"{more}\n"


def _unknown_second_word(verb: str, arguments: Sequence[str]) -> UserError:
    commands = {name.split()[1]: command for name, command in commands_of(verb).items() if " " in name}
    names = list(commands)
    other = {other: name for name, command in commands.items() for other in command.other_names}
    meant = other.get(arguments[0]) or closest(arguments[0], names)
    given = arguments[1:] if meant else arguments
    word = meant or (names[0] if _takes_words(commands[names[0]]) else "")
    hint = " ".join(["paceline", verb, word, *given]) if word else f"paceline {verb} --help"
    return UserError(f"paceline {verb} has no {arguments[0]!r}", allowed=", ".join(names), hint=hint)
