"""Chains: one run that is disturbed some times, resumed by the same command, compared at its end.

Each attempt starts all ranks. At an instant drawn from the life of the run, or from the time after
a save has begun, something happens:

    sigkill     a rank is killed; now and then it is stopped, and killed when the others are gone
    partition   a host is cut off, in both directions or in one, or two hosts lose each other, for a
                time or for good
    delay       a host's frames take up to 5 s longer, for a time

Then all ranks must end, each with RankLost that names a rank, or go on as if nothing had happened;
after a delay they must go on. Every checkpoint must verify, and the newest must be of the last
acknowledged step or later. At last the run is left alone: all files of the last checkpoint, the
exported model, the state of the run and its lines must be those of the run that nobody disturbed.
"""

from __future__ import annotations

import itertools
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatrain.config import dump_config
from megatrain.disk.checkpoint.restore import verify
from megatrain.disk.checkpoint.retention import finished
from megatrain.errors import CheckpointCorrupted, RankLost
from megatrain.run.folder import FOLDER
from proofs.ranks.hosts import Hosts
from proofs.ranks.team import Team
from proofs.signals import end_of
from testkit.runs import Setting, config_of

SIZES = (2, 3, 4)
NUM_STEPS = 5
DEADLINES_S = {"sigkill": 10.0, "partition": 10.0, "delay": 60.0}
"""The deadline of the runs. That of a delay is longer than what a few delayed frames add up to."""
LATEST_S = 60.0
"""Within which all processes must be gone after the deadline: the machine may be busy."""
PATIENCE_S = 600.0
SAVE_SHARE = 0.4
STOP_SHARE = 0.1
MOST_DELAY_S = 5.0
MOST_DISTURBED = 3
SETTINGS = {
    2: Setting(save_every=1, keep=1, dropout=0.1),
    3: Setting(save_every=2, clips=False),
    4: Setting(save_every=1, best=True),
}


class World:
    """The runs that nobody disturbed, and what became of the others."""

    def __init__(
        self, scratch: Path, what: str, hosts: Hosts | None, life_s: Mapping[int, float]
    ) -> None:
        """`life_s`: how long a run of each size lives."""
        self._scratch, self._what, self._hosts, self._life_s = scratch, what, hosts, life_s
        self._max_s = 0.0
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.imported: list[str] = []
        """Modules that a rehearsal has imported."""

    def rehearse(self, size: int) -> float:
        """Run once without a disturbance; return for how long."""
        shutil.rmtree(self._scratch / f"whole-{size}", ignore_errors=True)
        team = self._start(size, self._scratch / f"whole-{size}", tells_imports=True)
        assert team.end(time.monotonic() + PATIENCE_S), self._logs(team)
        assert not any(rank.code for rank in team.ranks), self._logs(team)
        self.imported = [line.split()[1] for line in team.ranks[0].lines if "imported" in line]
        return time.monotonic() - team.began

    def chain(self, number: int) -> None:
        """Disturb one run a few times; compare its end."""
        draw = random.Random(f"{self._what} {number}")
        size = list(self._life_s)[number % len(self._life_s)]
        folder = self._scratch / f"chain-{number}"
        acknowledged = 0
        for _ in range(draw.randint(1, MOST_DISTURBED)):
            team = self._start(size, folder)
            try:
                self._wait_for_instant(team, draw, size)
                getattr(self, f"_{self._what}")(number, team, draw)
            finally:
                team.kill()
            acknowledged = self._judge(number, team, folder, acknowledged)
        team = self._start(size, folder)
        if not team.end(time.monotonic() + PATIENCE_S) or any(rank.code for rank in team.ranks):
            self._fail(number, f"the last resume failed: {self._logs(team)}")
        elif end_of(folder) != end_of(self._scratch / f"whole-{size}"):
            self._fail(number, "other bits at the end")
        self.counts["chains"] += 1
        if not self.failures:
            shutil.rmtree(folder)

    def result(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "max_s": self._max_s, "failures": self.failures}

    def _start(self, size: int, folder: Path, *, tells_imports: bool = False) -> Team:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder.with_suffix(".yaml")
        train = {"steps": NUM_STEPS, "rank_deadline": DEADLINES_S[self._what]}
        path.write_text(dump_config(config_of(self._scratch, folder, SETTINGS[size], train=train)))
        logs = folder.with_suffix(".logs")
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir()
        words = ["train", str(path), "--resume"]
        cache = self._scratch / "cache"
        return Team(words, size, cache, logs, self._hosts, tells_imports=tells_imports)

    def _wait_for_instant(self, team: Team, draw: random.Random, size: int) -> None:
        instant, times = draw.random(), draw.choice([1, 2])
        if draw.random() >= SAVE_SHARE:
            team.follow(team.began + instant * self._life_s[size])
            return
        team.follow(
            time.monotonic() + PATIENCE_S,
            lambda: any(
                sum(line.startswith("saving") for line in rank.lines) >= times
                for rank in team.ranks
            ),
        )
        team.follow(time.monotonic() + instant * 0.1)

    def _sigkill(self, number: int, team: Team, draw: random.Random) -> None:
        victim = team.ranks[draw.randrange(len(team.ranks))]
        if victim.has_ended():
            self.counts["late"] += 1
        self.counts[f"in {_phase(victim.lines)}"] += 1
        others = [rank for rank in team.ranks if rank is not victim]
        stops = draw.random() < STOP_SHARE
        self.counts["stops"] += stops
        victim.kill(signal.SIGSTOP if stops else signal.SIGKILL)
        self._must_end(number, team, lambda: all(rank.has_ended() for rank in others))
        victim.kill()
        self._must_be_named(number, team, team.ranks.index(victim))

    def _partition(self, number: int, team: Team, draw: random.Random) -> None:
        assert self._hosts is not None
        size = len(team.ranks)
        one, other = draw.sample(range(size), 2)
        alone = [pair for pair in itertools.permutations(range(size), 2) if one in pair]
        kinds = {
            "host": alone,
            "pair": [(one, other), (other, one)],
            "one way": [pair for pair in alone if pair[0] == one],
        }
        kind = draw.choice(list(kinds))
        self.counts[f"of {kind}"] += 1
        for_good = draw.random() < 0.6
        self._hosts.cut(kinds[kind])
        if not for_good:
            team.follow(time.monotonic() + draw.uniform(0.1, 8.0))
            self._hosts.heal()
        self._must_end(number, team, team.is_over)
        self._hosts.heal()
        self._must_be_named(number, team, None)

    def _delay(self, number: int, team: Team, draw: random.Random) -> None:
        assert self._hosts is not None
        seconds = draw.uniform(0.05, MOST_DELAY_S)
        self._hosts.delay(draw.randrange(len(team.ranks)), seconds)
        team.follow(time.monotonic() + draw.uniform(0.5, 1.5) * seconds)
        self._hosts.heal()
        self._must_end(number, team, team.is_over)
        if any(rank.code for rank in team.ranks):
            self._fail(number, f"a delay of {seconds:.1f} s was not borne: {self._logs(team)}")

    def _must_end(self, number: int, team: Team, is_over: Callable[[], bool]) -> None:
        """Wait until it is over; it must be before the deadline, with some patience."""
        self.counts["disturbed"] += 1
        began = time.monotonic()
        until = began + DEADLINES_S[self._what] + LATEST_S
        while not is_over() and time.monotonic() < until:
            team.follow(time.monotonic() + 0.05)
            time.sleep(0.005)
        self._max_s = max(self._max_s, round(time.monotonic() - began, 2))
        if not is_over():
            left = [index for index, rank in enumerate(team.ranks) if not rank.has_ended()]
            self._fail(number, f"ranks {left} were left behind: {self._logs(team)}")

    def _must_be_named(self, number: int, team: Team, victim: int | None) -> None:
        """Each rank has ended well or with RankLost, and a rank was named: the victim, if any."""
        codes = [rank.code for index, rank in enumerate(team.ranks) if index != victim]
        if not any(codes):
            self.counts["went on"] += 1
            return
        who = r"\d" if victim is None else str(victim)
        told = " ".join(rank.log.read_text() for rank in team.ranks)
        named = re.search(rf"RankLost.*rank (\d, )*{who}\b", told, re.S)
        if not set(codes) <= {0, RankLost.exit_code} or not named:
            self._fail(number, f"nobody was named: {self._logs(team)}")
        self.counts["named"] += 1

    def _judge(self, number: int, team: Team, folder: Path, acknowledged: int) -> int:
        """Look at the checkpoints; return the last acknowledged step."""
        told = [line.split() for line in team.ranks[0].lines]
        acknowledged = max([acknowledged, *(int(step) for what, step in told if what == "saved")])
        newest = 0
        for path in finished(folder / FOLDER):
            try:
                newest = max(newest, verify(path).step)
            except CheckpointCorrupted as error:
                self.counts["torn"] += 1
                self._fail(number, f"torn: {error}")
        if newest < acknowledged:
            self.counts["lost"] += 1
            self._fail(number, f"step {acknowledged} was acknowledged, the newest is {newest}")
        return acknowledged

    def _fail(self, number: int, text: str) -> None:
        self.failures.append(f"chain {number}: {text}")

    def _logs(self, team: Team) -> str:
        texts = [rank.log.read_text()[-800:] for rank in team.ranks]
        return f"codes {[rank.code for rank in team.ranks]} " + " || ".join(texts)


def _phase(lines: list[str]) -> str:
    words = {"opened": "training", "saving": "saving", "saved": "training"}
    return words[lines[-1].split()[0]] if lines else "opening"
