"""What every operation of a client needs: who serves it, the keys, and what becomes of trouble. No Ray in here."""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hs_cache.attachment import Attachment, Link
from hs_cache.config import CacheConfig
from hs_cache.effects import Budget, Call, Find, Pause, Peer, Steps
from hs_cache.errors import (
    CacheClosedError,
    InvalidInputError,
    ServiceError,
    ServiceNotRunningError,
    ServiceTimeoutError,
    StaleIncarnationError,
    StaleRevisionError,
)
from hs_cache.gathering import DIRECTORY, Gatherer
from hs_cache.keys import ChunkKeys, KeySpace, MMSpan, TokenDatabase
from hs_cache.kv_names import kv_naming
from hs_cache.leases import this_process
from hs_cache.messages import ModelRevision, ReportNumber
from hs_cache.planning import check_keys
from hs_cache.revisions import Revisions
from hs_cache.troubles import Suspects, Troubles, surfaced

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ATTACH_TIMEOUT_S = 60.0
"""A service that is being started has names before it can answer."""

_RESTART_S = 30.0
"""How long a client that connects waits for a node whose actor doesn't let it attach: it may be restarting."""

_PIN_TIMEOUT_S = 10.0
"""How long a client that connects waits for the controller, which may be restarting, to say what is current."""

_SENDER_BYTES = 16

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.2

_COUNTERS = (
    "retrieves_total",
    "hits_total",
    "tokens_asked_total",
    "tokens_served_total",
    "zero_copy_total",
    "copied_total",
    "stored_chunks_total",
    "failed_chunks_total",
)


class Connection:
    """The state of one client: settings, attachment, counters; and how it calls. Thread-safe.

    Args:
        space: the fields of `KeySpace` except ``chunk_size``. Without a ``model_revision`` it is the service's current
            one, for good, from the first `attach` on: the weights of the client's engine don't change by themselves.
        strict: raise `ServiceError` instead of turning it into a miss or a failed store.
        engine: which of the node's engines this client belongs to.
    """

    def __init__(self, space: Mapping[str, Any], *, strict: bool, engine: str = "") -> None:
        if not isinstance(strict, bool):
            raise InvalidInputError(f"strict: got {strict!r}, expected True or False")
        if not isinstance(engine, str):
            raise InvalidInputError(f"engine: got {type(engine).__name__}, expected str")
        self._engine = engine
        self._sender = secrets.token_bytes(_SENDER_BYTES)
        self._reports: dict[int, int] = {}  # by thread: the number of its last KV report
        self._space_fields = dict(space)
        self._revision: ModelRevision | None = None
        self._key_space(1)  # refuses wrong fields before anything else happens
        if space.get("model_revision"):
            self._revision = ModelRevision(space.get("model", ""), 0, space["model_revision"])
        self._strict = strict
        self._config: CacheConfig | None = None
        self._database: TokenDatabase | None = None
        self._suspects = suspects = Suspects()
        self._attachment = Attachment(suspects)
        self._lock = threading.Lock()
        self._process = this_process()
        self._troubles = Troubles(strict=strict)
        self._gatherer = Gatherer(self._troubles, suspects)
        self._counts = dict.fromkeys(_COUNTERS, 0)

    @property
    def config(self) -> CacheConfig:
        """The service's settings."""
        if self._config is None:
            raise CacheClosedError("the cache is not connected yet")
        return self._config

    @property
    def key_space(self) -> KeySpace:
        """What all keys of this client start from."""
        return self._keys().space

    def chunk_keys(self, token_ids: Any, mm_spans: Sequence[MMSpan]) -> ChunkKeys:
        """Keys of a prefix; no call to anyone."""
        return self._keys().chunk_keys(token_ids, mm_spans=mm_spans)

    def attach(self) -> Steps[None]:
        """Reach the service, whatever `strict` is. An actor that is being restarted is waited for.

        Raises:
            ServiceError: it can't be reached, or can't say which revision of the model is current.
        """
        budget = Budget(_ATTACH_TIMEOUT_S)
        yield from self._reached(budget)
        if self._revision is None:
            yield from self._pin_revision(Budget(min(budget.left_s, _PIN_TIMEOUT_S)))

    def _reached(self, budget: Budget) -> Steps[None]:
        """Attach; again, where an actor has just been killed, say, until another has taken its place."""
        patience, pause_s, told = Budget(min(_RESTART_S, budget.left_s)), FIRST_PAUSE_S, False
        while True:
            try:
                yield from self._connected(budget)
            except ServiceNotRunningError:
                raise
            except ServiceError as error:
                if patience.is_spent:
                    raise
                if not told:
                    logger.warning(
                        "hs_cache: the node doesn't answer, and is waited for, up to %.0f s: %s", patience.left_s, error
                    )
                    told = True
            else:
                return
            yield Pause(min(pause_s, patience.left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _pin_revision(self, budget: Budget) -> Steps[None]:
        """Take the model's current revision for this client's. The controller has to say, since a node may have missed
        the latest change: with the revision before, a client of new weights would find rows of old ones."""
        model, table = self._space_fields.get("model", ""), None
        while table is None:
            try:
                controller = yield Find(None, budget.left_s)
                table = yield Call(controller, "revisions", (), budget.left_s)
            except ServiceNotRunningError:
                raise
            except ServiceError as error:
                if budget.left_s < LONGEST_PAUSE_S:
                    raise ServiceError(
                        f"the service can't say which revision of model {model!r} is current: {error}; name it, with "
                        "model_revision, to connect all the same"
                    ) from error
                yield Pause(LONGEST_PAUSE_S)
        with self._lock:
            if self._revision is None:
                self._revision = Revisions(table).get(model)
        self._take_config(self.config)

    def call(self, method: str, *args: Any, otherwise: T) -> Steps[T]:
        """One plain call to the node's hidden-state actor; `otherwise` when it can't be reached."""

        budget = self._budget()

        def called(link: Link) -> Steps[T]:
            result: T = yield Call(link.located.peer, method, args, budget.left_s)
            return result

        return self._attempt(called, otherwise, budget)

    def report(self, method: str, what: Any, mm_spans: Sequence[MMSpan] = ()) -> Steps[bool]:
        """Tell the node's KV actor about `what`: keys, or token ids for their chunks. False if it wasn't reached."""
        first = what[0] if isinstance(what, list | tuple) and what else what
        if method == "resync" or isinstance(first, bytes | ChunkKeys | set | frozenset):
            blob = check_keys("keys", what)
            if mm_spans:
                raise InvalidInputError("mm_spans: got spans along with keys, expected them along with token ids only")
        else:
            blob = self.chunk_keys(what, mm_spans).blob

        budget = self._budget()

        def told(link: Link) -> Steps[bool]:
            error: ServiceError | None = None
            if link.local:
                number = self._number_report()  # of what this thread sends, the call comes next
                try:
                    yield Call(link.located.kv, method, (blob, self._engine, number), budget.left_s)
                except ServiceError as failure:
                    error = failure
            else:  # what is computed here is no concern of the node that serves this client
                error = ServiceNotRunningError("there is no KV actor on this client's node")
            if error is not None:
                self._number_report()  # whether it arrived or not, the next one shows that something is missing
                self._troubles.report(error, "the KV actor")
            else:
                self._troubles.recovered("the KV actor")
            return error is None

        return self._attempt(told, False, budget)

    def _number_report(self) -> ReportNumber:
        thread = threading.get_ident()
        number = self._reports[thread] = self._reports.get(thread, -1) + 1
        return ReportNumber(self._sender + thread.to_bytes(8, "little"), number)

    def operate(
        self, body: Callable[[Link, Budget], Steps[T]], otherwise: T, timeout_s: float | None = None
    ) -> Steps[T]:
        """Carry out what another module defines, on the node that serves this client; `otherwise` when it can't be
        reached.

        Args:
            body: it is called again, with another link, if the node's actor was restarted meanwhile.
            timeout_s: per round trip; None for the service's own.
        """
        budget = self._budget(timeout_s)
        return self._attempt(lambda link: body(link, budget), otherwise, budget)

    def tell(self, whom: Peer | str | None, method: str, *args: Any, budget: Budget) -> Steps[Any]:
        """One call to the peer that serves this client, to another node by its id, or with None to the controller. It
        results in None if that can't be reached, which is reported, or couldn't be a moment ago.
        """
        name = DIRECTORY if whom is None else whom if isinstance(whom, str) else whom.node_id
        what = DIRECTORY if whom is None else f"node {name}"
        fair = budget.is_fresh
        try:
            if whom is None or isinstance(whom, str):
                if name in self._suspects.names():
                    return None
                peer: Peer = yield Find(whom, budget.left_s)
            else:
                peer = whom
            reply = yield Call(peer, method, args, budget.left_s)
        except ServiceError as error:
            if fair and isinstance(error, ServiceTimeoutError) and (whom is None or isinstance(whom, str)):
                self._suspects.add(name)
            self._troubles.report(error, what)
            return None
        self._troubles.recovered(what)
        return reply

    def _budget(self, timeout_s: float | None = None) -> Budget:
        return Budget(self.config.rpc_timeout_s if timeout_s is None else timeout_s)

    def _attempt(self, body: Callable[[Link], Steps[T]], otherwise: T, budget: Budget) -> Steps[T]:
        """Run `body` on the attachment; once more on a new one if the node's actor was restarted in between."""
        self._check_usable()
        return surfaced(self._attempts(body, otherwise, budget))

    def _attempts(self, body: Callable[[Link], Steps[T]], otherwise: T, budget: Budget) -> Steps[T]:
        for last in (False, True):
            link = None
            try:
                link = yield from self._connected(budget)
                result = yield from body(link)
            except StaleIncarnationError as stale:
                if link is not None:
                    self._attachment.drop(link.incarnation)
                if last:
                    error = ServiceError(f"the node refuses what it has just granted: {stale}")
                    self._troubles.report(error, "the cache")
            except StaleRevisionError as refusal:
                self._troubles.recovered("the cache")
                self._troubles.refused(refusal)
                break
            except ServiceError as error:
                if link is not None:
                    self._attachment.fail(link, error)
                self._troubles.report(error, "the cache")
                break
            else:
                self._troubles.recovered("the cache")
                return result
        return otherwise

    def _connected(self, budget: Budget) -> Steps[Link]:
        self._check_usable()
        link = self._attachment.link
        if link is None:
            return (yield from self._attachment.attach(self._process, budget, self._take_config))
        if link.is_final or time.monotonic() < link.look_again_at:
            return link
        try:
            # By now there may be a pool on the client's own node, or one that it can open.
            return (yield from self._attachment.attach(self._process, Budget(budget.left_s / 2), self._take_config))
        except ServiceError as error:
            logger.debug("still served by node %s: %s", link.located.peer.node_id, error)
            return link

    def _take_config(self, config: CacheConfig) -> None:
        if self._config is not None and self._config.chunk_size != config.chunk_size:
            raise ServiceError(
                f"chunk_size: the service, which was started anew, has {config.chunk_size}, this client has "
                f"{self._config.chunk_size}; connect again"
            )
        self._config = config
        if self._revision is not None:
            space = self._key_space(config.chunk_size)
            self._database = TokenDatabase(
                space,
                save_unfull_chunk=config.save_unfull_chunk,
                kv_naming=kv_naming(config, space),
            )

    def _key_space(self, chunk_size: int) -> KeySpace:
        fields: dict[str, Any] = dict(self._space_fields)
        if self._revision is not None:
            fields["model_revision"] = self._revision.name
        return KeySpace(**fields, chunk_size=chunk_size)

    def _keys(self) -> TokenDatabase:
        if self._database is None:
            raise CacheClosedError("the cache is not connected yet")
        return self._database

    def _check_usable(self) -> None:
        if self._attachment.closed:
            raise CacheClosedError("the cache is closed; connect() gives a new one")
        if os.getpid() != self._process.pid:
            raise CacheClosedError(
                f"this cache belongs to process {self._process.pid}, and Ray doesn't work in its forked child "
                f"{os.getpid()}: start children with multiprocessing's 'spawn' and connect() there"
            )

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, number in more.items():
                self._counts[name] += number
