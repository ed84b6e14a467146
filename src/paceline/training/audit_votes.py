"""Who is wrong, if two ranks computed different bits for the same lane. Pure functions of digests.

After a difference every rank computes the disputed lane again. The result of most ranks is right: healthy ranks agree
to the bit, and two faulty ones hardly ever do. A rank whose new result is wrong computes wrong bits again and again. A
rank whose new result is right was wrong once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

Digest = tuple[int, ...]  # of a lane: a number per tensor


@dataclass(frozen=True)
class Dispute:
    """Two results for one lane that differ, and the votes of all ranks."""

    owner: int  # the rank whose lane it is
    auditor: int  # the rank that recomputed it; on one rank the same
    trained: Digest  # the owner's result, which training would have used
    audited: Digest  # the auditor's result
    votes: Sequence[Digest]  # by rank, computed after the difference was seen


@dataclass(frozen=True)
class Verdict:
    """A rank that computed wrong bits."""

    rank: int
    tensor: int  # the place of the first wrong number in the digest
    is_permanent: bool  # it was wrong in the vote, too


def judge(disputes: Sequence[Dispute]) -> list[Verdict]:
    """The ranks that were wrong, each once. Empty: the votes do not decide."""
    found: dict[int, Verdict] = {}
    for verdict in (verdict for dispute in disputes for verdict in _judge(dispute)):
        before = found.get(verdict.rank)
        if before is None or (verdict.is_permanent and not before.is_permanent):
            found[verdict.rank] = verdict
    return [found[rank] for rank in sorted(found)]


def _judge(dispute: Dispute) -> list[Verdict]:
    first = {dispute.owner: dispute.trained}
    first.setdefault(dispute.auditor, dispute.audited)
    right = _result_of_most(dispute.votes)
    if len(dispute.votes) == 1:  # one rank: whichever result is right, it has computed the other one
        right = dispute.votes[0] if dispute.votes[0] in (dispute.trained, dispute.audited) else dispute.audited
        wrong = dispute.audited if right == dispute.trained else dispute.trained
        return [Verdict(dispute.owner, _first_difference(wrong, right), is_permanent=False)]
    if right is None:
        return _judge_by_themselves(dispute)
    permanent = [rank for rank, vote in enumerate(dispute.votes) if vote != right]
    if permanent:
        return [Verdict(rank, _first_difference(dispute.votes[rank], right), is_permanent=True) for rank in permanent]
    return [
        Verdict(rank, _first_difference(result, right), is_permanent=False)
        for rank, result in first.items()
        if result != right
    ]


def _judge_by_themselves(dispute: Dispute) -> list[Verdict]:
    """The votes are split evenly: if one of the two contradicts its own first result, and the other does not."""
    first = {dispute.owner: dispute.trained, dispute.auditor: dispute.audited}
    unsteady = [rank for rank, result in first.items() if dispute.votes[rank] != result]
    if len(unsteady) != 1:
        return []
    rank = unsteady[0]
    return [Verdict(rank, _first_difference(dispute.votes[rank], first[rank]), is_permanent=False)]


def _result_of_most(votes: Sequence[Digest]) -> Digest | None:
    (vote, count), *others = Counter(votes).most_common(2)
    return vote if not others or count > others[0][1] else None


def _first_difference(one: Digest, other: Digest) -> int:
    return next(place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
