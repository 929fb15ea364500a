"""`PrefixWriter`: rows of one request as an engine computes them, step by step."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from hs_cache.keys import TokenIds
from hs_cache.results import StoreResult
from hs_cache.router import Router
from hs_cache.session import Session
from hs_cache.stitching import RequestRows


class _Writer:
    def __init__(self, router: Router, session: Session, request_id: str, request: RequestRows) -> None:
        self._router = router
        self._session = session
        self._request = request
        self.request_id = request_id

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt so far."""
        return self._request.num_tokens

    def __repr__(self) -> str:
        state = "closed" if self._request.closed else f"{self.num_tokens} tokens"
        return f"<{type(self).__name__} of request {self.request_id!r}: {state}>"


class PrefixWriter(_Writer):
    """One request's rows, in steps of any size; ``cache.writer(request_id)`` makes it. Thread-safe.

    A chunk is stored when its last row has come; rows of the chunk before that are held here, in the client. They go
    with `abort`, with the end of a ``with`` block that raises, and with the writer itself.

    Attributes:
        request_id: as given.
    """

    def __enter__(self) -> "PrefixWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def append(self, new_token_ids: TokenIds, layers: Mapping[int, Any], *, at: int | None = None) -> StoreResult:
        """Continue the prompt by a step of any size, down to one token, or none.

        Blocks for two round trips when a chunk becomes complete, and else for a copy of the rows at most. Rows on a GPU
        are those behind the work that its current stream has now, which is waited for.

        Args:
            new_token_ids: the tokens of this step only.
            layers: layer_idx → their rows ``[len(new_token_ids), hidden_dim]``, as `HiddenStateCache.store` takes them.
                A layer with fewer rows, or none, ends there: what is given for it later is left out. A layer may start
                later than others.
            at: the position of the first of these tokens. Where it isn't `num_tokens`, the step is refused: the output
                of a step that was under way when its request was preempted belongs nowhere any more. Without it, the
                caller answers for the order.

        Returns:
            What became of the chunks that this step completed; each layer set counts as in `HiddenStateCache.store`.

        Raises:
            InvalidInputError: an argument is wrong; nothing was changed.
            CacheClosedError: the writer was finished or aborted, or the cache closed.

            After any other exception, and after a cancellation, `num_tokens` says whether the step counts; a chunk that
            was being stored may then be missing.
        """
        return self._router.run(self._session.append(self._request, new_token_ids, layers, at))

    def finish(self, save_tail: bool = False) -> StoreResult:
        """The request has ended. Idempotent.

        Args:
            save_tail: store the last, short chunk too. Only where the service runs with ``save_unfull_chunk``.

        Returns:
            What became of the short chunk.

        Raises:
            InvalidInputError: `save_tail` is no bool, or the service looks for whole chunks only.
        """
        return self._router.run(self._session.finish(self._request, save_tail))

    def abort(self) -> None:
        """The request was given up: nothing of its open chunk stays. Chunks that are complete do. Idempotent."""
        self._request.close()

    def preempt(self, num_tokens: int) -> None:
        """The engine keeps only the first `num_tokens` tokens, and goes on from there, maybe with others. Idempotent.

        Blocks for one round trip where that lies inside of a chunk that was stored already: its first rows are needed
        again, and fetched.

        Raises:
            InvalidInputError: `num_tokens` is no int, or negative.
        """
        self._router.run(self._session.preempt(self._request, num_tokens))


class AsyncPrefixWriter(_Writer):
    """`PrefixWriter` for asyncio, method by method."""

    async def __aenter__(self) -> "AsyncPrefixWriter":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.abort()

    async def append(self, new_token_ids: TokenIds, layers: Mapping[int, Any], *, at: int | None = None) -> StoreResult:
        """See `PrefixWriter.append`."""
        return await self._router.arun(self._session.append(self._request, new_token_ids, layers, at))

    async def finish(self, save_tail: bool = False) -> StoreResult:
        """See `PrefixWriter.finish`."""
        return await self._router.arun(self._session.finish(self._request, save_tail))

    async def abort(self) -> None:
        """See `PrefixWriter.abort`."""
        self._request.close()

    async def preempt(self, num_tokens: int) -> None:
        """See `PrefixWriter.preempt`."""
        await self._router.arun(self._session.preempt(self._request, num_tokens))
