"""Where prompts are, as one client of the cache hears; for routers, which must neither wait for it nor fail with it."""

import asyncio
import logging
import time
from collections.abc import Collection, Sized
from functools import partial
from typing import Any

from hs_cache.client import AsyncHiddenStateCache
from hs_cache.effects import Budget
from hs_cache.errors import ServiceTimeoutError
from hs_cache.integrations.affinity import AffinitySettings, Demand, Prompt
from hs_cache.keys import ChunkKeys, KeySpace, TokenDatabase, normalise_token_ids
from hs_cache.kv_names import kv_naming
from hs_cache.messages import RevisionTable
from hs_cache.revisions import Revisions
from hs_cache.router import Router
from hs_cache.session import Session
from hs_cache.troubles import surfaced

logger = logging.getLogger(__name__)

_OF_TIMEOUT = 0.9
"""Share of the time for an answer that the client has, so that it is the one that learns who was late."""

_TROUBLE_S = 5.0
"""For how long a client leaves alone who didn't answer, see `hs_cache.troubles.Suspects`; and how long it lasts at
least, before another takes its place."""

_RENEWED_S, _RETRIED_S = 60.0, 1.0
"""How often the current revision is asked for; and after how long what failed is tried again."""

_RENEWAL_TIMEOUT_S = 10.0

_INLINE_TOKENS = 65_536
"""Naming the chunks of more takes milliseconds, in which no other request of the event loop could be routed."""


class PrefixFinder:
    """Finds prompts with one client, whatever their salt or LoRA, as these only enter the keys.

    It connects in the background, and never starts a service. The current revision of the model is followed; another
    client is connected only after a call has failed, since a service that was started anew may have other settings.

    Belongs to one event loop.
    """

    def __init__(self, settings: AffinitySettings) -> None:
        self._settings = settings
        self._cache: AsyncHiddenStateCache | None = None
        self._revision = settings.model_revision
        self._task: asyncio.Task[None] | None = None
        self._due = self._connected_at = self._trouble_until = 0.0
        self._troubled = self._outdated = False

    def prepare(self) -> None:
        """Connect, or look for another revision, in the background, if it is time to."""
        if self._task is None and time.monotonic() >= self._due:
            self._task = asyncio.get_running_loop().create_task(self._renew())

    async def find(self, prompt: Prompt, nodes: Collection[str]) -> Demand | None:
        """Where the prompt is, of those nodes; None when nobody can say. Takes no longer than ``timeout_s``, and what
        naming its chunks takes.

        Raises:
            InvalidInputError: the prompt can't be one; or whatever else its tokens raise when they are read.
        """
        self.prepare()
        cache, settings = self._cache, self._settings
        if cache is None:
            return None
        name = partial(self._keys, cache, prompt)
        size = len(prompt.token_ids) if isinstance(prompt.token_ids, Sized) else 0
        keys, num_tokens = await asyncio.to_thread(name) if size > _INLINE_TOKENS else name()
        prefixes: dict[str, int] = {}
        if len(keys):
            asked = cache.locate(
                keys,
                (0,) if settings.layers is None else settings.layers,
                nodes=nodes,
                num_asked=0 if settings.layers is None else 4,
                timeout_s=_OF_TIMEOUT * settings.timeout_s,
            )
            try:
                prefixes = await asyncio.wait_for(asked, settings.timeout_s)
            except Exception as error:  # whatever the client's trouble is, it is none of the request's
                self._trouble_until = time.monotonic() + _TROUBLE_S
                self._in_trouble(error)
                return None
            if not prefixes and time.monotonic() < self._trouble_until:
                return None  # it may be nowhere, or where nobody is asked now
            self._well()
        return Demand(num_tokens, keys, prefixes)

    def _keys(self, cache: AsyncHiddenStateCache, prompt: Prompt) -> tuple[ChunkKeys, int]:
        config = cache.config
        fields: dict[str, Any] = {**self._settings.space, "model_revision": self._revision, **dict(prompt.identity)}
        space = KeySpace(**fields, chunk_size=config.chunk_size)
        token_ids = normalise_token_ids(prompt.token_ids)
        database = TokenDatabase(space, save_unfull_chunk=config.save_unfull_chunk, kv_naming=kv_naming(config, space))
        return database.chunk_keys(token_ids, mm_spans=prompt.mm_spans), len(token_ids)

    def _in_trouble(self, error: Exception) -> None:
        if not self._outdated and not isinstance(error, ServiceTimeoutError | asyncio.TimeoutError):
            self._outdated = True
            self._due = min(self._due, max(self._connected_at + _TROUBLE_S, time.monotonic()))
        if not self._troubled:
            self._troubled = True
            logger.warning(
                "hs_cache: requests are routed without regard to prefixes while service %r does not answer: %s",
                self._settings.service,
                str(error) or type(error).__name__,
            )

    def _well(self) -> None:
        if self._troubled:
            self._troubled = False
            logger.warning("hs_cache: requests are routed by prefixes, service %r answers", self._settings.service)

    async def _renew(self) -> None:
        try:
            if self._cache is None or self._outdated:
                await self._connect()
            elif not self._settings.model_revision:
                await self._follow(*self._cache.parts())
            self._due = time.monotonic() + _RENEWED_S
        except Exception as error:  # it is tried again
            self._in_trouble(error)
            self._due = time.monotonic() + _RETRIED_S
        finally:
            self._task = None

    async def _connect(self) -> None:
        router = Router(self._settings.service)
        session = Session({**self._settings.space, "kv_tags": ()}, strict=True)
        try:
            await router.arun(session.attach())
        except BaseException:  # a loop that ends cancels it
            session.close()
            raise
        before, self._cache = self._cache, AsyncHiddenStateCache(router, session)
        self._revision, self._outdated, self._connected_at = session.key_space.model_revision, False, time.monotonic()
        if before is not None:  # requests may be asking it
            asyncio.get_running_loop().call_later(_TROUBLE_S, before.parts()[1].close)

    async def _follow(self, router: Router, session: Session) -> None:
        """Take the model's current revision; the client itself keeps that which it has connected with."""
        asked = session.tell(None, "revisions", budget=Budget(_RENEWAL_TIMEOUT_S))
        table: RevisionTable | None = await router.arun(surfaced(asked))
        if table is not None:
            self._revision = Revisions(table).get(self._settings.model).name
