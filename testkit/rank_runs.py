"""Runs on ranks that are threads of one process (rank_threads.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import pytest

from megatrain.config import Config
from megatrain.devices.device import CpuDevice
from megatrain.ranks.ranks import Ranks
from megatrain.run.interrupts import Interrupts
from megatrain.run.opening import opening, resumption
from megatrain.run.this_rank import together
from megatrain.run.trainer import Trainer
from testkit.rank_threads import ONE_AT_A_TIME, Together, in_turn

Result = TypeVar("Result")


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let threads build and run models in turn, as they must."""

    def locked(work: Callable[..., Any]) -> Callable[..., Any]:
        def doing(*given: Any, **more: Any) -> Any:
            with ONE_AT_A_TIME:
                return work(*given, **more)

        return doing

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open_tokenizer", "open_model", "make_engine"):
            patch.setattr(opening, name, locked(vars(opening)[name]))
        patch.setattr(resumption, "read_model", locked(resumption.read_model))
        patch.setattr(CpuDevice, "lanes", lambda device: in_turn())
        yield


def run_on_ranks(
    num_ranks: int,
    config: Config,
    use: Callable[[Trainer], Result],
    *,
    resume: bool = False,
    interrupts: Callable[[Ranks], Interrupts] = lambda ranks: Interrupts(),
) -> list[Result]:
    """Return what `use` makes of a run, by rank; a rank's error is raised as in `Together.run`."""

    def work(ranks: Ranks) -> Result:
        listens = interrupts(ranks)
        with (
            together(ranks),
            Trainer(config, interrupts=listens, ranks=ranks) as trainer,
        ):
            if resume:
                continued = partial(trainer.train, resume_from_checkpoint=True)
                trainer.train = continued  # type: ignore[method-assign]
            return use(trainer)

    with one_at_a_time():
        return Together(num_ranks).run(work)
