"""One run on a Ray cluster: Ray places the processes, JAX connects them.

    RAY_ADDRESS=head:6379 python examples/cluster/ray_cluster.py

Ray notices a process that has died; this driver then ends the others, and starts all of them anew,
where there is room: --resume auto goes on from the last checkpoint.
"""

import argparse
import os
import socket
import sys

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

# The three lines to change, here or by flags of the same names:
PROCESSES, GPUS = 2, 8  # one process for each machine, with so many GPUs
RUN_DIR = "/shared/runs/digits"  # on a disk that all machines see
TRAIN = "digits --towers 16"  # what to train


class Process:
    """One process of the run: an actor has a Python of its own, which has not started JAX yet."""

    def place(self):
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return ray.util.get_node_ip_address(), port, os.getpid()

    def train(self, words):
        import jax
        from multitower.cli.main import main

        code = main(words)
        jax.distributed.shutdown()  # all together, before the driver kills one after the other
        return code


def start(args, group):
    """The actors, one in each bundle of the group, and for each the result to come."""
    process = ray.remote(num_cpus=1, num_gpus=args.gpus, max_restarts=0)(Process)
    bundles = [PlacementGroupSchedulingStrategy(group, i) for i in range(args.processes)]
    actors = [process.options(scheduling_strategy=bundle).remote() for bundle in bundles]
    places = ray.get([actor.place.remote() for actor in actors])
    for number, (host, _, pid) in enumerate(places):
        print(f"process {number} is {pid} on {host}", flush=True)
    words = ["train", *args.train.split(), "--run-dir", args.run_dir, "--resume", "auto"]
    words += ["--coordinator", "{}:{}".format(*places[0]), "--num-processes", str(args.processes)]
    return actors, [
        actor.train.remote([*words, "--process-id", str(number)])
        for number, actor in enumerate(actors)
    ]


def run_once(args):
    """What went wrong with one of the processes; None when all have finished."""
    bundle = {"CPU": 1, "GPU": args.gpus} if args.gpus else {"CPU": 1}
    group = placement_group([bundle] * args.processes, strategy=args.strategy)
    actors, who = [], "a process"
    try:
        ray.get(group.ready(), timeout=args.wait_s)
        actors, results = start(args, group)
        names = {result: f"process {number}" for number, result in enumerate(results)}
        while results:
            (done,), results = ray.wait(results)  # one is enough: the others wait for it in vain
            who = names[done]
            code = ray.get(done)
            if code != 0:
                return f"{who} ended with exit code {code}"
    except ray.exceptions.GetTimeoutError:
        return f"no room for {args.processes} x {bundle} ({args.strategy}) in {args.wait_s} s"
    except ray.exceptions.RayError as error:
        return f"{who} is lost: {str(error).splitlines()[0]}"
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--gpus", type=int, default=GPUS, help="of each process")
    parser.add_argument("--run-dir", default=RUN_DIR)
    parser.add_argument("--train", default=TRAIN, help="what follows `multitower train`")
    parser.add_argument("--strategy", default="STRICT_SPREAD", help="PACK: where there is room")
    parser.add_argument("--restarts", type=int, default=3, help="at most so many")
    parser.add_argument("--wait-s", type=float, default=600, help="for room in the cluster")
    args = parser.parse_args()
    # Ray reports nothing of its use; and where a process is to have no GPUs, JAX must see none.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    environment = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}
    ray.init(runtime_env={"env_vars": environment})
    for restart in range(args.restarts + 1):
        if restart:
            print(f"restart {restart} of {args.restarts}", flush=True)
        problem = run_once(args)
        if problem is None:
            return 0
        print(problem, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
