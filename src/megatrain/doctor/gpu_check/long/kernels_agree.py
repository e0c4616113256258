"""Part `check`: facts, laws and rates of the short check, and other kernels against eager ones.

Liger, torch's compiler and the package flash-attn compute the same step as eager kernels, in
another order: each loss and gradient is to be as near as TOLERANCE. A package that is absent is
named.

Laws (tests/doctor/gpu_check/long/test_kernels_agree.py)
    1. A kernel that computes something else is wrong, with what differs and by how much.
    2. A package that is missing leaves its check out, by name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from megatrain.doctor.gpu_check.check import check_subject
from megatrain.doctor.gpu_check.failing import Broken, failed_check
from megatrain.doctor.gpu_check.findings import Check
from megatrain.doctor.gpu_check.laws import deterministic
from megatrain.doctor.gpu_check.long.given import Given
from megatrain.doctor.gpu_check.long.results import CannotRun
from megatrain.doctor.gpu_check.tiny_models import TinyModel, tiny_batch
from megatrain.doctor.subject import Subject
from megatrain.memory.kinds import Kind
from megatrain.text import flop_rate

TOLERANCE = 3e-2
"""Distance from the eager step in bf16, as a share of the norm of each gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherKernels:
    """Kernels that take the place of eager ones."""

    package: str
    """Module without which they are absent."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    attn: str | None = None


OTHERS: Mapping[str, OtherKernels] = {
    "liger": OtherKernels(package="liger_kernel", settings={"kernels": "liger"}),
    "compile": OtherKernels(package="triton", settings={"compile": True}),
    "flash attention 2": OtherKernels(package="flash_attn", attn="flash_attention_2"),
}


def measure(given: Given) -> dict[str, Any]:
    """Return the short check without its step, and how other kernels agree."""
    found = check_subject(given.subject, None, given.say, time.monotonic())
    facts = {"check": json.loads(found.to_json())}
    given.keep(facts)
    checks = []
    with deterministic():
        for name in OTHERS:
            given.say(f"{name} against eager kernels")
            checks.append(agreement(given.subject, name))
    rows = [{"kernels": one.name, "state": one.state, "found": one.found} for one in checks]
    states = [asdict(check) for check in found.checks] + [asdict(check) for check in checks]
    wrong = [one["name"] for one in states if one["state"] == "wrong"]
    flops = found.rates.get("product_flops", ())
    speed = f"; products at {flop_rate(max(point[-1] for point in flops))}" if flops else ""
    return facts | {
        "lead": f"Wrong: {', '.join(wrong)}." if wrong else f"All laws hold{speed}.",
        "figures": {"exit_code": found.exit_code, "verdict": found.verdict()},
        "tables": {
            "Checks": [
                {"check": one.name, "state": one.state, "found": one.found} for one in found.checks
            ],
            "Other kernels against eager ones": rows,
        },
    }


def agreement(subject: Subject, name: str) -> Check:
    """Return how a step by other kernels agrees with the eager one."""
    try:
        return Check(group="right", name=name, state="ok", found=_agreement(subject, name))
    except CannotRun as error:
        return Check(group="right", name=name, state="left out", found=str(error))
    except Exception as error:
        return failed_check("right", name, error)


def _agreement(subject: Subject, name: str) -> str:
    others = OTHERS[name]
    if subject.runtime is None:
        raise CannotRun("a processor has no such kernels")
    if find_spec(others.package) is None:
        raise CannotRun(f"the package {others.package} is not installed")
    loss, expected = _step(subject, OtherKernels(package=""))
    other_loss, found = _step(subject, others)
    apart = {param: _distance(found[param], value) for param, value in expected.items()}
    worst = max(apart, key=lambda param: apart[param])
    text = f"losses {other_loss:.4f} and {loss:.4f}; at most {apart[worst]:.1e} of a norm ({worst})"
    # Not `>`: a value that is not a number is wrong too.
    if not (apart[worst] <= TOLERANCE and abs(other_loss - loss) <= TOLERANCE * abs(loss)):
        raise Broken(f"{text}, over {TOLERANCE:g}", "kernels")
    return text


def _step(subject: Subject, kernels: OtherKernels) -> tuple[float, dict[str, Tensor]]:
    tiny = TinyModel.make("llama", "bf16", kernels.attn)
    with tiny.engine(subject.new_device(), trains=False, **kernels.settings) as engine:
        loss = engine.step(tiny_batch(1)).loss
    params = tiny.decoder.params
    return loss, {p.name: tiny.store.param(p.name, Kind.GRAD).clone() for p in params}


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())
