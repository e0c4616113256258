"""Protocols that are wrong in one thing each, made from the log of the right one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatrain.disk.checkpoint.manifest import MANIFEST_NAME
from proofs.crash.recorded import Op

_STEP = re.compile(r"step-\d{8}-[0-9a-f]{8}")
_TEMPORARY = re.compile(rf"\.({re.escape(MANIFEST_NAME)})\.[0-9a-f]+\.tmp")
Log = Sequence[Op]


def _without_folder_fsync(log: Log) -> list[Op]:
    return [op for op in log if op.kind != "sync_names"]


def _without_file_fsync(log: Log) -> list[Op]:
    return [op for op in log if op.kind != "fsync"]


def _other_ranks_leave_files(log: Log) -> list[Op]:
    return [op for op in log if not (op.kind == "fsync" and op.rank)]


def _other_ranks_leave_folders(log: Log) -> list[Op]:
    return [op for op in log if not (op.kind == "sync_names" and op.rank)]


def _manifest_before_the_others(log: Log) -> list[Op]:
    """The first rank does not wait until the others have made their files durable."""
    result: list[Op] = []
    for ops in _saves(log):
        late = [op for op in ops if op.rank and op.kind in ("fsync", "sync_names")]
        end = next((n for n, op in enumerate(ops) if _is_naming(op)), len(ops) - 2) + 2
        result += [op for op in ops[:end] if op not in late] + late + ops[end:]
    return result


def _direct_write(log: Log) -> list[Op]:
    """No fsync, and the manifest is written under its own name."""
    kept = [op for op in log if op.kind not in ("fsync", "sync_names")]
    kept = [op for op in kept if not (op.kind == "rename" and _TEMPORARY.search(op.path))]
    return [replace(op, path=_TEMPORARY.sub(r"\1", op.path)) for op in kept]


def _manifest_first(log: Log) -> list[Op]:
    result: list[Op] = []
    for ops in _saves(log):
        begin = next((n for n, op in enumerate(ops) if _TEMPORARY.search(op.path)), len(ops))
        end = next((n for n, op in enumerate(ops) if _is_naming(op)), len(ops) - 2) + 2
        files = next((n for n, op in enumerate(ops) if "/model/" in op.path), begin)
        result += ops[:files] + ops[begin:end] + ops[files:begin] + ops[end:]
    return result


def _in_place(log: Log) -> list[Op]:
    """Each save goes over the one before, in the same folder."""
    name = next(found[0] for op in log if (found := _STEP.search(op.path)))
    there: dict[str, int] = {}
    same: dict[int, int] = {}
    result: list[Op] = []
    for op in log:
        op = replace(op, path=_STEP.sub(name, op.path), target=_STEP.sub(name, op.target))
        is_ours = name in op.path
        if op.kind in ("unlink", "rmdir") and is_ours:
            continue
        if op.kind == "mkdir" and op in result:
            continue
        if op.kind == "create":
            if is_ours and op.path in there:
                same[op.file] = there[op.path]
                result.append(Op(kind="resize", file=there[op.path], size=0))
                continue
            there[op.path] = op.file
        result.append(replace(op, file=same.get(op.file, op.file)))
    return result


def _manifest_deleted_last(log: Log) -> list[Op]:
    result: list[Op] = []
    late: list[Op] = []
    for op in log:
        if op.kind == "unlink" and op.path.endswith(MANIFEST_NAME):
            late = [op]
        elif op.kind == "rmdir" and late and op.path in late[0].path and "/state" not in op.path:
            if not op.path.endswith("/model"):
                result += late
                late = []
            result.append(op)
        else:
            result.append(op)
    return result


def _saves(log: Log) -> list[list[Op]]:
    """Cut a log behind each acknowledgment."""
    saves: list[list[Op]] = [[]]
    for op in log:
        saves[-1].append(op)
        if op.kind == "ack":
            saves.append([])
    return saves


def _is_naming(op: Op) -> bool:
    return op.kind == "rename" and op.target.endswith(MANIFEST_NAME)


PROTOCOLS: dict[str, Callable[[Log], list[Op]]] = {
    "no fsync of folders": _without_folder_fsync,
    "no fsync of files": _without_file_fsync,
    "direct write": _direct_write,
    "manifest first": _manifest_first,
    "saved in place": _in_place,
    "manifest deleted last": _manifest_deleted_last,
}
"""By what is wrong."""
RANK_PROTOCOLS: dict[str, Callable[[Log], list[Op]]] = {
    "no fsync of files by other ranks": _other_ranks_leave_files,
    "no fsync of folders by other ranks": _other_ranks_leave_folders,
    "manifest before the others": _manifest_before_the_others,
}
"""Those of ranks that save together."""
