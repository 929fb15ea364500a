"""Which revision of each model's weights is the current one, and what becomes of the rows of all others.

A model has no current revision until somebody says that its weights have changed. From then on only rows of the current
one are taken, and those of any other are dropped on every node. A revision's name stands for its weights: the same name
is the same weights, whenever it comes back.

The table of current revisions is small and always travels whole. It is kept where Ray keeps what actors there are
(`hs_cache.weights`), so that it outlives a controller; from there it goes to each client that connects, and to each
node with the reply to whatever that publishes. A client whose revision is newer than its node's tells the node, too.
"""

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hs_cache.errors import StaleRevisionError
from hs_cache.messages import Freed, ModelRevision, Retired, RevisionChange, RevisionTable
from hs_cache.store import HiddenStateStore

_SUFFIX_BYTES = 4
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
        """Take in what somebody else knows, as far as it is newer; returns what that changes here."""
        changes = []
        for now in table:
            before = self.get(now.model)
            if now.number > before.number:
                self._current[now.model] = now
                changes.append(RevisionChange(before, now, changed=True))
        return changes

    def change(self, model: str, name: str | None) -> RevisionChange:
        """Make a revision the current one, unless it is already.

        Args:
            model: whose weights have changed.
            name: not empty; None for one that nobody has used, and nobody else will.
        """
        before = self.get(model)
        if before.number and name == before.name:
            return RevisionChange(before, before, changed=False)
        number = before.number + 1
        now = ModelRevision(model, number, name or f"r{number}-{secrets.token_hex(_SUFFIX_BYTES)}")
        self._current[model] = now
        return RevisionChange(before, now, changed=True)


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
        now = change.now
        gone = {space for space, of in self._spaces.items() if of.model == now.model and of.name != now.name}
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
