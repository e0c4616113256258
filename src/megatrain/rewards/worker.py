"""A function of the user in a process of its own: `python worker.py FILE NAME`, by functions.py.

Lines of JSON come in by stdin, {"rows": [...], "texts": [...], "ended": [...]}, and go out by what
was stdout: {"ready": true} once, then {"rewards": [...]} or {"error": "..."} for each. For an
environment, {"begin": rows} starts a generator for each row, and {"answers": [[number, text], ...]}
is answered by {"told": [[number, what it is told, reward], ...]}. What the
function prints goes to stderr. A copy of this process, made by a function that forks, says nothing:
it ends where it would answer. Nothing but Python's own modules is imported, so a process is there
at once; the folder of the file is where Python looks for modules first.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import inspect
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux: a function that loops must not outlive a run that was killed."""


def main() -> None:
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run ends by its own rules, and this with it
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    path, name = sys.argv[1:]
    own = os.getpid()

    def say(word: dict[str, Any]) -> None:
        if os.getpid() != own:
            os._exit(1)
        said.write(json.dumps(word) + "\n")
        said.flush()

    try:
        function = loaded(path, name)
    except BaseException as error:
        say({"error": f"cannot be loaded: {_in_words(error)}"})
        return
    say({"ready": True})
    games: list[Any] = []
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if "begin" in asked:
                games = [begun(function, row) for row in asked["begin"]]
                say({"begun": len(games)})
            elif "answers" in asked:
                say({"told": [told(games[n], n, text) for n, text in asked["answers"]]})
            else:
                say({"rewards": rewards_of(function, **asked)})
        except BaseException as error:
            say({"error": str(error) if isinstance(error, _Refused) else _in_words(error)})


def loaded(path: str, name: str) -> Callable[..., Any]:
    """Return a function of a file."""
    path = os.path.abspath(path)
    sys.path[0] = os.path.dirname(path)
    spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-3], path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        raise AttributeError(f"{path} has no function {name}")
    function: Callable[..., Any] = found
    return function


class _Refused(Exception):
    """Rewards that are none."""


def begun(function: Callable[..., Any], row: Any) -> Any:
    """Return a generator that waits for the first answer."""
    game = function(row)
    if not hasattr(game, "send"):
        raise _Refused(
            f"returned {game!r:.80}, not a generator: write `answer = yield` where it wants one"
        )
    if (first := next(game)) is not None:
        raise _Refused(f"yields {first!r:.80} before the first answer; begin with a plain `yield`")
    return game


def told(game: Any, number: int, answer: str) -> list[Any]:
    """Return a number, what its rollout is told next, and its reward; nothing: it is over."""
    try:
        said = game.send(answer)
    except StopIteration as end:
        reward = end.value
        if reward is not None and not (
            hasattr(reward, "__float__") and math.isfinite(float(reward))
        ):
            raise _Refused(f"returned {reward!r:.80}; return a finite number, or nothing") from None
        return [number, None, None if reward is None else float(reward)]
    messages = [said] if isinstance(said, dict) else said
    if isinstance(said, str) and said:
        return [number, said, None]
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        return [number, messages, None]
    raise _Refused(f"yields {said!r:.80}; yield text, a message or a list of messages")


def rewards_of(
    function: Callable[..., Any], rows: list[Any], texts: list[str], ended: list[bool]
) -> list[float]:
    """Return a finite number for each text. Raises what the function raises, or _Refused.

    A function that has a parameter `ended` also gets which texts were not cut off.
    """
    more = {"ended": ended} if "ended" in inspect.signature(function).parameters else {}
    found = function(rows, texts, **more)
    if isinstance(found, str | bytes) or not hasattr(found, "__iter__"):
        raise _Refused(f"returned {found!r:.80}; return a list with a number for each text")
    rewards = list(found)
    if len(rewards) != len(texts):
        raise _Refused(f"returned {len(rewards)} rewards for {len(texts)} texts")
    for number, reward in enumerate(rewards):
        if not hasattr(reward, "__float__"):
            raise _Refused(f"returned {reward!r:.80} for text {number}, {texts[number]!r:.80}; "
                           "return a number")  # fmt: skip
        if not math.isfinite(float(reward)):
            raise _Refused(f"returned {float(reward)} for text {number}, {texts[number]!r:.80}; "
                           "return a finite number")  # fmt: skip
    return [float(reward) for reward in rewards]


def _in_words(error: BaseException) -> str:
    """Return an error with the line of the user's file that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame[0]]
    where = f" ({os.path.basename(own[-1].filename)}, line {own[-1].lineno})" if own else ""
    return f"raised {type(error).__name__}: {str(error)[:400]}{where}"


if __name__ == "__main__":
    main()
