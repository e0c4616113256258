"""A teacher's scores: one streamed pass over all documents before the student is in memory.

The teacher is a frozen model in host memory, 2 bytes for each param in bf16, which visits the
device block by block. Of each trained token its likeliest tokens and their log-probabilities go to
a file (data/steps/teacher.py); then its memory is given back, and the student is loaded. So a run
needs the memory of the larger of the two, and no step waits for the teacher.

The file is in the cache beside the prepared data, under a key of the teacher, the documents and
whatever changes the bits. A second run finds it; a resumed one finds it or computes it again, of
the same teacher: the run folder has its mark.

Laws (tests/run/evaluation/test_teaching.py)
    1. Scores are those of the resident teacher on the same rows.
    2. A second run and a resumed one compute nothing; another teacher, other documents or another
       temperature do. A damaged file is not used.
    3. A teacher of another vocabulary is refused, with a token that differs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from megatrain import files
from megatrain.batch import MicroBatch
from megatrain.cache import cache_full, writable_cache_folder
from megatrain.config import Config
from megatrain.data.steps.micro_batches import laid_out
from megatrain.data.steps.teacher import MARK_BYTES, Scores, TeacherScores, first_targets
from megatrain.data.tokens.documents import Documents
from megatrain.data.tokens.prepared import digest_of
from megatrain.data.training_rows import TrainingRows, one_of
from megatrain.devices.device import Device
from megatrain.disk.hf.exported import require_as_written
from megatrain.disk.hf.folder import is_adapter_folder
from megatrain.disk.hf.model import ModelFolder, read_model_folder
from megatrain.disk.hf.source_mark import tensor_mark
from megatrain.engine.engine import Engine
from megatrain.errors import CheckpointMismatch, ConfigError, DiskError, DiskFull
from megatrain.hub import find_model
from megatrain.losses.head import IGNORED
from megatrain.losses.leaves import TokenOutputs, TokenOutputSpec
from megatrain.memory.kinds import TensorKind
from megatrain.models.decoder import Decoder
from megatrain.models.isolation import packs_flat
from megatrain.planning.from_config import num_taught
from megatrain.progress import token_progress
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.run.evaluation.references import CHANGE_BITS, document_groups, documents_digest
from megatrain.run.opening.model import load_tokenizer
from megatrain.step.settings import StepSettings
from megatrain.text import size

MARK_FILE = "teacher.json"
"""In a run folder: the mark of the teacher that the run began with."""
_PIECE_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """A teacher whose config and tokenizer were read; its weights were not."""

    model: ModelFolder
    mark: str
    """Mark of its tensors."""


def open_teacher(
    config: Config, tokenizer: Any, decoder: Decoder, ranks: Ranks = ALONE
) -> Teacher | None:
    """Return the teacher of a run; None: it has none. `tokenizer` and `decoder` are the student's.

    Raises ConfigError if the two do not share their vocabulary, and what `load_model` does.
    """
    loss, dtype, attn = config.loss, config.model.dtype, config.model.attn
    name = loss.teacher
    if name is None:
        return None
    folder = ranks.once_per_host(lambda: find_model(name, loss.teacher_revision)).folder
    if is_adapter_folder(folder):
        raise ConfigError(
            f"loss.teacher: {name} has adapters alone. Merge them with `megatrain export --merge`, "
            "and give the folder of that."
        )
    ranks.on_each_host(lambda: require_as_written(folder, shown=ranks.leads))
    model = read_model_folder(folder, dtype=dtype, attn=attn)
    _require_same_vocabulary(name, tokenizer, decoder, model)
    mark = ranks.long_work(lambda: tensor_mark(folder))
    ranks.require_same(lambda: {f"loss.teacher ({name})": mark})
    return Teacher(model=model, mark=mark)


def _require_same_vocabulary(
    name: str, tokenizer: Any, decoder: Decoder, teacher: ModelFolder
) -> None:
    """Raise ConfigError unless each number means the same token to both models."""
    advice = "Probabilities are compared token by token: give a teacher of the same vocabulary."
    of_teacher = load_tokenizer(teacher.source).get_vocab()
    own = tokenizer.get_vocab()
    for token in sorted({*own, *of_teacher}, key=lambda one: own.get(one, len(own))):
        if own.get(token) != of_teacher.get(token):
            raise ConfigError(
                f"loss.teacher: {name} has another vocabulary: the token {token!r:.60} is "
                f"{own.get(token, 'none')} in the model and {of_teacher.get(token, 'none')} in the "
                f"teacher. {advice}"
            )
    sizes = [_num_logits(one) for one in (decoder, teacher.decoder)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"loss.teacher: {name} has logits for {sizes[1]:,} tokens and the model for "
            f"{sizes[0]:,}, padding counted. {advice}"
        )


def _num_logits(decoder: Decoder) -> int:
    return int(decoder.model.get_submodule(decoder.head_path).weight.shape[0])


def keep_mark(run: Path, teacher: Teacher, *, resumes: bool) -> None:
    """Note the teacher's mark in the run folder. Raises CheckpointMismatch if there is another."""
    path, known = run / MARK_FILE, json.dumps({"mark": teacher.mark})
    with suppress(OSError):
        if resumes and path.read_text() != known:
            raise CheckpointMismatch(
                f"loss.teacher: {teacher.model.source} has changed since the run began. Restore "
                "it, or start a new run with another save.dir."
            )
    files.write_file(path, known.encode())


def teach(
    config: Config,
    teacher: Teacher,
    rows: TrainingRows,
    settings: StepSettings,
    device: Device,
    ranks: Ranks,
    pad_id: int,
) -> TeacherScores:
    """Return what the teacher says of all rows, from the cache, or compute and keep it there.

    All ranks call it. `settings` are the student's. Raises DoesNotFit, DiskFull or DiskError.
    """
    documents = one_of((rows.train, *rows.held))
    known, decoder = documents_digest(documents), teacher.model.decoder
    settings = settings.forward_alone(config.data.max_length)
    one_row = config.packs or packs_flat(decoder, compiles=settings.compile)
    wanted = TokenOutputSpec(
        top_k=min(num_taught(config), _num_logits(decoder)),
        logsumexp=True,
        temperature=config.loss.temperature or 1.0,
    )
    facts = (
        torch.__version__,
        device.name.partition(":")[0],
        (config.model.dtype, config.model.attn, one_row, config.data.max_length),
        {name: getattr(settings, name) for name in CHANGE_BITS},
        wanted,
    )
    key = digest_of([known, teacher.mark, repr(facts)])
    scores = TeacherScores(
        path=writable_cache_folder() / f"teacher-{key}.bin",
        top_k=wanted.top_k,
        starts=first_targets(documents),
    )
    is_kept = is_consistent(scores, key)
    if not ranks.any(not is_kept):
        return scores
    load = teacher.model.load
    home = ranks.long_work(
        lambda: load((TensorKind.HI,), owner=ranks.owner, placement=device.placement)
    )
    try:
        with (
            written(scores, key) as fd,
            Engine(decoder, home.store, settings=settings, device=device, ranks=ranks) as engine,
        ):
            write_scores(
                engine,
                documents,
                scores,
                fd,
                wanted,
                micro_batch_tokens=settings.micro_batch_tokens,
                pass_tokens=config.step_tokens or config.data.max_length,
                one_row=one_row,
                pad_id=pad_id,
                shown=ranks.leads,
            )
    finally:
        home.store.close()
    return scores


def write_scores(
    engine: Engine,
    documents: Documents,
    scores: TeacherScores,
    fd: int,
    wanted: TokenOutputSpec,
    *,
    micro_batch_tokens: int,
    pass_tokens: int,
    one_row: bool,
    pad_id: int,
    shown: bool = True,
) -> None:
    """Write the scores of each document by the engine's model; `pass_tokens` go at a time."""
    groups = list(document_groups(documents, micro_batch_tokens, one_row=one_row))
    stride = max(1, pass_tokens // micro_batch_tokens)
    total = int(documents.lengths.sum())
    with token_progress("scores of the teacher", total, shown=shown) as advance:
        for first in range(0, len(groups), stride):
            now = groups[first : first + stride]
            laid = [laid_out(docs, documents, one_row=one_row, pad_id=pad_id) for docs in now]
            batch = [replace(micro, loss_tensors={}) for micro in laid]
            for group, micro, leaves in zip(
                now, batch, engine.token_outputs(batch, wanted), strict=True
            ):
                counts = scores.starts[group + 1] - scores.starts[group]
                parts = np.split(_scores(micro, leaves), np.cumsum(counts)[:-1])
                for number, part in zip(group, parts, strict=True):
                    place = scores.offset(int(scores.starts[number]))
                    with files.explained("write", scores.path):
                        files.write_at(fd, memoryview(part.tobytes()), place)
            advance(sum(int(documents.lengths[group].sum()) for group in now))


def _scores(micro: MicroBatch, leaves: TokenOutputs) -> Scores:
    """Return the scores of a micro-batch's targets, in order."""
    assert leaves.logits is not None
    assert leaves.tokens is not None
    assert leaves.logsumexp is not None
    has_target = micro.loss_inputs().targets != IGNORED
    logprobs = (leaves.logits - leaves.logsumexp[..., None]).contiguous()
    both = torch.cat([leaves.tokens.int(), logprobs.view(torch.int32)], -1)
    found: Scores = both[has_target].numpy().astype("<i4")
    return found


@contextmanager
def written(scores: TeacherScores, key: str) -> Iterator[int]:
    """Yield a file to write scores to; it appears under its name when all were written."""
    path, num_bytes = scores.path, scores.offset(int(scores.starts[-1]))
    temporary = files.temporary_name(path)
    files.clear_remains(path.parent)
    file = files.open_new(temporary)
    try:
        try:
            with files.explained("write", path):
                files.reserve(file.fileno(), num_bytes)
            yield file.fileno()
            with files.explained("write", path), temporary.open("rb") as found:
                files.write_at(file.fileno(), memoryview(_mark(found.fileno(), key)), 0)
        finally:
            file.close()
        files.rename(temporary, path)
    except BaseException as error:
        with suppress(DiskError):  # the first failure is the one to report
            files.remove(temporary)
        if isinstance(error, DiskFull):
            raise cache_full(
                f"{path.parent} has no room for the scores of the teacher, {size(num_bytes)}",
                "loss.top_k to fewer tokens",
            ) from error
        raise


def is_consistent(scores: TeacherScores, key: str) -> bool:
    """Return whether the file is there, with the bytes that were written."""
    try:
        with scores.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            mark = file.read(MARK_BYTES)
            expected = scores.offset(int(scores.starts[-1]))
            return size == expected and mark == _mark(file.fileno(), key)
    except OSError:
        return False


def _mark(fd: int, key: str) -> bytes:
    """Return the mark of a file's bytes behind its mark."""
    digest, place = xxhash.xxh3_128(), MARK_BYTES
    while piece := os.pread(fd, _PIECE_BYTES, place):
        digest.update(piece)
        place += len(piece)
    return digest_of([key, digest.hexdigest()]).encode()
