"""Kubernetes: an indexed Job with one pod for each node, and a headless Service under whose name the pods meet."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import final

from ..core.errors import InputError
from .launcher import Launcher, LaunchOptions, host_command, started_by

PORT = 29500
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}")
_INDEX = "$(JOB_COMPLETION_INDEX)"


@final
class KubernetesLauncher(Launcher):
    """Pods of a Job."""

    name = "kubernetes"
    how = "drumline launch --launcher kubernetes --image IMAGE --emit job.yaml ..., then kubectl apply -f job.yaml"

    @classmethod
    def detect(cls, environment: Mapping[str, str]) -> bool:
        """By the name that the pod's command leaves."""
        return started_by(cls.name, environment)

    def script(self, command: Sequence[str], options: LaunchOptions) -> str:
        """The manifest. The pods run the command without a shell."""
        import ruamel.yaml

        name, image = _checked("--name", options.name, _NAME), _checked("--image", options.image, _IMAGE)
        meet = options.rendezvous or f"tcp://{name}-0.{name}:{PORT}"
        words = [_literal(w) for w in host_command(command, options, self.name, 0, meet, python="python3")]
        words[words.index("--node") + 1] = _INDEX
        container = {
            "name": "ranks",
            "image": image,
            "command": words,
            "ports": [{"containerPort": PORT}],
        }
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {"clusterIP": "None", "selector": {"job-name": name}, "publishNotReadyAddresses": True},
        }
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name},
            "spec": {
                "completions": options.nodes,
                "parallelism": options.nodes,
                "completionMode": "Indexed",
                "backoffLimit": 0,
                "template": {
                    "spec": {
                        "subdomain": name,
                        "restartPolicy": "Never",
                        "terminationGracePeriodSeconds": 120,
                        "containers": [container],
                    }
                },
            },
        }
        yaml = ruamel.yaml.YAML()
        yaml.default_flow_style = False
        text = io.StringIO()
        yaml.dump_all([service, job], text)
        return text.getvalue()


def _literal(word: str) -> str:
    """A word in which Kubernetes replaces nothing."""
    return word.replace("$(", "$$(")


def _checked(option: str, value: str, rule: re.Pattern[str]) -> str:
    if not rule.fullmatch(value):
        raise InputError(f"{option} {value[:80]!r}", rule=f"needed, and of the form {rule.pattern}")
    return value
