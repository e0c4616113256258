"""The reason for each chosen setting, with the figures of the alternatives.

Law (tests/planning/test_reasons.py): a state or tier that costs something names what the one before
it lacks.
"""

from __future__ import annotations

from megatrain.memory.ledger import gib
from megatrain.planning.memory.predicted import predicted_ledger
from megatrain.planning.search import Search, shortfalls
from megatrain.step.settings import StepSettings


def reasons_for(search: Search, settings: StepSettings) -> dict[str, str]:
    """Return a reason for each setting, by its name."""
    return {
        **home_reasons(search, settings),
        "micro_batch_tokens": _micro(search, settings),
        "slots": _slots(search, settings),
        "tape": _tape(search, settings),
        "update": _update(search),
        "kept_layers": _kept(search, settings),
        "chunk_tokens": _chunk(search, settings),
        "tile_tokens": _tile(search, settings),
        "grad_slots": _grad_slots(search, settings),
        "head_pieces": _pieces(search, settings),
        "gather_embedding": _gather(search, settings),
        **search.pins,
    }


def home_reasons(search: Search, settings: StepSettings) -> dict[str, str]:
    """Return the reasons for how exactly states are kept and where: they are of memory alone."""
    reasons = {"state": _state(search, settings)}
    if search.profile.disk_bytes:
        reasons["tier"] = _tier(search, settings)
    pinned = {name: search.pins[name] for name in ("state", "tier") if name in search.pins}
    return reasons | pinned


def _state(search: Search, settings: StepSettings) -> str:
    better = [home for home in _before(search, settings) if home.state != settings.state]
    better = [home for home in better if (home.tier == "none") == (settings.tier == "none")]
    if not better:
        return "the most exact of them fits"
    return f"{better[-1].state} states are {_lacking(search, better[-1])} short"


def _tier(search: Search, settings: StepSettings) -> str:
    others = [home for home in _before(search, settings) if home.tier != settings.tier]
    if not others:
        return "host memory is enough, and a disk wears out"
    if settings.tier == "gradients" and others[-1].tier == "states":
        return f"gradients are {_lacking(search, others[-1])} short in memory"
    others = [home for home in others if home.tier == "none"]
    return f"{others[-1].state} states are {_lacking(search, others[-1])} short in memory"


def _before(search: Search, settings: StepSettings) -> list[StepSettings]:
    """Return the homes in which nothing fits."""
    homes = search.homes()
    names = [(home.state, home.tier) for home in homes]
    return homes[: names.index((settings.state, settings.tier))]


def _lacking(search: Search, home: StepSettings) -> str:
    """Return what the settings that need least in a home lack."""
    lacks = [
        shortfalls(search.profile, predicted_ledger(search.profile, search.workload, settings))
        for settings in search.small_at(home)
    ]
    host = [lack["host"] for lack in lacks if "host" in lack]
    return gib(min(host, default=0))


def _lack(search: Search, settings: StepSettings) -> str:
    """Return the memory that settings lack, of the first place that lacks any; empty: none."""
    ledger = predicted_ledger(search.profile, search.workload, settings)
    missing = shortfalls(search.profile, ledger)
    texts = [f"{gib(num_bytes)} more {place} memory" for place, num_bytes in missing.items()]
    return next(iter(texts), "")


def _against(search: Search, settings: StepSettings, other: StepSettings) -> str:
    """Return how another setting compares: how much memory it lacks, or how much slower it is."""
    if missing := _lack(search, other):
        return f"needs {missing}"
    if settings not in search.tried or other not in search.tried:
        return "is not faster"
    slower = search.tried[other] / search.tried[settings] - 1
    return f"is {slower:.1%} slower" if slower > 0.0005 else "is not faster"


def _micro(search: Search, settings: StepSettings) -> str:
    micro = settings.micro_batch_tokens
    if micro >= search.workload.step_tokens:
        return "the full step at once"
    return (
        f"{2 * micro} {_against(search, settings, settings.changed(micro_batch_tokens=2 * micro))}"
    )


def _slots(search: Search, settings: StepSettings) -> str:
    if search.profile.unified:
        return "unused: compute reads the store"
    if settings.slots == 2:
        return f"3 {_against(search, settings, settings.changed(slots=3))}"
    return f"the last {settings.slots} layers are fetched once, not twice"


def _tape(search: Search, settings: StepSettings) -> str:
    if search.profile.unified:
        return "host and device are one memory"
    other = "host" if settings.tape == "device" else "device"
    return f"a {other} tape {_against(search, settings, settings.changed(tape=other))}"


def _kept(search: Search, settings: StepSettings) -> str:
    """Return why so many layers keep their activations, and what that saves."""
    count, layers = settings.kept_layers, search.workload.model.num_layers
    if not count and not search.may_keep(settings):
        tiled = search.workload.tile_of(settings) is not None
        return "layers run over tiles" if tiled else "what these layers hold is not known"
    if not count or count < layers:
        missing = _lack(search, settings.changed(kept_layers=count + 1))
        more = f"{count + 1} need {missing}" if missing else "more are not faster"
    if not count:
        return more
    gain = search.seconds(settings.changed(kept_layers=0)) / search.seconds(settings) - 1
    if count >= layers:
        return f"all layers, nothing computed twice: {gain:+.0%}"
    return f"{gain:+.0%}; {more}"


def _update(search: Search) -> str:
    if search.workload.max_grad_norm is not None:
        return "exact clipping: updates behind the next forward"
    return "no clipping: updates as gradients arrive"


def _chunk(search: Search, settings: StepSettings) -> str:
    if settings.chunk_tokens >= settings.micro_batch_tokens:
        return "all logits of a micro-batch at once"
    larger = settings.changed(chunk_tokens=2 * settings.chunk_tokens)
    if settings.chunk_tokens >= 4096:
        return "large enough for full speed"
    return f"{larger.chunk_tokens} {_against(search, settings, larger)}"


def _tile(search: Search, settings: StepSettings) -> str:
    tile = settings.tile_tokens
    if tile is None:
        return "full rows fit"
    if tile >= settings.micro_batch_tokens:
        return "no row is longer"
    missing = _lack(search, settings.changed(tile_tokens=None))
    return f"full rows need {missing}" if missing else "full rows are not faster"


def _grad_slots(search: Search, settings: StepSettings) -> str:
    other = 3 - settings.grad_slots
    return f"{other} {_against(search, settings, settings.changed(grad_slots=other))}"


def _pieces(search: Search, settings: StepSettings) -> str:
    if settings.head_pieces > 1:
        fewer = settings.changed(head_pieces=settings.head_pieces // 2)
        return f"{fewer.head_pieces} {_against(search, settings, fewer)}"
    if search.workload.model.tied:
        return "the embedding adds to the table's gradient too"
    return "the gradient of the full vocabulary fits"


def _gather(search: Search, settings: StepSettings) -> str:
    if search.workload.model.tied:
        return "the head reads the table too"
    if not search.workload.division.is_alone:
        return "the table is divided among ranks"
    if search.profile.unified:
        return "unused: compute reads the store"
    other = settings.changed(gather_embedding=not settings.gather_embedding)
    way = "the full table" if settings.gather_embedding else "gathering rows"
    return f"{way} {_against(search, settings, other)}"
