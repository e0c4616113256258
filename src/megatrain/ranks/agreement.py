"""All ranks end a piece of work alike: done, or with the failure of the first that failed.

    with Agreement(ranks.agree) as agreement:      # or ranks.carrier.agree, in a save or an export
        ...                                        # work that may fail on one rank alone

A rank that has failed cannot leave at once, because others wait for what it would have sent. It
keeps to the order of calls until the next `settle`, `all_well` or the end of the block. There all
ranks get the failure, and raise an error of the same class and words, which name the rank.
So a damaged checkpoint is skipped by all ranks, and a save on a full disk is given up by all.

Laws (tests/ranks/test_agreement.py)
    1. Either no rank raises, or all raise the same.
    2. A process alone raises its failure unchanged.
    3. RankLost goes through: the others may be gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from megatrain.errors import DiskError, MegaTrainError, RankLost
from megatrain.ranks.ranks import RankInfo

Agree = Callable[[RankInfo], list[RankInfo]]


class Agreement:
    """The agreement of all ranks in a `with` block: whether all is well, and facts."""

    def __init__(self, agree: Agree) -> None:
        self._agree = agree
        self._ended = False

    def settle(
        self, failure: Exception | None = None, facts: RankInfo | None = None
    ) -> list[RankInfo]:
        """Return the facts that each rank gives, or raise on all ranks if one has a failure."""
        said = self._say(failure, facts)
        for rank, of_rank in enumerate(said):
            if of_rank["failed"] is not None:
                self._ended = True
                raise _failure(rank, of_rank["failed"], failure, alone=len(said) == 1)
        return [of_rank["facts"] for of_rank in said]

    def all_well(self, failure: Exception | None = None) -> bool:
        """Return whether no rank has a failure. All must settle afterwards."""
        return all(of_rank["failed"] is None for of_rank in self._say(failure, None))

    def _say(self, failure: Exception | None, facts: RankInfo | None) -> list[RankInfo]:
        failed = None if failure is None else {"code": _code(failure), "text": _text(failure)}
        return self._agree({"failed": failed, "facts": facts or {}})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Settle, unless that has failed before. Raises what `settle` does."""
        if self._ended or isinstance(error, RankLost):
            return
        if error is None or isinstance(error, Exception):
            self.settle(error)


def _code(failure: Exception) -> str | None:
    if isinstance(failure, OSError):
        return DiskError.code
    return failure.code if isinstance(failure, MegaTrainError) else None


def _text(failure: Exception) -> str:
    return str(failure) if isinstance(failure, MegaTrainError) else repr(failure)


def _failure(
    rank: int, failed: Mapping[str, Any], own: Exception | None, *, alone: bool
) -> Exception:
    """Return the error of `rank` for all ranks; the reason on the rank itself is its own."""
    if alone and own is not None:
        return own
    error = _classes().get(failed["code"], RankLost)(f"rank {rank}: {failed['text']}")
    error.__cause__ = own
    return error


def _classes() -> dict[str, type[MegaTrainError]]:
    return {found.code: found for found in _below(MegaTrainError)}


def _below(parent: type[MegaTrainError]) -> Iterator[type[MegaTrainError]]:
    for found in parent.__subclasses__():
        yield found
        yield from _below(found)
