"""Which revision of each model's weights is the current one, and what becomes of the rows of all others.

A model has no current revision until somebody says that its weights have changed. From then on only rows of the current
one are taken, and those of any other are dropped on every node. The table of current revisions is small and always
travels whole: with every batch that a node publishes, with every reply to one, and to every client that attaches.
Tables that differ are merged, per model by the higher number, so whoever comes late learns it from whoever is there.
"""

import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from hs_cache.errors import StaleRevisionError
from hs_cache.messages import Freed, KnownRevisions, ModelRevision, Retired, RevisionChange, RevisionTable
from hs_cache.store import HiddenStateStore

_NUMBERED = re.compile(r"r([1-9][0-9]{0,8})")

_PATIENCE_S = 5.0
_PRUNE_AT = 1024
"""Key spaces a node remembers before it looks which of them have no chunks any more."""


class Revisions:
    """Model → its current revision. Not thread-safe."""

    def __init__(self, table: RevisionTable = ()) -> None:
        self._current = {revision.model: revision for revision in table}

    def get(self, model: str) -> ModelRevision:
        """A model's current revision; number 0 and an empty name as long as its weights have not changed."""
        return self._current.get(model) or ModelRevision(model, 0, "")

    def table(self) -> RevisionTable:
        """All current revisions, by model."""
        return tuple(self._current[model] for model in sorted(self._current))

    def merge(self, table: RevisionTable) -> list[RevisionChange]:
        """Take in what somebody else knows, as far as it has a number; returns what that changes here.

        Of two revisions of one number, which only two controllers can have given, the same one wins everywhere.
        """
        changes = []
        for now in table:
            before = self.get(now.model)
            if now.number and (now.number, now.name) > (before.number, before.name):
                self._current[now.model] = now
                changes.append(RevisionChange(before, now, changed=True))
        return changes

    def change(self, model: str, name: str | None, in_use: Iterable[str] = ()) -> RevisionChange:
        """Make a revision the current one, unless it is already.

        Args:
            model: whose weights have changed.
            name: not empty; None for ``r<number>``, with a number that no earlier name had.
            in_use: names of revisions of this model that nodes have rows of.
        """
        before = self.get(model)
        if before.number and name == before.name:
            return RevisionChange(before, before, changed=False)
        # Beyond every number in a name given by hand: a client with the weights of that name may still be there.
        number = 1 + max([before.number, *map(_number_in, in_use)])
        if name is not None:
            number = max(before.number + 1, _number_in(name))
        now = ModelRevision(model, number, f"r{number}" if name is None else name)
        self._current[model] = now
        return RevisionChange(before, now, changed=True)


class ServiceRevisions:
    """A service's, as its controller knows it. Not thread-safe.

    A controller that has just begun may be one that was restarted, and then its nodes know more. It doesn't say what is
    current before they have told it, or have had `_PATIENCE_S` for that.
    """

    def __init__(self) -> None:
        self._revisions = Revisions()
        self._awaited: set[str] | None = None
        self._until = time.monotonic() + _PATIENCE_S

    @property
    def settled(self) -> bool:
        """Whether it says what is current."""
        return self._awaited == set() or time.monotonic() > self._until

    def wait_for(self, nodes: Iterable[str]) -> None:
        """These nodes were there before the controller; only the first call counts."""
        if self._awaited is None:
            self._awaited = set(nodes)

    def take(self, node_id: str, table: RevisionTable) -> RevisionTable:
        """Take in what a node knows; returns what it should know."""
        self._revisions.merge(table)
        if self._awaited is not None:
            self._awaited.discard(node_id)
        return self._revisions.table()

    def table(self) -> RevisionTable:
        """What is known so far, settled or not."""
        return self._revisions.table()

    def current(self) -> RevisionTable | None:
        """See `Revisions.table`; None while that isn't settled."""
        return self._revisions.table() if self.settled else None

    def change(self, model: str, name: str | None, known: Iterable[KnownRevisions]) -> RevisionChange | None:
        """See `Revisions.change`; None while what is current isn't settled.

        Args:
            known: what the nodes know.
        """
        in_use: list[str] = []
        for of_node in known:
            self._revisions.merge(of_node.table)
            in_use += of_node.in_use
        return self._revisions.change(model, name, in_use) if self.settled else None


class NodeRevisions:
    """What one node knows of current revisions, and which of its chunks are of which. Thread-safe.

    Args:
        store: whose chunks go when they are of another revision.
    """

    def __init__(self, store: HiddenStateStore) -> None:
        self._store = store
        self._taking = threading.Lock()  # held for as long as chunks are being dropped, while others go on
        self._lock = threading.Lock()
        self._revisions = Revisions()
        self._spaces: dict[bytes, ModelRevision] = {}  # of key spaces that may have chunks
        self._prune_at = _PRUNE_AT
        self._retired: dict[str, Retired] = {}
        self._refused_total = 0

    @property
    def refused_total(self) -> int:
        """Stores refused since their revision was not the current one."""
        return self._refused_total

    def current(self, model: str) -> str:
        """The name of a model's current revision, empty if it has none."""
        with self._lock:
            return self._revisions.get(model).name

    def table(self) -> RevisionTable:
        """See `Revisions.table`."""
        with self._lock:
            return self._revisions.table()

    def in_use(self, model: str) -> tuple[str, ...]:
        """Names of the revisions of a model that there may be chunks of."""
        with self._lock:
            return tuple(sorted({space.name for space in self._spaces.values() if space.model == model}))

    def take(self, table: RevisionTable) -> tuple[Retired, ...]:
        """Take in what somebody else knows. When this returns, chunks of revisions that are not current any more are
        dropped, and what is being written of them won't become visible; who reads them goes on reading.

        Returns:
            For each model, what its latest change has freed here, whoever told this node of it.
        """
        with self._taking:
            with self._lock:
                retired = [(change.now, self._void(change)) for change in self._revisions.merge(table)]
            for now, gone in retired:
                self._retired[now.model] = Retired(now, self._store.drop_spaces(gone) if gone else Freed())
            return tuple(self._retired.values())

    def _void(self, change: RevisionChange) -> set[bytes]:
        """The key spaces that end with a change; nothing becomes visible in them any more."""
        now, before = change.now, change.before
        # If changes in between were missed, what has this name may be from before all of them.
        kept = now.name if before.number in (0, now.number - 1) else None
        gone = {space for space, of in self._spaces.items() if of.model == now.model and of.name != kept}
        self._store.void(gone)
        for space in gone:
            del self._spaces[space]
        return gone

    @contextmanager
    def admitting(self, space: bytes, revision: ModelRevision | None) -> Iterator[None]:
        """For the time in which room is reserved in a key space: its revision, if it has one, is the current one until
        the end of it.

        Where the client has heard of it first, this node learns it from him.

        Raises:
            StaleRevisionError: it is not.
        """
        if revision is None:
            yield
            return
        with self._lock:
            is_news = revision.number > self._revisions.get(revision.model).number
        if is_news:
            self.take((revision,))
        with self._lock:
            now = self._revisions.get(revision.model)
            if now.number and revision.name != now.name:
                self._refused_total += 1
                raise StaleRevisionError(
                    f"model_revision: got rows of revision {revision.name!r} of model {revision.model!r}, expected the "
                    f"current one, {now.name!r}; connect again after the new weights are loaded"
                )
            if space not in self._spaces and len(self._spaces) >= self._prune_at:
                alive = self._store.spaces()
                self._spaces = {known: of for known, of in self._spaces.items() if known in alive}
                self._prune_at = max(_PRUNE_AT, 2 * len(self._spaces))
            self._spaces[space] = revision
            yield

    @contextmanager
    def committing(self) -> Iterator[None]:
        """For the time of a commit, which may find that what was reserved has been retired; counts that."""
        try:
            yield
        except StaleRevisionError:
            with self._lock:
                self._refused_total += 1
            raise


def _number_in(name: str) -> int:
    found = _NUMBERED.fullmatch(name)
    return int(found[1]) if found else 0
