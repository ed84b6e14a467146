"""Saves checkpoints while training continues, and chooses the one to continue from.

The loop waits only until the tensors are copied from the device. A thread writes, verifies and commits them. At most
one save runs at a time. Under FSDP every rank writes its own slices, and a note when they are on disk; the primary
waits for all notes before it commits. If a save fails, the run warns and continues. It ends if three saves in a row
have failed and saves have failed for longer than the limit for storage, or if its folder is gone. The last save of a
run is repeated until then. Times are of a monotonic clock.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoints import store
from paceline.checkpoints.capture import Stage, Tensors
from paceline.checkpoints.format import FileSeal
from paceline.checkpoints.ledger import Ledger, hash_pieces, hash_stored
from paceline.checkpoints.payload import Piece, write_pieces
from paceline.checkpoints.resume import LEFT_IN_PLACE, checkpoints_of, choose_checkpoint, decided_by_primary
from paceline.errors import CheckpointError, OwnerLost, text_of
from paceline.parallel.collectives import is_true_on_any, wait_for_all
from paceline.runs.folder import flush, is_lost, lost_folder
from paceline.runs.patience import UnreadableNow, patience_s, read_patiently
from paceline.runtime.detect import World
from paceline.runtime.pulse import RunningClock
from paceline.settings.small_files import make_plain_folder, write_plain

_log = logging.getLogger("paceline")
FEWEST_FAILURES = 3  # in a row, before a run ends
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 4.0  # before the last save is repeated
_PEERS_TIMEOUT_S = 600.0
_POLL_S = 0.02
_SPARE_BYTES = 2**20


class CheckpointManager:
    """Keeps the checkpoints of one run."""

    def __init__(
        self,
        folder: Path,
        world: World,
        *,
        is_sharded: bool,
        num_shards: int = 0,
        retention: store.Retention,
        is_async: bool,
        flushed_first: tuple[Path, ...] = (),
        require_owner: Callable[[], None] = lambda: None,
        before_write: Callable[[int], None] | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """`num_shards`: of a sharded model, if the ranks after these hold copies of them; 0: one per rank.

        `flushed_first`: files and folders to flush before a checkpoint of their state is committed.

        `require_owner` raises OwnerLost if this process may not write any more. `before_write` is called with the step
        before a save writes; it injects faults. `ledger` records every checkpoint.
        """
        self._folder = folder
        self._flushed_first = flushed_first
        self._world = world
        self._num_writers = (num_shards or world.world_size) if is_sharded else 1
        self._retention = retention
        self._is_async = is_async
        self._stage = Stage(is_async=is_async)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._failures_in_a_row = 0
        self._failing_since_s = 0.0
        self._repeat: Callable[[], None] | None = None  # writes the last save again, from memory
        self._require_owner = require_owner
        self._before_write = before_write
        self._ledger = ledger
        self.stall_s = 0.0  # the total time that the training loop has waited for saves
        self.started_step: int | None = None  # of the last save, which may be running or have failed
        self.saved_step: int | None = None  # of the last save that succeeded; the value of the primary counts
        self.last_save_s = 0.0  # from the call to the commit, of the last save that succeeded
        decided_by_primary(world, self._open_folder)

    def _open_folder(self) -> dict[str, str]:
        self._require_owner()

        def open_folder() -> None:
            self._folder.mkdir(parents=True, exist_ok=True)
            store.remove_leftovers(self._folder)

        read_patiently("opening the checkpoints folder", self._folder, open_folder)
        return {}

    def warn_if_space_is_short(self, size_bytes: int) -> None:
        """Before the first step: two checkpoints must fit, the old one and the one being written."""
        if not self._world.is_primary:
            return
        free = read_patiently("looking for free space", self._folder, lambda: store.free_bytes(self._folder))
        if free < 2 * size_bytes:
            _log.warning(
                "warning: two checkpoints of %.0f MB do not fit on the disk of %s (%.0f MB free)",
                *(size_bytes / 2**20, self._folder, free / 2**20),
            )

    def choose(self, source: Path, *, prefer_best: bool = False) -> store.Checkpoint | None:
        """The checkpoint to continue from, of this run or of another one. Collective.

        Damaged ones in this run's own folder are set aside when a complete one is found. Those of another run stay.
        """
        is_own = source.resolve() in (self._folder.resolve(), self._folder.resolve().parent)
        on_damaged = self._set_aside if is_own else None
        return choose_checkpoint(source, self._world, prefer_best=prefer_best, on_damaged=on_damaged)

    def _set_aside(self, path: Path) -> str:
        self._require_owner()
        return store.set_aside(path)

    def begin_at_zero(self, source: Path | None, *, may_drop_damaged: bool) -> None:
        """Refuse to start at step 0 if there are checkpoints, unless all are damaged and the user asked. Collective.

        Later saves of such a start would delete the earlier work.
        """

        def decide() -> dict[str, str]:
            for folder in {self._folder, *([checkpoints_of(source)] if source else [])}:
                newest, rejected = store.find_newest(folder)
                aside = read_patiently("listing checkpoints", folder, partial(store.list_damaged, folder))
                is_refused = newest is not None or ((rejected or aside) and not may_drop_damaged)
                for item in rejected if folder == self._folder else []:
                    _log.warning("warning: %s; %s", item, LEFT_IN_PLACE if is_refused else self._set_aside(item.path))
                if is_refused:
                    raise _start_refused(folder, newest, len(rejected) + len(aside))
            return {}

        decided_by_primary(self._world, decide)

    def rewind_to(self, step: int) -> None:
        """The run returned to the checkpoint of this step, which is in this folder."""
        self.stands_at(step)
        self.branch_at(step)

    def branch_at(self, step: int) -> None:
        """Continue from this step. Later checkpoints are set aside, so that a restart does not use them.

        This is done before their rows of the metrics are cut off. They are deleted after the next commit.
        """
        if self._world.is_primary:
            self._require_owner()
            store.with_one_retry("setting aside", lambda: store.supersede_after(self._folder, step))
            if self._ledger is not None:
                self._ledger.cut_after(step)

    def stands_at(self, step: int) -> None:
        """The run continues from the checkpoint of this step, which is in this folder."""
        self.started_step = self.saved_step = step

    @property
    def is_saving(self) -> bool:
        """Whether a save is running: the next one would wait for it."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, payload: dict[str, Tensors], state: dict[str, Any], about: dict[str, Any], *, is_best: bool) -> None:
        """Stage this rank's part and start writing it. Every rank must call it at the same step."""
        started = time.monotonic()
        try:
            self._settle()
            self.started_step = about["step"]
            self._start(payload, state, about, is_best)
        finally:
            self.stall_s += time.monotonic() - started

    def wait(self) -> None:
        """Wait for a running save. A failed save is reported here."""
        started = time.monotonic()
        try:
            self._settle()
        finally:
            self.stall_s += time.monotonic() - started

    def _start(self, payload: dict[str, Tensors], state: dict[str, Any], about: dict[str, Any], is_best: bool) -> None:
        started = time.monotonic()
        if self._world.rank >= self._num_writers:
            return
        pieces = {
            kind: self._stage.copy(kind, tensors, sharded_only=not self._world.is_primary)
            for kind, tensors in payload.items()
        }
        if self._world.device.startswith("cuda"):
            torch.cuda.current_stream().synchronize()
        if self._world.is_primary and self._failures_in_a_row:
            # Another rank may have written more after the primary gave up and removed the files.
            self._remove_leftovers(except_for=store.temporary_folder(self._folder, about["step"]))
        write = partial(self._write, pieces, json.dumps(state, indent=1).encode(), about, is_best, started)
        self._repeat = write
        if self._is_async:
            self._thread = threading.Thread(target=write, name="checkpoint-writer")
            self._thread.start()
        else:
            write()
            self._settle()

    def _remove_leftovers(self, except_for: Path | None = None) -> None:
        """Of saves that failed. Where the storage still does not answer, the next save removes them."""
        with suppress(OSError, UnreadableNow):
            store.remove_leftovers(self._folder, except_for=except_for)

    def _settle(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is None:
            return
        if isinstance(failure, OwnerLost):
            raise failure
        if isinstance(failure, OSError) and is_lost(self._folder, failure):
            raise lost_folder(self._folder, failure) from failure
        now = time.monotonic()
        self._failing_since_s = self._failing_since_s if self._failures_in_a_row else now
        self._failures_in_a_row += 1
        reason = getattr(failure, "strerror", None) or str(failure)
        failing_s = now - self._failing_since_s
        _log.warning(
            "warning: a checkpoint could not be saved: %s (failure %d in a row, over %.0f s)",
            *(reason, self._failures_in_a_row, failing_s),
        )
        if self._failures_in_a_row >= FEWEST_FAILURES and failing_s >= patience_s():
            raise CheckpointError(
                f"{self._failures_in_a_row} checkpoints in a row could not be saved",
                where=str(self._folder),
                got=reason,
                hint="the newest checkpoint there is complete; free disk space, then --resume auto",
            ) from failure

    def finish(self) -> None:
        """The last save is committed, and every rank knows it. One that failed is repeated. Collective."""
        self.wait()
        pause_s = _FIRST_PAUSE_S
        while is_true_on_any(self._failures_in_a_row > 0, self._world):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            if self._world.is_primary:
                # A rank may have written its note after the primary gave up. It must not count for this try.
                self._remove_leftovers()
            wait_for_all(self._world)
            if self._repeat is not None:
                self._repeat()
            self.wait()

    def best(self) -> store.Checkpoint | None:
        """The best checkpoint, or the newest complete one if it is damaged; None if there is no best. Collective."""

        def look() -> dict[str, str]:
            read = partial(store.pointed_at, self._folder, "best")
            best = read_patiently("looking for the best checkpoint", self._folder, read)
            return {"best": best.name} if best else {}

        return self.choose(self._folder, prefer_best=True) if decided_by_primary(self._world, look) else None

    def _write(
        self,
        pieces: dict[str, dict[str, Piece]],
        state: bytes,
        about: dict[str, Any],
        is_best: bool,
        started: float,
    ) -> None:
        """The whole save of this rank, usually in a thread. `wait` reports a failure."""
        temporary = store.temporary_folder(self._folder, about["step"])
        try:
            if self._before_write is not None:
                self._before_write(about["step"])
            self._require_owner()
            self._require_space(pieces)
            make_plain_folder(temporary)  # without its parents: a run folder that was deleted stays deleted
            seals = {}
            for kind, part in pieces.items():
                # Written again from the start at a second try: after a failed flush the content is unknown.
                write = partial(write_pieces, temporary / self._file_name(kind), part)
                seals[self._file_name(kind)] = store.with_one_retry(f"writing {kind}", write)
            if self._world.is_primary:
                seals.update(self._collect_notes(temporary))
                store.with_one_retry("flushing metrics", self._flush_others)
                final = self._commit(temporary, seals, state, about, is_best)
                if self._ledger is not None:
                    whole = hash_pieces(pieces) if self._num_writers == 1 else hash_stored(final)
                    self._ledger.add(final, whole, about)
            else:
                note = {name: [seal.size_bytes, seal.crc32] for name, seal in seals.items()}
                store.with_one_retry("leaving a note", lambda: self._write_note(temporary, note))
            self._failures_in_a_row = 0
            self.last_save_s = time.monotonic() - started
            self.saved_step = about["step"]
        except OwnerLost as error:  # the temporary folder may be the new owner's
            self._failure = error
        except Exception as error:  # not Ctrl-C, which ends the run
            self._failure = error
            if self._world.is_primary:
                shutil.rmtree(temporary, ignore_errors=True)
                with suppress(OSError):  # a later save or the next start does it
                    store.settle_replaced(self._folder)
            else:
                with suppress(OSError):  # without a note the primary waits until its deadline
                    self._write_note(temporary, {"error": text_of(error)})

    def _commit(
        self, temporary: Path, seals: dict[str, FileSeal], state: bytes, about: dict[str, Any], is_best: bool
    ) -> Path:
        self._require_owner()
        final = store.commit(temporary, seals, state, about)
        self._require_owner()
        for name in ("latest", "best") if is_best else ("latest",):
            store.with_one_retry(f"pointing {name}", partial(store.point, self._folder, name, final))
        try:
            store.with_one_retry("dropping checkpoints", lambda: store.prune(self._folder, self._retention))
        except (OSError, UnreadableNow) as error:  # the new one is complete and in its place
            reason = error.got if isinstance(error, UnreadableNow) else error.strerror or error
            _log.warning("warning: older checkpoints could not be dropped: %s", reason)
        return final

    def _flush_others(self) -> None:
        for path in self._flushed_first:
            with suppress(FileNotFoundError):  # no row was written yet
                flush(path)

    def _require_space(self, pieces: dict[str, dict[str, Piece]]) -> None:
        mine = sum(piece.values.nbytes for part in pieces.values() for piece in part.values())
        needed = mine * self._num_writers + _SPARE_BYTES
        if store.free_bytes(self._folder) < needed:
            raise OSError(errno.ENOSPC, f"no room for {needed / 2**20:.0f} MB")

    def _file_name(self, kind: str) -> str:
        if self._num_writers == 1:
            return f"{kind}.safetensors"
        return f"{kind}-{self._world.rank:05}-of-{self._num_writers:05}.safetensors"

    def _write_note(self, temporary: Path, note: dict[str, Any]) -> None:
        """Write a note for the primary: this rank's slices are on disk, or why they are not."""
        draft = temporary / f".draft-{self._world.rank}"
        write_plain(draft, json.dumps(note).encode())
        draft.rename(temporary / f".note-{self._world.rank}")

    def _collect_notes(self, temporary: Path) -> dict[str, FileSeal]:
        seals = {}
        clock = RunningClock()
        for rank in range(1, self._num_writers):
            note = temporary / f".note-{rank}"
            while not note.exists():
                if clock.seconds > _PEERS_TIMEOUT_S:
                    raise TimeoutError(f"rank {rank} did not write its part within {_PEERS_TIMEOUT_S:.0f} s")
                time.sleep(_POLL_S)
            found = json.loads(store.with_one_retry("reading a note", note.read_text))
            if "error" in found:
                raise OSError(f"rank {rank}: {found['error']}")
            seals.update({name: FileSeal(*values) for name, values in found.items()})
            note.unlink()
        return seals


def _start_refused(folder: Path, newest: store.Checkpoint | None, num_damaged: int) -> CheckpointError:
    if newest is not None:
        return CheckpointError(
            "this folder holds checkpoints, and the run would start at step 0",
            where=str(folder),
            got=f"{newest.path.name}, which is complete",
            hint="the same flags with --resume auto to continue from it, or another --output-dir",
        )
    return CheckpointError(
        "no complete checkpoint is left to continue from, and the run does not start at step 0 by itself",
        where=str(folder),
        got=f"{num_damaged} damaged",
        hint="restore one from a copy; or --start-over-if-damaged, or another --output-dir",
    )
