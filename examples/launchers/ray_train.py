"""Ranks as actors of Ray Train, one for each GPU, and its storage URL as the place of the run:

    python examples/launchers/ray_train.py run.yaml --storage s3://bucket/runs --name mine --ranks 8
    ray job submit -- python examples/launchers/ray_train.py run.yaml ...      # all paths absolute

An actor that dies ends all ranks, and Ray starts them again from the newest checkpoint, which is in
the storage. After the job was stopped or its machines were taken, the same command continues. Ranks
on several nodes also need MEGATRAIN_CACHE on a file system that all of them see.
"""

import argparse
import os
import socket
import subprocess
import sys

import ray
from ray import train
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer


def rank(settings: dict[str, str]) -> None:
    """Be one rank, in a process of its own that gets SIGTERM if this actor is gone."""
    with socket.socket() as free:
        free.bind(("", 0))
        place = {"address": ray.util.get_node_ip_address(), "port": free.getsockname()[1]}
    head, context = broadcast_from_rank_zero(place), train.get_context()
    variables = {
        "RANK": context.get_world_rank(),
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "MASTER_ADDR": head["address"],
        "MASTER_PORT": head["port"],
        "MEGATRAIN_LAUNCHER": os.getpid(),
    }
    command = [sys.executable, "-m", "megatrain", "train", settings["config"], "--resume"]
    subprocess.run(
        [*command, f"save.dir={settings['place']}"],
        env=os.environ | {name: str(value) for name, value in variables.items()},
        check=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on a Ray cluster.")
    parser.add_argument("config", help="YAML file, which every node can read")
    parser.add_argument("--storage", required=True, help="URL that all nodes reach")
    parser.add_argument("--name", required=True, help="of the run, below the storage")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--failures", type=int, default=8, help="how often Ray starts all again")
    asked = parser.parse_args()
    ray.init()
    DataParallelTrainer(
        rank,
        train_loop_config={
            "config": os.path.abspath(asked.config),
            "place": f"{asked.storage.rstrip('/')}/{asked.name}/run",
        },
        scaling_config=train.ScalingConfig(
            num_workers=asked.ranks, use_gpu="GPU" in ray.cluster_resources()
        ),
        run_config=train.RunConfig(
            name=asked.name,
            storage_path=asked.storage,
            failure_config=train.FailureConfig(max_failures=asked.failures),
        ),
    ).fit()


if __name__ == "__main__":
    main()
