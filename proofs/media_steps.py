"""Twenty steps on rows with images: TRL's SFTTrainer and DPOTrainer, and MegaTrain on its own rows.

    python -m proofs.media_steps --json

TRL is an oracle that is not ours, and no dependency: run this in its own environment, which has
`trl` from PyPI beside MegaTrain's requirements. Tiny random models of two families with towers
train on rows with one to three pictures, in files and in data URLs, four rows a step, in fp32, all
weights or with a frozen tower; or on preferences, two answers about the pictures of a prompt,
compared by Dpo. TRL reads the rows by its own collator and updates by torch's AdamW; ours are
prepared, decoded and processed again for each step, and go through the engine. The loss of each
step must agree within 1e-5, and a run with the pictures of other rows must not. Ends with 1 if not.
"""

from __future__ import annotations

import base64
import io
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from proofs.side_by_side import main_of, quiet_arguments
from testkit.joint_media import media_config
from testkit.processors import picture, save_processor

FAMILIES = ("qwen2_5_vl", "gemma3")
STEPS, ROWS = 20, 4
_WORDS = ("what", "is", "two", "and", "three", "four", "six", "you", "are", "hello", "world")
RATE = 1e-3
EPSILON = {False: 1e-8, True: 1e-6}
"""AdamW's, without and with pairs. A pair's two answers cancel in many gradients, and AdamW makes a
whole step of what rounding leaves of them: with 1e-8 one step of Gemma 3 is 3.3e-5 apart, with its
rows in another order none more than 3.6e-7."""
TOLERANCE = 1e-5
CASES = {
    f"{family}, {media}": (family, media, False)
    for family in FAMILIES
    for media in ("all", "projector")
} | {f"{family}, preferences": (family, "all", True) for family in FAMILIES}


def main() -> None:
    main_of(
        __doc__,
        package="trl",
        kind="case",
        names=lambda: CASES,
        compare=compare,
        is_wrong=lambda result: not result["equal"],
        line=_line,
    )


def compare(name: str) -> dict[str, Any]:
    """Return how far the losses of both are apart."""
    family, media, are_pairs = CASES[name]
    rows = _made_rows(STEPS * ROWS)
    with tempfile.TemporaryDirectory(prefix="megatrain-media-") as path:
        folder = Path(path)
        processor = save_processor(folder / "processor", family)
        if are_pairs:
            rows = _as_pairs(rows)
            # TRL trains all that the template writes behind a prompt, ours up to the end of a turn.
            template = processor.chat_template.replace("{{ '\n' }}{% endfor %}", "{% endfor %}")
            processor.chat_template = processor.tokenizer.chat_template = template
        _save_model(folder / "model", family, processor)
        theirs = _theirs(folder, rows, processor, media)
        ours = _ours(folder, rows, processor, media)
        images = [row["images"] for row in rows]
        others = zip(rows, _swapped(images), strict=True)
        swapped = [{**row, "images": other} for row, other in others]
        other = _ours(folder, swapped, processor, media)
    worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    noticed = max(abs(a - b) for a, b in zip(other, theirs, strict=True))
    return {
        "case": name,
        "steps": len(ours),
        "worst_loss_difference": worst,
        "with_pictures_of_other_rows": noticed,
        "first_loss": theirs[0],
        "last_loss": theirs[-1],
        "equal": len(ours) == STEPS and worst <= TOLERANCE < noticed,
    }


def _made_rows(count: int) -> list[dict[str, Any]]:
    """Return rows as TRL has them, with pictures as bytes."""
    draw = random.Random(7)

    def words() -> str:
        return " ".join(draw.choices(_WORDS, k=draw.randint(1, 9)))

    rows = []
    for number in range(count):
        images = [
            picture(97 * number + n, draw.randint(8, 90), draw.randint(8, 90))
            for n in range(draw.randint(1, 3))
        ]
        talk: list[dict[str, Any]] = []
        left = len(images)
        for turn in range(num_turns := draw.randint(1, 3)):
            here = left if turn == num_turns - 1 else draw.randint(0, left)
            left -= here
            parts: list[dict[str, Any]] = [{"type": "image"}] * here
            parts.insert(draw.randint(0, here), {"type": "text", "text": words()})
            talk += [
                {"role": "user", "content": parts},
                {"role": "assistant", "content": [{"type": "text", "text": words()}]},
            ]
        rows.append({"messages": talk, "images": images})
    return rows


def _as_pairs(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of preferences: the last answer is chosen, and that of another row rejected."""
    last = [row["messages"][-1]["content"][0]["text"] for row in rows]
    pairs = []
    for row, chosen, rejected in zip(rows, last, last[1:] + last[:1], strict=True):
        answers = {"chosen": chosen, "rejected": f"{rejected} four"}
        pairs.append(
            {
                "prompt": row["messages"][:-1],
                **{name: [{"role": "assistant", "content": [{"type": "text", "text": text}]}]
                   for name, text in answers.items()},
                "images": row["images"],
            }
        )  # fmt: skip
    return pairs


def _save_model(folder: Path, family: str, processor: Any) -> None:
    """Save a random model of the family that reads what the processor gives."""
    from transformers import AutoModelForMultimodalLM

    fields = media_config(family).to_dict()
    tokenizer = processor.tokenizer
    size = {"vocab_size": 512, "max_position_embeddings": 1024}
    fields["text_config"] |= size | {"pad_token_id": tokenizer.pad_token_id}
    token = processor.image_token_ids[0]
    if family == "gemma3":
        fields |= {"image_token_index": token, "image_token_id": token}
    else:
        fields["vision_config"] |= {"patch_size": 4, "spatial_patch_size": 4}
        names = ("video_pad", "vision_start", "vision_end")
        ids = tokenizer.convert_tokens_to_ids([f"<|{name}|>" for name in names])
        fields |= {"image_token_id": token, "video_token_id": ids[0]}
        fields |= {"vision_start_token_id": ids[1], "vision_end_token_id": ids[2]}
    torch.manual_seed(0)
    config = type(media_config(family)).from_dict(fields)
    AutoModelForMultimodalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def _swapped(images: Sequence[Sequence[bytes]]) -> list[list[bytes]]:
    """Return as many pictures for each row, but of others: all moved by one place."""
    flat = [one for some in images for one in some]
    moved = iter(flat[1:] + flat[:1])
    return [[next(moved) for _ in some] for some in images]


def _theirs(
    folder: Path, rows: Sequence[Mapping[str, Any]], processor: Any, media: Any
) -> list[float]:
    """Return the loss of each step of TRL's trainer."""
    from datasets import Dataset, Features, disable_progress_bars
    from datasets import Image as ImageFeature
    from datasets import List as ListFeature
    from PIL import Image
    from transformers import AutoModelForMultimodalLM
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    disable_progress_bars()
    model = AutoModelForMultimodalLM.from_pretrained(folder / "model", dtype=torch.float32)
    if media == "projector":
        for name, param in model.named_parameters():
            param.requires_grad = not _is_tower(name)
    given = [
        {**row, "images": [Image.open(io.BytesIO(one)) for one in row["images"]]} for row in rows
    ]
    data = Dataset.from_list(given)
    data = data.cast(Features({**data.features, "images": ListFeature(ImageFeature())}))
    common: dict[str, Any] = {
        **quiet_arguments(folder / "theirs"),
        "train_sampling_strategy": "sequential",
        "adam_beta2": 0.95,
        "max_steps": STEPS,
        "per_device_train_batch_size": ROWS,
        "learning_rate": RATE,
        "adam_epsilon": EPSILON["chosen" in rows[0]],
        "lr_scheduler_type": "constant",
        "max_length": None,
        "remove_unused_columns": False,
    }
    given_to: dict[str, Any] = {
        "model": model,
        "train_dataset": data,
        "processing_class": processor,
    }
    if "chosen" in rows[0]:
        trainer = DPOTrainer(args=DPOConfig(**common), **given_to)
    else:
        of_rows = {"assistant_only_loss": True, "dataset_kwargs": {"skip_prepare_dataset": True}}
        trainer = SFTTrainer(args=SFTConfig(**common, **of_rows), **given_to)
    trainer.train()
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def _is_tower(name: str) -> bool:
    """Return whether a param is of the tower, and not of what joins it to the text."""
    return ("visual." in name and "merger" not in name) or "vision_tower" in name


def _ours(
    folder: Path, rows: Sequence[Mapping[str, Any]], processor: Any, media: Any
) -> list[float]:
    """Return the loss of each step of the engine, on rows that were prepared."""
    import megatrain as mt
    from megatrain.data.media.processing import MediaSettings
    from megatrain.data.media.store import MediaStore
    from megatrain.data.steps.answers import PairedAnswers
    from megatrain.data.steps.micro_batches import micro_batches
    from megatrain.data.tokens.prepare import prepare
    from megatrain.losses.loss import NEXT_TOKEN
    from megatrain.losses.preferences import Dpo
    from megatrain.ranks.ranks import ALONE
    from megatrain.run.evaluation.references import compute_references

    settings = MediaSettings(folder=folder / "processor")
    with tempfile.TemporaryDirectory(dir=folder) as path:
        prepared = prepare(
            _written(rows, Path(path)), processor.tokenizer, cache_dir=Path(path) / "cache",
            max_length=4096, max_bad=0.0, media=settings,
        )  # fmt: skip
        store = MediaStore([prepared], settings, processor.tokenizer)
        home = mt.load_model(folder / "model", dtype="fp32", media=media)
        epsilon = EPSILON["chosen" in rows[0]]
        optimizer = mt.AdamW(learning_rate=RATE, eps=epsilon, max_grad_norm=1.0)
        losses = []
        are_pairs, pad_id = prepared.preferences is not None, processor.tokenizer.pad_token_id
        loss = Dpo() if are_pairs else NEXT_TOKEN
        with mt.Engine(home.decoder, home.store, optimizer=optimizer, loss=loss) as engine:
            answers, each = None, 1
            if are_pairs:
                known = compute_references(
                    engine, prepared, ALONE, micro_batch_tokens=8192, pass_tokens=8192,
                    one_row=False, pad_id=pad_id, items=store.read,
                )  # fmt: skip
                answers, each = PairedAnswers(references=known), 2
            for step in range(STEPS):
                rows_of = range(step * ROWS, (step + 1) * ROWS)
                numbers = [np.arange(each * n, each * (n + 1)) for n in rows_of]
                batch = micro_batches(
                    numbers, prepared, micro_batch_tokens=8192, packing=False, flat=False,
                    pad_id=pad_id, items=store.read, beside=answers,
                )  # fmt: skip
                losses.append(engine.step(batch).loss)
    return losses


def _written(rows: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """Write the rows, with pictures in files and in data URLs by turns; return their file."""
    path = folder / "rows.jsonl"
    lines = []
    for number, row in enumerate(rows):
        names = []
        for n, data in enumerate(row["images"]):
            names.append(f"{number}-{n}.png")
            if (number + n) % 2:
                names[-1] = "data:image/png;base64," + base64.b64encode(data).decode()
            else:
                (folder / names[-1]).write_bytes(data)
        lines.append(json.dumps({**row, "images": names}))
    path.write_text("\n".join(lines))
    return path


def _line(result: dict[str, Any]) -> str:
    return (
        f"{result['case']:24} {result['steps']} steps, loss {result['first_loss']:.3f} to "
        f"{result['last_loss']:.3f}, within {result['worst_loss_difference']:.1e}; with other "
        f"pictures {result['with_pictures_of_other_rows']:.1e}"
    )


if __name__ == "__main__":
    main()
