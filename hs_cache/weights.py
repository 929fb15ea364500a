"""Telling a service that a model's weights have changed."""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from hs_cache.config import check_service
from hs_cache.errors import InvalidInputError, ServiceError, ServiceNotRunningError
from hs_cache.messages import Freed, ModelRevision, Retired, RevisionChange, RevisionTable
from hs_cache.router import HIDDEN_STATES, NAMESPACE, find_actor, find_controller, is_running, nodes_of, translated

_TIMEOUT_S = 15.0
"""How long the controller may take, which may be restarting."""

_TABLE = "{}/revisions"
"""Where a service's current revisions are kept, in Ray's key-value store."""

_NODE_TIMEOUT_S = 5.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class RevisionBump:
    """What became of `bump_revision`.

    Attributes:
        model: the model.
        revision: its current revision now.
        previous: the one before, ``""`` if it had none.
        changed: False where it was current already, and nothing has happened.
        freed: by node, as hex ids, what rows of all other revisions have gone.
        unreached: nodes that did not answer. Those that still run learn it with the next batch that they publish,
            within a second or two.
    """

    model: str
    revision: str
    previous: str
    changed: bool
    freed: dict[str, Freed]
    unreached: tuple[str, ...]

    @property
    def chunks(self) -> int:
        """Chunks dropped on all nodes."""
        return sum(freed.chunks for freed in self.freed.values())

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        return sum(freed.nbytes for freed in self.freed.values())


def bump_revision(model: str, revision: str | None = None, *, service: str = "default") -> RevisionBump:
    """Say that a model's weights have changed, or are about to. Blocks for the controller, and all nodes at once.

    From now on the revision named is the current one of that model: clients that connect without a ``model_revision``
    get it. Rows of all other revisions of the model, whatever their LoRA, salt or shard, are dropped on every node, and
    stores of clients that were connected before fail, also those under way. Rows that somebody holds stay valid.

    Args:
        model: as it is named at `connect`.
        revision: a name for the new weights: the same name is the same weights, whenever they come back, and naming
            what is current changes nothing. None for ``r<number>-<random>``, which nobody has used before.
        service: the service's name.

    Returns:
        What was freed where, and which nodes could not be reached.

    Raises:
        InvalidInputError: `model` is no string, or `revision` neither None nor a string with something in it.
        ServiceNotRunningError: no service of that name runs.
        ServiceError: its controller doesn't answer. It can be called again then, with a name.
    """
    check_service(service)
    if not isinstance(model, str):
        raise InvalidInputError(f"model: got {type(model).__name__}, expected str")
    if revision is not None and (not isinstance(revision, str) or not revision):
        raise InvalidInputError(f"revision: got {revision!r}, expected None or a name that is not empty")
    if not is_running(service):
        raise ServiceNotRunningError(f"no service named {service!r} runs in this Ray cluster")
    change = _changed(service, model, revision)
    table = (change.now,)
    retired: dict[str, tuple[Retired, ...]]
    retired, unreached = _of_all_nodes(service, "take_revisions", table)
    freed = {node_id: _freed(of_node, table) for node_id, of_node in retired.items()} if change.changed else {}
    return RevisionBump(model, change.now.name, change.before.name, change.changed, freed, unreached)


def _freed(retired: Sequence[Retired], table: RevisionTable) -> Freed:
    """What the change to that revision freed; nothing where the node knows of a later one already."""
    return next((each.freed for each in retired if each.revision in table), Freed())


def _changed(service: str, model: str, revision: str | None) -> RevisionChange:
    """What the controller has made of it, as soon as there is one that answers."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            asked = find_controller(service).change_revision.remote(model, revision)
            change: RevisionChange = ray.get(asked, timeout=max(deadline - time.monotonic(), _POLL_S))
            return change
        except Exception as error:
            cause = translated(error, "asking the controller")
            if not isinstance(cause, ServiceError) or time.monotonic() > deadline:
                raise cause from error
        time.sleep(_POLL_S)


def load_revisions(service: str) -> RevisionTable:
    """The current revisions of a service's models, as they were saved last. Blocks for one call to Ray's control store.

    Raises:
        ServiceError: it can't be reached.
    """
    try:
        saved = _internal_kv_get(_TABLE.format(service), namespace=NAMESPACE)
    except Exception as error:
        raise translated(error, "reading the current revisions") from error
    return tuple(ModelRevision(*each) for each in json.loads(saved)) if saved else ()


def save_revisions(service: str, table: RevisionTable) -> None:
    """Keep the current revisions for as long as the cluster exists, also when the service is stopped: clients from
    before may still be there when it runs again. Blocks as `load_revisions` does, and raises as it does."""
    saved = json.dumps([(each.model, each.number, each.name) for each in table])
    try:
        _internal_kv_put(_TABLE.format(service), saved, namespace=NAMESPACE)
    except Exception as error:
        raise translated(error, "keeping the current revisions") from error


def _of_all_nodes(service: str, method: str, *args: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the hidden-state actors answer, by node, and the nodes that don't; all are asked at once."""
    nodes = nodes_of(service)
    sent: dict[Any, str] = {}
    for node_id in nodes:
        with suppress(ServiceError):  # it has ended since it was listed
            sent[getattr(find_actor(service, HIDDEN_STATES, node_id), method).remote(*args)] = node_id
    ready, late = ray.wait(list(sent), num_returns=len(sent), timeout=_NODE_TIMEOUT_S) if sent else ([], [])
    for ref in late:  # if it becomes an error, Ray would print it as one that nobody has seen
        ref.future().add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    answers: dict[str, Any] = {}
    for ref in ready:
        try:
            answers[sent[ref]] = ray.get(ref)
        except Exception as error:
            cause = translated(error, method)
            if not isinstance(cause, ServiceError):
                raise cause from error
    return answers, tuple(node_id for node_id in nodes if node_id not in answers)
