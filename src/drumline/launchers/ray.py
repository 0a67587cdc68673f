"""Ray: one task on each node, which starts that node's ranks. Ray's own pickles carry only words and numbers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, final

from ..comm.parent_process import die_with_parent
from ..core.errors import InputError
from .launcher import Launcher, LaunchOptions, host_command, started_by


@final
class RayLauncher(Launcher):
    """Tasks of a Ray cluster."""

    name = "ray"
    how = "drumline launch --launcher ray --ranks N train JOB, where `ray status` finds a cluster"

    @classmethod
    def detect(cls, environment: Mapping[str, str]) -> bool:
        """By the name that `start` leaves."""
        return started_by(cls.name, environment)

    def start(self, command: Sequence[str], options: LaunchOptions) -> int:
        """Reserve the cores or GPUs, start the ranks, and wait for them; the first exit code that is not 0."""
        try:
            import ray
            from ray.util.placement_group import placement_group, remove_placement_group
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Placement
        except ModuleNotFoundError:
            raise InputError("ray is not installed", fix="pip install ray") from None
        began = not ray.is_initialized()
        if began:
            ray.init(log_to_driver=True, configure_logging=False)
        kind = "GPU" if ray.cluster_resources().get("GPU", 0) >= options.ranks else "CPU"
        bundles = [{"CPU": 1.0, kind: float(options.per_node)}] * options.nodes
        group = placement_group(bundles, strategy="STRICT_SPREAD" if options.nodes > 1 else "PACK")
        try:
            if not group.wait(60):
                raise InputError(
                    f"ray has no room for {options.nodes} x {options.per_node} {kind}s",
                    rule=f"it has {ray.cluster_resources().get(kind, 0):g} on {len(ray.nodes())} nodes",
                )

            def on(node: int, function: Any) -> Any:
                place = Placement(group, placement_group_bundle_index=node)
                return ray.remote(function).options(num_cpus=1, scheduling_strategy=place, max_retries=0)

            meet = options.rendezvous or ray.get(on(0, _address).remote())
            lines = [
                host_command(command, options, self.name, node, meet, python=sys.executable)
                for node in range(options.nodes)
            ]
            tasks = [
                on(node, _run).remote(words, os.getcwd(), dict(os.environ), options.nodes == 1)
                for node, words in enumerate(lines)
            ]
            results = ray.get(tasks)
        finally:
            remove_placement_group(group)
            if began:
                ray.shutdown()
        print(results[0][1], end="", flush=True)
        return next((code for code, _ in results if code), 0)


def _address() -> str:
    """A free port of the node where rank 0 will be."""
    import ray

    with socket.create_server(("", 0)) as free:
        return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"


def _run(words: list[str], folder: str, environment: dict[str, str], same_host: bool) -> tuple[int, str]:
    """Run a node's ranks; the exit code, and what the first rank printed."""
    variables = {**os.environ, **environment} if same_host else {**environment, **os.environ}
    done = subprocess.run(
        words,
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
        preexec_fn=die_with_parent,  # a killed worker of Ray leaves no ranks
    )
    return done.returncode, done.stdout
