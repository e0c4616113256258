"""The first lines of a run on the console, and the facts that it writes beside its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatrain.config import Config
from megatrain.data.preview import card_lines
from megatrain.data.tokens.limits import bad_rows, dropped_rows
from megatrain.devices.device import Device
from megatrain.disk.hf.model import HostModel
from megatrain.memory.host import is_in_memory
from megatrain.memory.kinds import TensorKind
from megatrain.optim.learning_rate import LRSchedule
from megatrain.planning.plan import Plan
from megatrain.planning.prediction import predicted_time
from megatrain.run.folder import RunFolder, machine_facts
from megatrain.run.opening import optional, pin_commits
from megatrain.run.opening.opening import Opening
from megatrain.run.opening.planned import plan_lines
from megatrain.run.opening.recipe import balancing_note
from megatrain.run.opening.resumption import LoadedCheckpoint
from megatrain.run.opening.training_data import TrainingData
from megatrain.text import counted, size

if TYPE_CHECKING:
    from megatrain.run.external_steps import ExternalSteps

KEPT_FOR_PATIENCE = "eval.patience: the best checkpoint is kept and exported, as with save.best"
NOTHING_TO_JUDGE = "save.best: data.eval is null, so there is no best model; the last is used"
MOST_REASONS = 3
MOST_LINES = 6
"""Lines before the first step, without those of a first measurement and of an evaluation."""
COUNTED_ROWS = 1_000_000
"""Steps by tokens of so many rows are counted in some 3 s."""
SAMPLE_TOKENS = 64
"""Tokens of each sample. For each, all weights cross the link once, for all samples together."""


def opening_line(config: Config, device: Device, home: HostModel, num_steps: int) -> str:
    """Return the line with the model, the device and the length of the run."""
    num_params = sum(param.num_elements for param in home.decoder.params)
    tokens, rows = config.train.batch_tokens, config.train.batch_rows
    length = counted(rows or 0, "row") if tokens is None else f"{tokens:,} tokens"
    return (
        f"{num_params:,} params of {config.model.name_or_path} on {device.name}, "
        f"{counted(num_steps, 'step')} of {length}; run folder {config.run_dir}"
    )


def startup_lines(opened: Opening, notes: Sequence[str], *, verbose: bool) -> list[str]:
    """Return the lines before the first step: model, plan, data, then `notes`.

    Unless `verbose` they are MOST_LINES at most: a reader must see the first step. The last line
    then says how many notes plan.json has beside them.
    """
    num_steps = opened.data.num_steps
    lines = [
        opening_line(opened.config, opened.device, opened.home, num_steps),
        *plan_lines(opened.plan, num_steps),
        data_line(opened.data, needs_count=opened.config.train.steps is None),
    ]
    rest = [line for note in notes for line in note.split("\n")]
    if verbose:
        return [*lines, "", opened.plan.text(details=True), "", *rest]
    room = MOST_LINES - len(lines)
    if len(rest) <= room:
        return [*lines, *rest]
    hidden = counted(len(rest) - room + 1, "more line")
    return [*lines, *rest[: room - 1], f"{hidden}: plan.json has them, `train -v` prints them"]


def write_facts(opened: Opening) -> list[str]:
    """Write facts of the machine and the rows; return notes on commits of the Hub."""
    opened.folder.write_json("machine.json", machine_facts())
    opened.folder.write_json("data_card.json", opened.data.card)
    if not opened.pins:
        return []
    opened.folder.write_json(pin_commits.FILE, opened.pins)
    return pin_commits.commits_in_words(opened.pins)


def write_samples(opened: Opening, step: int) -> None:
    """Let the model write, into samples.jsonl."""
    data, count = opened.data, opened.config.eval.samples
    if not isinstance(data, TrainingData):
        records = data.samples(count)
    else:
        asked = data.questions(count)
        records = optional.samples.written_texts(
            opened.engine, opened.home, opened.tokenizer, asked, SAMPLE_TOKENS, data.items
        )
    for record in records:
        opened.folder.append("samples.jsonl", {"step": step, **record})


def writes_after(step: int, num_steps: int, config: Config) -> bool:
    """Return whether the model writes after an evaluation.

    Without rows to evaluate on it writes before the first step and after the last one only.
    """
    return step in (0, num_steps) or config.data.eval is not None


def samples_in_words(config: Config, plan: Plan, num_steps: int, weight_bytes: int) -> str:
    """Return how often the model writes and what that costs, as far as the plan knows it."""
    every, count = config.eval.every, config.eval.samples
    steps = {0, num_steps, *range(0, num_steps, every or num_steps)}
    times = sum(writes_after(step, num_steps, config) for step in steps)
    if count == 0:
        return "samples: none, eval.samples is 0"
    text = f"samples: {count} of up to {SAMPLE_TOKENS} tokens, {times} times"
    if config.data.eval is None:
        text += " (before and after: data.eval is null)"
    if not plan.knows_time:
        return text
    machine = plan.profile
    rate = machine.dram_bytes_per_s if machine.unified else machine.copy_in_bytes_per_s
    seconds = SAMPLE_TOKENS * weight_bytes / rate
    share = times * seconds / (times * seconds + num_steps * plan.step_s)
    return f"{text}: {predicted_time(seconds)} each, predicted, {share:.0%} of the run"


def data_line(data: TrainingData | ExternalSteps, *, needs_count: bool) -> str:
    """Return the rows that were read, lost, and are trained and evaluated on, in one line.

    `needs_count`: the run counts the steps of an epoch anyway, which takes minutes for a billion.
    """
    rows = data.rows
    cards = [source.card for source in rows.prepared]
    name = cards[0]["source"] if len(cards) == 1 else counted(len(cards), "source")
    lost = {
        "bad": sum(bad_rows(card).total for card in cards),
        "dropped": sum(dropped_rows(card).total for card in cards),
    }
    said = [f"{count:,} {what}" for what, count in lost.items() if count]
    read = ", ".join([counted(sum(card["rows"] for card in cards), "row"), *said])
    length = counted(rows.order.size, "row")
    if needs_count or rows.order.size <= COUNTED_ROWS:
        length += f" in {counted(data.steps_in_epoch, 'step')}"
    held = f"; {counted(data.num_judged, 'row')} to evaluate on" if rows.held else ""
    if not rows.held and data.held_fraction is not None:
        held = f"; no rows held out: {data.held_fraction:.2%} of them is less than one"
    return f"data: {name}, {read}; an epoch: {length}{held}"


def data_lines(data: TrainingData | ExternalSteps) -> list[str]:
    """Return the contents of the sources and their mixture."""
    rows = data.rows
    lines = [line for source in rows.prepared for line in card_lines(source.card, MOST_REASONS)]
    if len(rows.shares) > 1 or rows.shares[0].weight != 1:
        mixed = ", ".join(
            f"{share.name} {counted(share.num_rows, 'row')} x {share.weight:g}"
            for share in rows.shares
        )
        lines.append(f"{mixed}: {counted(rows.order.size, 'row')} an epoch")
    return lines


def tier_lines(home: HostModel, plan: Plan) -> list[str]:
    """Return where the disk tier is and how much the run writes to it, if it has one."""
    tier, wear = home.store.tier, plan.wear
    if tier is None:
        return []
    kinds = ", ".join(map(str, tier.regions.kinds))
    line = (
        f"disk tier: {kinds} in {tier.folder}, {size(tier.regions.num_bytes)}, written once a step"
    )
    if wear is not None and wear.day_bytes is not None:
        line += f": {wear.day_bytes / 1e12:.3g} TB a day"
    lines = [f"{line}. Compare it with the disk's rated endurance (TBW)"]
    if is_in_memory(tier.folder):
        lines.append(
            f"memory.disk: {tier.folder} is in memory itself (tmpfs), so the tier frees none. Set "
            "memory.disk to a folder on a disk"
        )
    return lines


def rollout_lines(config: Config, plan: Plan) -> list[str]:
    """Return what the plan says of drawing the answers of a step, if they are drawn here."""
    if not config.loss.draws:
        return []
    found = optional.rollouts.plan_rollouts(config, plan)
    return [] if found is None else [f"rollouts: {line}" for line in found.lines()]


def first_notes(opened: Opening, shortage: str | None) -> list[str]:
    """Return the notes on choices and findings while opening, what needs attention first.

    `shortage` is that of the disk.
    """
    config, plan, home = opened.config, opened.plan, opened.home
    weight_bytes = home.store.arena(TensorKind.HI).nbytes * home.store.layout.owner.size
    notes = [] if shortage is None else [shortage]
    notes += [*plan.costly_choices(), *tier_lines(home, plan), *opened.notes]
    if config.keeps_best != config.save.best:
        notes.append(KEPT_FOR_PATIENCE if config.keeps_best else NOTHING_TO_JUDGE)
    if (balancing := balancing_note(config, home.decoder)) is not None:
        notes.append(balancing)
    return [
        *notes,
        *rollout_lines(config, plan),
        *data_lines(opened.data),
        samples_in_words(config, plan, opened.data.num_steps, weight_bytes),
    ]


def rate_jump(rate: LRSchedule, before: float | None, step: int, num_steps: int) -> list[str]:
    """Return a note if the schedule is not the one that the last step was trained by."""
    if before is None or step >= num_steps or before in (rate.rate(step - 1), rate.rate(step)):
        return []
    return [
        f"the learning rate jumps: step {step} was trained at {before:.3g}, step {step + 1} "
        f"will be at {rate.rate(step):.3g}, because train or optim settings changed"
    ]


def resumed_in_words(resumed: LoadedCheckpoint) -> list[str]:
    """Return which checkpoint was loaded, what it skipped, and what has changed since."""
    return [
        *(f"skipped: {reason}" for reason in resumed.skipped),
        *(f"changed: {text}" for text in resumed.changed),
        *resumed.converted,
        f"resumed from {resumed.path.name}",
    ]


def resumed_event(resumed: LoadedCheckpoint, step: int, lost: list[str]) -> dict[str, Any]:
    """Return the record of a resume for events.jsonl."""
    record = {"event": "resumed", "step": step, "checkpoint": resumed.path.name}
    changes = {"skipped": resumed.skipped, "changed": resumed.changed, "lost": lost}
    changes |= {"converted": resumed.converted} if resumed.converted else {}
    return record | changes


def nothing_to_resume(folder: RunFolder) -> str:
    """Return the note of a run that was to be resumed and begins."""
    dropped = "; the lines of unsaved steps are dropped" if folder.had_run else ""
    return f"nothing to resume: {folder.path} has no checkpoint. Starting at step 0{dropped}"
