"""The parts of a long check, in their order, and what each may take.

Each part is a module with a function `measure`, which a process of its own calls: a part that loses
the device, or hangs, ends alone. Nothing here imports torch: the process that starts the parts
never touches the device.
"""

from __future__ import annotations

from dataclasses import dataclass

TOTAL_S = 25 * 60.0
"""For all parts together, their processes' starts included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One question, and the module that answers it."""

    name: str
    asks: str
    """The question, for people."""
    module: str
    budget_s: float
    """Seconds on a device that is rented; what is not begun by then is left out, by name."""


PARTS = (
    Part(
        name="check",
        asks="Is the device right, what are its rates, and do other kernels agree with eager ones?",
        module="megatrain.doctor.gpu_check.long.kernels_agree",
        budget_s=210,
    ),
    Part(
        name="matrix",
        asks="What does each choice bring: packing, fused kernels, compile, tokens, updates, tape, "
        "slots?",
        module="megatrain.doctor.gpu_check.long.matrix",
        budget_s=390,
    ),
    Part(
        name="roofline",
        asks="How near does each kind of op come to the device's own rates, and to the plan?",
        module="megatrain.doctor.gpu_check.long.roofline",
        budget_s=100,
    ),
    Part(
        name="kernels",
        asks="Which kernels take the time of a step, and when does none run?",
        module="megatrain.doctor.gpu_check.long.kernels",
        budget_s=90,
    ),
    Part(
        name="clocks",
        asks="What does the device sustain once it is warm?",
        module="megatrain.doctor.gpu_check.long.clocks",
        budget_s=80,
    ),
    Part(
        name="registration",
        asks="What does pinning host memory cost, in time and in device memory?",
        module="megatrain.doctor.gpu_check.long.registration",
        budget_s=120,
    ),
    Part(
        name="update",
        asks="How many threads does the optimizer want, and what do copies and updates take from "
        "each other?",
        module="megatrain.doctor.gpu_check.long.update_threads",
        budget_s=90,
    ),
    Part(
        name="end_to_end",
        asks="Does a run that is killed continue as if it were not, and how soon does it begin?",
        module="megatrain.doctor.gpu_check.long.end_to_end",
        budget_s=270,
    ),
    Part(
        name="host",
        asks="What do the threads of the host do during a step?",
        module="megatrain.doctor.gpu_check.long.host_threads",
        budget_s=90,
    ),
)
