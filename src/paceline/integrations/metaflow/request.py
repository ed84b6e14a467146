"""Checks the parameters of a flow, before anything is started, and makes one request of them.

The parameters have the names of Metaflow's examples. The recipe gives the values of those that are not set. All other
flags of `paceline train` go through `--flags`. Imports no torch and no Metaflow.
"""

from __future__ import annotations

import importlib.util
import shlex
from dataclasses import dataclass, field
from typing import Any

from paceline.checkpoints.identity import IDENTITY
from paceline.errors import UserError
from paceline.launch.request import check_loaded
from paceline.models.registry import BUILT_IN
from paceline.runtime.secret import create_secret
from paceline.settings.extras import how_to_install
from paceline.settings.load import LoadedConfig, load_config, parse_flags, to_yaml
from paceline.settings.rules import check_world
from paceline.settings.schema import SHARDED, field_table, flatten
from paceline.settings.values import Setting, check_texts

LOAD_POLICIES = ("fresh", "eager", "none")
_MOST_NODES = 1024
# Flags that the flow sets itself, with the parameter to use instead.
_NOT_IN_FLAGS = {
    "processes": "--processes-per-node",
    "output_dir": "--work-dir",
    "resume": "--load-policy",
    "load_policy": "--load-policy",
    "best_is_latest": "--best-is-latest",
    "rehearse": "paceline train RECIPE --rehearse, before the flow",
}


@dataclass(frozen=True)
class StartPoint:
    """A checkpoint in the datastore to continue from."""

    key: str
    best_key: str  # of the best checkpoint so far; empty: this one, or none yet
    step: int
    pathspec: str  # of the task that uploaded it
    attempt: int

    @property
    def keys(self) -> list[str]:
        return [key for key in (self.key, self.best_key) if key]

    def __str__(self) -> str:
        return f"From step {self.step} of {self.pathspec}, attempt {self.attempt + 1}"


@dataclass(frozen=True)
class Request:
    """The request for all nodes. It contains the recipe as text, since its file may not exist on the nodes."""

    name: str
    recipe: str  # resolved: YAML of all settings, with marked defaults
    cluster_size: int
    processes_per_node: int
    load_policy: str
    best_is_latest: bool
    work_dir: str
    node_timeout_s: float
    max_restarts: int
    is_sharded: bool
    shares_cores: bool  # no number of threads was set: the nodes of one machine share its cores
    chose_device: bool
    about: dict[str, Any]  # metadata of models and checkpoints: model_name, epochs, batch_size, ...
    # Of this flow's nodes. It is stored with the request in the datastore, and is not printed.
    secret: str = field(default="", repr=False, compare=False)
    earlier: StartPoint | None = None  # of an earlier run, if the load policy allows it


def check_request(
    *,
    recipe: str,
    model_name: str | None = None,
    batch_size: int | None = None,
    test_batch_size: int | None = None,
    epochs: int | None = None,
    learning_rate: float | None = None,
    train_from_scratch: int | None = None,
    flags: str = "",
    best_is_latest: bool = False,
    load_policy: str = "fresh",
    cluster_size: int = 1,
    processes_per_node: int = 1,
    work_dir: str = "",
    node_timeout_s: float = 600.0,
) -> Request:
    """Raises a UserError that names the wrong parameter and what is allowed."""
    _check_gang(cluster_size, processes_per_node, load_policy, node_timeout_s)
    mapped = _mapped_settings(model_name, batch_size, test_batch_size, epochs, learning_rate, train_from_scratch)
    loaded = load_config(recipe, [*mapped, *_split_flags(flags, mapped)])
    check_loaded(loaded)
    _check_world(loaded, cluster_size, processes_per_node)
    config = loaded.config
    return Request(
        name=loaded.recipe_name,
        recipe=to_yaml(config, loaded.settings),
        cluster_size=cluster_size,
        processes_per_node=processes_per_node,
        load_policy=load_policy,
        best_is_latest=best_is_latest,
        work_dir=work_dir,
        node_timeout_s=node_timeout_s,
        max_restarts=_max_restarts(loaded, cluster_size),
        is_sharded=config.parallel.strategy in SHARDED,
        shares_cores=config.parallel.omp_num_threads == 0 and not config.parallel.exact,
        chose_device=loaded.origin("device") != "default",
        about={
            "recipe": loaded.recipe_name,
            "model_name": config.model.model_name,
            "dataset": config.data.dataset,
            "epochs": config.train.epochs,
            "batch_size": config.train.global_batch_size,
            "learning_rate": config.optim.base_lr,
            "seed": config.train.seed,
            "identity": {name: value for name, value in flatten(config).items() if name in IDENTITY},
        },
        secret=create_secret(),
    )


def _max_restarts(loaded: LoadedConfig, cluster_size: int) -> int:
    """Only the main node has the newest checkpoint on its disk. Metaflow's @retry provides it to every node."""
    if cluster_size > 1 and loaded.origin("max_restarts") == "default":
        return 0
    return loaded.config.guard.max_restarts


def _check_gang(cluster_size: int, processes_per_node: int, load_policy: str, node_timeout_s: float) -> None:
    for name, value in (("cluster-size", cluster_size), ("processes-per-node", processes_per_node)):
        if not 1 <= value <= _MOST_NODES:
            raise UserError(
                f"{name} is out of range", where=f"--{name}", got=value, allowed=f"from 1 up to {_MOST_NODES}"
            )
    if load_policy not in LOAD_POLICIES:
        raise UserError(
            f"unknown load policy {load_policy!r}",
            where="--load-policy",
            allowed="fresh (this task's retries), eager (else the newest of an earlier run), none",
        )
    if not node_timeout_s > 0:
        raise UserError(
            "node-timeout-s is out of range",
            where="--node-timeout-s",
            got=node_timeout_s,
            allowed="more than 0 seconds",
        )


def _mapped_settings(
    model_name: str | None,
    batch_size: int | None,
    test_batch_size: int | None,
    epochs: int | None,
    learning_rate: float | None,
    train_from_scratch: int | None,
) -> list[Setting]:
    """Each parameter that was given, as a setting of the recipe. Errors name the parameter."""
    given: dict[str, tuple[str, str]] = {}  # parameter: the name of its setting, and the value
    if model_name is not None:
        # A bare name that Paceline does not know is a timm model, as in most examples.
        is_bare = model_name not in BUILT_IN and ":" not in model_name and not model_name.endswith(".py")
        if is_bare and importlib.util.find_spec("timm") is None:
            raise UserError(
                "there is no model of this name",
                where="--model-name",
                got=model_name,
                allowed=f"{', '.join(BUILT_IN)}, and with timm all of timm's",
                hint=how_to_install("timm"),
            )
        given["--model-name"] = ("model_name", f"timm:{model_name}" if is_bare else model_name)
    if batch_size is not None:
        given["--batch-size"] = ("global_batch_size", str(batch_size))
    if test_batch_size is not None:
        given["--test-batch-size"] = ("test_batch_size", str(test_batch_size))
    if epochs is not None:
        given["--epochs"] = ("epochs", str(epochs))
    if learning_rate is not None:
        given["--learning-rate"] = ("base_lr", str(learning_rate))
    if train_from_scratch is not None:
        if train_from_scratch not in (0, 1):
            raise UserError(
                "train-from-scratch is a switch", where="--train-from-scratch", got=train_from_scratch, allowed="0 or 1"
            )
        given["--train-from-scratch"] = ("weights", "none" if train_from_scratch else "imagenet")
    return [
        check_texts(Setting(field_table()[name], (value,), "flag", parameter))
        for parameter, (name, value) in given.items()
    ]


def _split_flags(text: str, mapped: list[Setting]) -> list[Setting]:
    """The settings in --flags. None of them may repeat a parameter."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError("the flags cannot be read", where="--flags", got=text, hint=f"{error}") from error
    owners = {setting.field.name: setting.where for setting in mapped}
    settings = parse_flags(words)
    for setting in settings:
        field = setting.field
        if field.name in _NOT_IN_FLAGS:
            raise UserError(
                f"{field.flag} cannot be set here: the flow sets it",
                where="--flags",
                hint=_NOT_IN_FLAGS[field.name],
            )
        if field.name in owners:
            raise UserError(
                f"{field.flag} is given twice", where=f"{owners[field.name]} and --flags", hint="leave one out"
            )
    return settings


def _check_world(loaded: LoadedConfig, cluster_size: int, processes_per_node: int) -> None:
    world_size = cluster_size * processes_per_node
    if loaded.config.parallel.strategy == "single" and world_size > 1:
        raise UserError(
            "strategy single runs on one process",
            where=loaded.where("strategy"),
            got=f"{cluster_size} nodes with {processes_per_node} each",
            hint='--cluster-size 1, or --flags "--strategy ddp"',
        )
    try:
        check_world(loaded, world_size)
    except UserError as error:
        hint = (error.hint or "").replace("--global-batch-size", "--batch-size")
        raise UserError(
            error.what,
            where=loaded.where("global_batch_size"),
            got=error.got,
            allowed=error.allowed,
            hint=hint.replace("--processes", "nodes x processes per node of") or None,
        ) from error
