"""A rehearsal: two steps of everything, so that a queue slot is never spent on finding out.

The first act trains one short epoch, validates, saves and tests; the second starts over from that
checkpoint, in new objects, and does it again.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from paceline.metrics.console import Console
from paceline.runs.place import RunPlace
from paceline.runtime.detect import World
from paceline.settings.schema import Config
from paceline.training.guards import Guards
from paceline.training.loop import train

_STEPS, _EVAL_BATCHES = 2, 2


def rehearse(config: Config, world: World, place: RunPlace, guards: Guards) -> dict[str, Any]:
    """Run both acts and say that they went well; anything that fails, fails as in the real run."""
    console = Console(is_enabled=world.is_primary)
    started = time.perf_counter()
    short, longer = (_shortened(config, steps, world.world_size) for steps in (_STEPS, 2 * _STEPS))
    train(short, world, place, guards, eval_batches=_EVAL_BATCHES)
    console.note("\nrehearsal: trained, saved and evaluated; now resuming from that checkpoint\n")
    again = RunPlace(place.folder, place.folder)
    results = train(longer, world, again, guards, eval_batches=_EVAL_BATCHES)
    seconds = time.perf_counter() - started
    console.note(f"\nrehearsal passed in {seconds:.1f} s: this recipe trains, saves, resumes and evaluates here")
    return results


def _shortened(config: Config, steps: int, world_size: int) -> Config:
    """The same run, ended early. Its checkpoint lies inside an epoch, which a resume must bear too."""
    rank_batch_size = max(1, config.train.global_batch_size // world_size)
    eval_batch_size = min(config.train.test_batch_size, rank_batch_size)
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, max_steps=steps, test_batch_size=eval_batch_size),
        run=dataclasses.replace(config.run, log_frequency=1),
    )
