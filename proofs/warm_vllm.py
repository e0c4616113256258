"""Servers of vLLM that begin at once: forked from a process that has imported it.

    VLLM_PYTHON proofs/warm_vllm.py      reads lines of JSON: the arguments of a server; writes pids

Runs in vLLM's environment, and needs nothing of ours. vLLM starts its engine and worker anew and
imports itself in each of three processes, which takes most of a minute of processor time: too long
to be killed 50 times. Here they are forks as well; what they do is the same.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from importlib import import_module

IMPORTED = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.attention.backends.cpu_attn",
    "transformers.models.qwen3.modeling_qwen3",
    "megatrain_weights",
)


def main() -> None:
    """Fork a server for each line, in a group of its own."""
    fork = multiprocessing.get_context("fork")
    vars(multiprocessing)["get_context"] = lambda method=None: fork
    for name in IMPORTED:
        try:
            import_module(name)
        except ImportError as error:
            print(error, file=sys.stderr)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.dup2(2, 1)
            sys.argv = ["api_server", *json.loads(line)]
            import_module(IMPORTED[0]).main()
            os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
