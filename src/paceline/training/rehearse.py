"""A rehearsal (`--rehearse`): a few steps of everything, to find mistakes before a job waits in a queue.

The first part trains two steps, saves and tests. The second part resumes from that checkpoint with new objects and
does the same again.
"""

from __future__ import annotations

import dataclasses
import time

from paceline.metrics.console import Console
from paceline.runs.place import RunPlace
from paceline.runtime.detect import World
from paceline.settings.schema import Config
from paceline.training.guards import Guards
from paceline.training.loop import train
from paceline.training.results import Results

_STEPS, _EVAL_BATCHES = 2, 2


def rehearse(config: Config, world: World, place: RunPlace, guards: Guards) -> Results:
    """Run both parts and report success. A failure raises the same error as in the real run."""
    console = Console(is_enabled=world.is_primary)
    started = time.perf_counter()
    short, longer = (_shortened(config, steps, world.world_size) for steps in (_STEPS, 2 * _STEPS))
    train(short, world, place, guards, eval_batches=_EVAL_BATCHES)
    console.note("\nrehearsal: trained, saved and evaluated; now resuming from that checkpoint\n")
    again = RunPlace(place.folder, place.folder, is_restart=True)  # a short header
    results = train(longer, world, again, guards, eval_batches=_EVAL_BATCHES)
    seconds = time.perf_counter() - started
    console.note(f"\nrehearsal passed in {seconds:.1f} s: this recipe trains, saves, resumes and evaluates here")
    return results


def _shortened(config: Config, steps: int, world_size: int) -> Config:
    """The same run, ended early. Its checkpoint is inside an epoch, so such a resume is tested too."""
    rank_batch_size = max(1, config.train.global_batch_size // world_size)
    eval_batch_size = min(config.train.test_batch_size, rank_batch_size)
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, max_steps=steps, test_batch_size=eval_batch_size),
        run=dataclasses.replace(config.run, log_frequency=1),
    )
