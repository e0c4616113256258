"""A streamed step on an accelerator against its bound: copy rates, step time, tokens/s, memory.

    python -m benchmarks.gpu [--json] [--device cuda] [--layers 16 --hidden 2048 ...]
                             [--tokens 16384 --micro 4 --length 2048] [--trace FILE]

A Llama of random weights is made in host memory; nothing is downloaded. It takes a few steps to
warm up and some to measure, chained, so that each meets the updates that the one before left.

    step_s              median time from one step's result to the next one's
    bound_s             the longest of these four: no schedule of the same work can be faster
      compute_s         median step with copies turned off and without updates
      in_s, out_s       bytes that cross in a step, each way, over the copy rate measured alone
      host_s            one norm and update of every block, alone
    percent_of_bound    100 x bound_s / step_s
    device_busy_s       how long the device was inside ops of compute in the last step, by its own
                        clock; the host's, where compute is on the host
    host_paced_s        of the step, how long compute was at the pace of the host that issues it:
                        compute_s has that in it, so that percent_of_bound cannot show it
    limited_by          what the device's own times say of the last step (megatrain.step.ops.LIMITS)
    gemm_tflop_per_s    one bf16 product of a micro-batch's tokens with a feed-forward matrix, alone
    mfu                 6 per token and parameter and second, over that of the product
    tflop_per_s         8 per token and parameter (forward, recompute, backward), the embedding's
                        table and attention's own products not counted
    tokens_per_s        real tokens: padding would not count (there is none)
    copy_gb_per_s       registered host memory to the device (in), back (out), and the sum of both
                        when they run at once; 10^9 bytes
    peak_device_bytes   the most that was allocated at once in the whole run up to the last step

`--device cpu` copies on the CPU and `--device simulated` is the accelerator of the tests: both show
that this script works, and nothing about speed.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.timed_step import TimedModel, time_step
from megatrain.doctor.gpu_check.facts import system_facts
from megatrain.doctor.rates import Bench, copy_rates
from megatrain.doctor.subject import Subject, find_subject
from megatrain.errors import MegaTrainError
from megatrain.step.settings import StepSettings


def subject_called(name: str) -> tuple[Subject, AbstractContextManager[Any]]:
    """Return what is measured, and what must be entered meanwhile."""
    if name != "simulated":
        return find_subject(name), nullcontext()
    simulator = importlib.import_module("testkit.simulated.accelerator").Simulator(policy="early")
    watched = importlib.import_module("testkit.simulated.watched").watched
    cpu = torch.device("cpu")
    subject = Subject(name=name, place=cpu, device_bytes=1 << 40, runtime=simulator)
    return subject, watched(simulator)


def model_of(options: argparse.Namespace) -> TimedModel:
    """Return a model whose steps have as many tokens as asked for, or a little less: full rows."""
    rows = options.tokens // (options.micro * options.length)
    if rows == 0:
        raise SystemExit(
            f"{options.tokens} tokens in {options.micro} micro-batches leave none of them a row of "
            f"{options.length} tokens: more --tokens, fewer --micro, or a shorter --length"
        )
    heads = options.heads or max(1, options.hidden // 128)
    return TimedModel(
        layers=options.layers,
        hidden=options.hidden,
        intermediate=options.intermediate or 4 * options.hidden,
        heads=heads,
        kv_heads=options.kv_heads or heads,
        vocabulary=options.vocabulary,
        length=options.length,
        rows=rows,
        num_micro=options.micro,
    )


def gemm_rate(bench: Bench, model: TimedModel) -> float:
    """Return the FLOP/s of a micro-batch's tokens times a feed-forward matrix, in bf16."""
    rows, width, inner = model.rows * model.length, model.hidden, model.intermediate
    left, right = bench.values(rows, width), bench.values(width, inner)
    return bench.rate(lambda: left @ right, 2.0 * rows * width * inner)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures."""
    subject, watching = subject_called(options.device)
    model = model_of(options)
    settings = StepSettings(
        update=options.update,
        slots=options.slots,
        tape=options.tape,
        tape_slots=options.tape_slots,
    )
    with watching:
        found = time_step(
            subject,
            model,
            settings,
            num_steps=options.steps,
            num_threads=options.threads or subject.new_device().placement.update_threads,
            cap_bytes=options.cap_gib and int(options.cap_gib * 2**30),
        )
        device = subject.new_device()
        copies = copy_rates(device, num_bytes=options.copy_mib << 20, stream=subject.new_stream)
        device.close()
    gemm = gemm_rate(Bench(place=subject.place, synchronize=device.synchronize), model)
    if options.trace:
        found.trace.write(options.trace)
    lanes_s = found.lanes_s(copies)
    last = found.trace.last_step()
    (summary,) = last.step_summaries()
    bound_by = max(lanes_s, key=lambda name: lanes_s[name])
    rates = {"in": copies.into, "out": copies.out, "both": copies.both}
    return {
        "machine": {"device": options.device, **system_facts(subject).values},
        "options": {
            name: str(v) if isinstance(v, Path) else v for name, v in vars(options).items()
        },
        "params": found.num_params,
        "tokens_per_step": found.num_tokens,
        "step_s": _rounded(found.step_s),
        "bound_s": _rounded(lanes_s[bound_by]),
        "bound_by": bound_by,
        "percent_of_bound": round(100 * lanes_s[bound_by] / found.step_s, 1),
        **{f"{name}_s": _rounded(seconds) for name, seconds in lanes_s.items()},
        "device_busy_s": _rounded(last.lane_summaries()["compute"].busy_s),
        "host_paced_s": _rounded(summary.host_paced_s),
        "limited_by": summary.bottleneck,
        "gemm_tflop_per_s": _rounded(gemm / 1e12),
        "mfu": _rounded(6 / 8 * found.flops / gemm),
        "tokens_per_s": _rounded(found.num_tokens / found.step_s),
        "tflop_per_s": _rounded(found.flops / 1e12),
        "copy_gb_per_s": {name: _rounded(rate / 1e9) for name, rate in rates.items()},
        "bytes_in_per_step": found.bytes_in,
        "bytes_out_per_step": found.bytes_out,
        "peak_device_bytes": found.peak_bytes,
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, xpu, cpu or simulated")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=0, help="default: 4 x hidden")
    parser.add_argument("--heads", type=int, default=0, help="default: hidden / 128")
    parser.add_argument("--kv-heads", type=int, default=0, help="default: as many as heads")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--tokens", type=int, default=16384, help="of a whole step")
    parser.add_argument("--micro", type=int, default=4, help="micro-batches of a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--update", choices=["late", "in_backward"], default="late")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--tape", choices=["device", "host"], default="host")
    parser.add_argument("--tape-slots", type=int, default=2)
    parser.add_argument("--cap-gib", type=float, default=None, help="of device memory")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0, help="of updates; default: as in a run")
    parser.add_argument("--copy-mib", type=int, default=512, help="of one copy, for the rates")
    parser.add_argument("--trace", type=Path, default=None, help="write what the lanes did")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(arguments)
    try:
        figures = measure(options)
    except MegaTrainError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:20} {value}")


if __name__ == "__main__":
    main()
