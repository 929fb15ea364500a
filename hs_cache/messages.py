"""What crosses processes: small frozen dataclasses.

Keys travel as one ``bytes`` blob (16 bytes a key, head first), never as a list of objects; rows never travel in here.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from hs_cache.errors import InvalidInputError
from hs_cache.keys import KEY_BYTES, KVNames
from hs_cache.shown import Shown

PROTOCOL_VERSION = 3
"""Raised whenever a message changes meaning; actor and client of different versions refuse each other."""

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
"""Bytes per element of every storable dtype, by PyTorch's name (known here without importing torch)."""


OK, NEVER_STORED, EVICTED, LAYER_MISSING = "ok", "never_stored", "evicted", "layer_missing"
RETIRED = "retired"
KV_ABSENT, KV_UNKNOWN, UNREACHABLE = "kv_absent", "kv_unknown", "unreachable"
"""Whether a chunk can be had, and why not."""


def split_keys(blob: bytes) -> list[bytes]:
    """The 16-byte chunk keys of a blob, head first; `InvalidInputError` for anything else."""
    if not isinstance(blob, bytes) or len(blob) % KEY_BYTES:
        got = f"{len(blob)} bytes" if isinstance(blob, bytes) else type(blob).__name__
        raise InvalidInputError(f"keys: got {got}, expected bytes in multiples of {KEY_BYTES}")
    return [blob[i : i + KEY_BYTES] for i in range(0, len(blob), KEY_BYTES)]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Shape and dtype of one storage layer: rows are ``[tokens, hidden_dim]`` of `dtype` (a key of `DTYPE_BYTES`)."""

    layer_idx: int
    hidden_dim: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row."""
        return self.hidden_dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ModelRevision:
    """The revision `name` of a model's weights, the current one since change `number` of that model; number 0 says
    nothing of when."""

    model: str
    number: int
    name: str


RevisionTable: TypeAlias = tuple[ModelRevision, ...]
"""The current revision of every model that has had a change."""


@dataclass(frozen=True, slots=True)
class RevisionChange:
    """What was current before, and what is now. Not `changed`: it was so already."""

    before: ModelRevision
    now: ModelRevision
    changed: bool


@dataclass(frozen=True, slots=True)
class Freed:
    """Chunks that were dropped, and their bytes; `held_bytes` of these are free when those who read them let go."""

    chunks: int = 0
    nbytes: int = 0
    held_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Retired:
    """What a node dropped when `revision` became the current one."""

    revision: ModelRevision
    freed: Freed


class Run(NamedTuple):
    """Rows ``start_token .. start_token + num_tokens`` of one layer, one behind the other at `offset` in the pool."""

    layer_idx: int
    start_token: int
    num_tokens: int
    offset: int


@dataclass(frozen=True, slots=True)
class PoolAddress:
    """Where another process of the node opens a pool: ``/proc/<pid>/fd/<fd>``, and how it knows it has the right one.

    `start_time` is field 22 of ``/proc/<pid>/stat`` (clock ticks since boot), `incarnation` the pool's 16 random bytes,
    `data_bytes` the size of its data region.
    """

    pid: int
    start_time: int
    fd: int
    incarnation: bytes
    data_bytes: int


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """Who attaches. `start_time` is field 22 of ``/proc/<pid>/stat`` (clock ticks), None without ``/proc``."""

    client_id: bytes
    pid: int
    start_time: int | None
    node_id: str
    protocol: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class AttachReply:
    """The node's settings, and where its pool can be opened; ``address`` is None when it can't be, for `reason`."""

    node_id: str
    incarnation: bytes
    config: dict[str, Any]
    address: PoolAddress | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ReserveRequest:
    """Room for the rows of chunks ``first_chunk ..`` of a prefix, in every layer of `specs`.

    `keys` names every chunk of the prefix, `num_tokens` is what they cover. `kv_local`: the writer's KV lives on the
    actor's node, in the engine of that name. `kv`: what its KV source calls the chunks, if not by their keys.
    `releases` are ids the client has finished with; they end before room is looked for. `space` is the fingerprint of
    the key space and `revision` its revision, of which the node may not have heard yet; None for what no model made.

    With `keep`, what is committed replaces chunks of the same keys, and is held under `hold_id` until it is dropped,
    the id is released or the client is gone; then it goes. For clients without the pool, it only replaces. Theirs is
    the id too: nothing becomes visible of what is released before. Without `evict`, only free room is used.
    """

    incarnation: bytes
    client_id: bytes
    hold_id: int
    space: bytes
    keys: bytes
    num_tokens: int
    first_chunk: int
    specs: tuple[LayerSpec, ...]
    kv_local: bool
    engine: str = ""
    kv: KVNames | None = None
    releases: tuple[int, ...] = ()
    keep: bool = False
    revision: ModelRevision | None = None
    evict: bool = True


@dataclass(frozen=True, slots=True)
class ReserveReply:
    """Where to write. `refused` counts the chunks at the tail for which there is no room."""

    incarnation: bytes
    runs: tuple[Run, ...]
    refused: int


@dataclass(frozen=True, slots=True)
class CommitReply:
    """`stored`, `present`, `failed`: chunk counts; `prefix_tokens`: how far all layers of the store reach.

    `alone` is as in `LeaseReply`.
    """

    incarnation: bytes
    stored: int
    present: int
    failed: int
    prefix_tokens: int
    alone: bool = False


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """The longest prefix of `keys` with every layer of `layers`, held for the client until it releases `hold_id`.

    With `first_chunk`, the run of chunks from there on. `hinted`: the directory said that the keys are on this node.
    Where rows are sent, those of tokens before `start_token` are left out. `kv` as in `ReserveRequest`. Unless it is
    `counted`, it is no retrieve in the node's statistics.
    """

    incarnation: bytes
    client_id: bytes
    hold_id: int
    keys: bytes
    num_tokens: int
    layers: tuple[int, ...]
    timeout_s: float
    first_chunk: int = 0
    start_token: int = 0
    hinted: bool = False
    kv: KVNames | None = None
    releases: tuple[int, ...] = ()
    counted: bool = True


@dataclass(frozen=True, slots=True)
class LeaseReply:
    """What was found: `num_tokens` rows of every layer from the first chunk asked for on, at `runs`; nothing held if 0.

    `alone`: no other node could have more. `must_copy`: so much of the pool is leased that the client has to copy the
    rows and release the lease at once. `ended_by` says what ended the prefix: ``""`` (nothing), ``"hidden_state"``,
    ``"kv_absent"`` or ``"kv_unknown"``.
    """

    incarnation: bytes
    num_tokens: int
    specs: tuple[LayerSpec, ...]
    runs: tuple[Run, ...]
    must_copy: bool
    ended_by: str
    alone: bool


@dataclass(frozen=True, slots=True)
class PlanReply:
    """`num_tokens` of the prefix have KV and every layer; `held` if that was asked for, and not too much is already.

    `kv_tokens` have KV, `layer_tokens` each of the layers asked for, in their order. `alone` and `ended_by` are as in
    `LeaseReply`.
    """

    num_tokens: int
    kv_tokens: int
    layer_tokens: tuple[int, ...]
    specs: tuple[LayerSpec, ...]
    ended_by: str
    alone: bool
    held: bool


@dataclass(frozen=True, slots=True)
class ExplainRequest:
    """Why each chunk of `keys` can be had with all of `layers`, or not. `kv` as in `ReserveRequest`."""

    keys: bytes
    num_tokens: int
    layers: tuple[int, ...]
    timeout_s: float
    kv: KVNames | None = None


@dataclass(frozen=True, slots=True)
class ExplainReply:
    """One of the reasons above per chunk; `alone` as in `LeaseReply`."""

    reasons: tuple[str, ...]
    alone: bool


class ReportNumber(NamedTuple):
    """A KV report's place among those of its sender about one engine: they are numbered without a gap."""

    sender: bytes
    number: int


@dataclass(frozen=True, slots=True)
class LocationBatch:
    """What changed on a node, or with `whole` all that it holds: chunk keys, in batches numbered without a gap."""

    node_id: str
    incarnation: bytes
    number: int
    added: bytes
    removed: bytes = b""
    whole: bool = False


@dataclass(frozen=True, slots=True)
class PublishReply:
    """Whether a batch was taken in (if not, all of the node's keys are needed), how many nodes the service has, and the
    current revisions."""

    applied: bool
    num_nodes: int
    revisions: RevisionTable = ()


@dataclass(frozen=True, slots=True)
class ControllerStatistics:
    """A `CacheController`: the nodes that publish to it, the keys they have, and how often it was asked for some.

    `membership_version` grows whenever a node joins, leaves, or comes back with another pool.
    """

    membership_version: int
    nodes: tuple[str, ...]
    num_keys: int
    locates_total: int
    revisions: RevisionTable = ()


@dataclass(frozen=True, slots=True)
class StartProgress:
    """How far a controller is with the actors of its nodes, at its look of that `number`.

    `matching`: nodes that are to have a pair. `missing`: those whose pair doesn't answer yet, and has not failed.
    `failure`: what went wrong on the first node where something did.
    """

    number: int
    matching: tuple[str, ...]
    missing: tuple[str, ...]
    failure: Exception | None


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """One pool and its index, at one moment. Bytes of the four states add up to `capacity_bytes`."""

    capacity_bytes: int
    free_bytes: int
    resident_bytes: int
    reserved_bytes: int
    stranded_bytes: int
    leased_bytes: int
    num_chunks: int
    num_leases: int
    num_reservations: int
    num_kept: int
    stored_chunks_total: int
    evicted_chunks_total: int
    kv_dropped_chunks_total: int
    refused_chunks_total: int


@dataclass(frozen=True, slots=True)
class NodeStatistics(Shown):
    """One `HiddenStateActor`: its store, its clients, and what its retrieves met.

    `kv_asked_total`: how often the KV actor had to be asked. `stale_stores_total`: stores refused since their revision
    wasn't the current one. `pin_reason` says why its pool is page-locked or isn't; `without_cuda` that it needn't be.
    """

    node_id: str
    incarnation: str
    pid: int
    pinned: bool
    kv_source: str
    num_clients: int
    retrieves_total: int
    hits_total: int
    tokens_asked_total: int
    tokens_served_total: int
    kv_unknown_total: int
    store: StoreStatistics
    stale_stores_total: int = 0
    revisions: RevisionTable = ()
    without_cuda: bool = False
    pin_reason: str = ""
    kv_asked_total: int = 0
