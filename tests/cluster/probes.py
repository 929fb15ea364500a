"""For ``handle.__ray_call__``: what tests ask of, and do to, actors that must not have torch loaded by it."""

import os
import sys
from typing import Any

import ray


def node_of(_actor: Any) -> str:
    """The node on which an actor runs."""
    return str(ray.get_runtime_context().get_node_id())


def pid_of(_actor: Any) -> int:
    """An actor's process."""
    return os.getpid()


def has_torch(_actor: Any) -> bool:
    """Whether an actor's process has loaded torch."""
    return "torch" in sys.modules


def break_watch(controller: Any) -> None:
    """From now on, every look at the cluster fails, and is counted."""
    controller.broken_looks = 0

    def look() -> None:
        controller.broken_looks += 1
        raise ValueError("the cluster is out of sight")

    controller._reconcile = look


def broken_looks(controller: Any) -> int:
    """How often the look has failed."""
    return int(controller.broken_looks)


def mend_watch(controller: Any) -> None:
    """Undo `break_watch`."""
    del controller._reconcile
