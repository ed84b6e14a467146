"""The rendezvous of the doctor: ranks exchange texts through a store, before any process group exists.

Errors name the ranks that do not arrive, and a foreign server at the address.
"""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from paceline.errors import PacelineError
from paceline.runtime.detect import RankEnvironment
from paceline.runtime.group import ANSWER_TIMEOUT_S, connect_store

_ARRIVE_S = 25.0  # for ranks that import torch on a slow disk


class RendezvousError(Exception):
    """The rendezvous failed. `missing` are the ranks that did not arrive, if known."""

    def __init__(self, what: str, remedy: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(what)
        self.remedy = remedy
        self.missing = missing


class Rendezvous:
    """All ranks, each with a text for the others."""

    def __init__(self, environment: RankEnvironment) -> None:
        self._rank, self._size = environment.rank, environment.world_size
        self.store: Store = PrefixStore(f"paceline/doctor-{environment.attempt}", _open(environment))

    def exchange(self, topic: str, mine: Any, timeout_s: float = _ARRIVE_S) -> list[Any]:
        """Every rank's value for a topic, in the order of ranks. Waits for all ranks."""
        keys = [f"{topic}/{rank}" for rank in range(self._size)]
        self.store.set(keys[self._rank], json.dumps(mine))
        try:
            self.store.wait(keys, timedelta(seconds=timeout_s))
        except dist.DistError:
            missing = tuple(rank for rank, key in enumerate(keys) if not self._has(key))
            who = ", ".join(map(str, missing)) or "0, which keeps the store"
            raise RendezvousError(
                f"rank {who} did not answer within {timeout_s:.0f} s ({topic})",
                "look at the output of those ranks: is one of them still starting, or has it exited?",
                missing,
            ) from None
        return [json.loads(self.store.get(key)) for key in keys]

    def _has(self, key: str) -> bool:
        with suppress(dist.DistError):
            return bool(self.store.check([key]))
        return False

    def close(self) -> None:
        """Wait for rank 0, which exits last because it may hold the store.

        A launcher may end all ranks when the first one exits: rank 0 calls this after it has printed everything.
        """
        with suppress(dist.DistError):
            if self._rank == 0:
                self.store.set("printed", "")
                self.store.wait(
                    [f"closing/{rank}" for rank in range(1, self._size)], timedelta(seconds=ANSWER_TIMEOUT_S)
                )
            else:
                self.store.wait(["printed"], timedelta(seconds=ANSWER_TIMEOUT_S))
                self.store.set(f"closing/{self._rank}", "")


def _open(environment: RankEnvironment) -> Store:
    try:
        return connect_store(environment, _ARRIVE_S, name_timeout_s=0.0)
    except PacelineError as error:
        what = f"{error.what} ({error.got})"
        raise RendezvousError(what, error.hint or "", missing=(0,) if environment.rank > 0 else ()) from error
