"""Configuration: one frozen, validated object, read from YAML or a mapping and then from the environment.

Where a value comes from, the later one winning:

1. the defaults below;
2. a YAML file or a mapping: what the caller names, else the file in ``HS_CACHE_CONFIG_FILE``, else the one in
   ``LMCACHE_CONFIG_FILE``;
3. ``LMCACHE_<UPPER>``, for example ``LMCACHE_CHUNK_SIZE``;
4. ``HS_CACHE_<UPPER>``.

An environment variable that is empty counts as not set. Key names are LMCache's where LMCache has the same setting, so
that one file can serve both; LMCache's other keys are skipped with one INFO line. Any other unknown key is an error.

This module is the only one that reads ``os.environ``.
"""

from __future__ import annotations

import difflib
import ipaddress
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from hs_cache.errors import ConfigError, InvalidInputError

_LOG = logging.getLogger(__name__)

_OWN_PREFIX = "HS_CACHE_"
_LMCACHE_PREFIX = "LMCACHE_"
_FILE_SUFFIX = "CONFIG_FILE"

_SHOWN_CHARS = 100  # of a wrong value, in an error message
_MAX_GIB = 2**20  # a finite bound keeps the size in bytes, and deadlines below, inside what C integers can carry
_DAY_S = 86_400
_INT32_MAX = 2**31 - 1
_MAX_PORT = 65_535
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1

# Every key of an LMCache engine configuration, deprecated names included: `_CONFIG_DEFINITIONS`, `_CONFIG_ALIASES` and
# `_DEPRECATED_CONFIGS` of lmcache/v1/config.py in lmcache 0.5.6 (Apache-2.0).
LMCACHE_KEYS = frozenset(
    """
    app_id audit_actual_remote_url blend_check_layers blend_min_tokens blend_recompute_ratios blend_special_str
    blend_thresholds blocking_timeout_secs cache_policy chunk_size chunk_statistics_auto_exit_target_unique_chunks
    chunk_statistics_auto_exit_timeout_hours chunk_statistics_auto_start_statistics chunk_statistics_strategy
    controller_pull_url controller_reply_url controller_url enable_async_loading enable_blending enable_chunk_statistics
    enable_controller enable_hidden_state_cache enable_kv_events enable_lazy_memory_allocator enable_p2p enable_pd
    enable_scheduler_bypass_lookup enable_xpyd external_backends external_lookup_client extra_config gds_backend
    gds_buffer_size gds_path gds_path_sharding hidden_state_layers hidden_states_retrieve_mode hit_miss_ratio
    internal_api_server_enabled internal_api_server_host internal_api_server_include_index_list
    internal_api_server_port_start internal_api_server_socket_path_prefix lazy_memory_expand_trigger_ratio
    lazy_memory_initial_ratio lazy_memory_safe_size lazy_memory_step_ratio lmcache_instance_id
    lmcache_worker_heartbeat_delay_time lmcache_worker_heartbeat_time lmcache_worker_ids lmcache_worker_port
    lmcache_worker_ports local_cpu local_cpu_use_hugepages local_disk local_disk_path_sharding lookup_server_worker_ids
    lookup_timeout_ms maru_path maru_pool_size max_hidden_state_cpu_size max_local_cpu_size max_local_disk_size
    min_retrieve_tokens mp_host mp_port nixl_backends nixl_buffer_device nixl_buffer_size nixl_peer_alloc_port
    nixl_peer_host nixl_peer_init_port nixl_peer_port nixl_proxy_host nixl_proxy_port nixl_role numa_mode p2p_host
    p2p_init_ports p2p_lookup_ports pd_allocation_timeout_sec pd_backend_mode pd_bidirectional pd_buffer_device
    pd_buffer_size pd_condition_poll_interval_sec pd_max_prefill_len pd_peer_alloc_port pd_peer_host pd_peer_init_port
    pd_peer_query_port pd_proxy_host pd_proxy_port pd_role pd_shutdown_timeout_sec pd_skip_proxy_notification
    pin_check_interval_sec pin_timeout_sec plugin_locations pre_caching_hash_algorithm priority_limit py_enable_gc
    remote_config_url remote_serde remote_storage_plugins remote_url reserve_local_cpu_size retrieve_locations
    run_script_api_enabled runtime_plugin_locations save_decode_cache save_unfull_chunk script_allowed_imports
    storage_plugins store_location transfer_channel use_gds use_gpu_connector_v3 use_layerwise
    """.split()  # noqa: SIM905  (one name per line would be longer than the rest of the module)
)


LMCACHE_HASHES = ("builtin", "sha256_cbor", "sha256_cbor_64bit")
"""What ``pre_caching_hash_algorithm`` can be with ``kv_source: lmcache``; vLLM used to call the second by the third."""


def check_service(service: Any) -> None:
    """`InvalidInputError` unless `service` is a usable name."""
    if not isinstance(service, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", service):
        raise InvalidInputError(f"service: got {service!r}, expected up to 64 letters, digits, '-', '_' or '.'")


def is_hash_seed(seed: str) -> bool:
    """Whether a Python that is started with ``PYTHONHASHSEED=seed`` hashes by it."""
    return seed.isascii() and seed.isdigit() and int(seed) < 2**32


def _not_bool(value: object) -> object:
    # Python's True is the number 1; `chunk_size: yes` in YAML would otherwise be a chunk of one token.
    if isinstance(value, bool):
        raise ValueError("a boolean is no number")
    return value


_Int: TypeAlias = Annotated[int, BeforeValidator(_not_bool)]
_Float: TypeAlias = Annotated[float, BeforeValidator(_not_bool), Field(allow_inf_nan=False)]
_Layer: TypeAlias = Annotated[_Int, Field(ge=_INT64_MIN, le=_INT64_MAX)]
_Name: TypeAlias = Annotated[str, Field(strict=True, min_length=1)]


class NodeRequirements(BaseModel):
    """Which nodes carry the cache, by what Ray knows of them; a node must meet all of it.

    Attributes:
        labels: Ray node labels that must have exactly these values, e.g. ``{"market-type": "on-demand"}``.
        resources: Ray resources of which a node must have at least this much in total, e.g. ``{"GPU": 1}``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    labels: dict[_Name, Annotated[str, Field(strict=True)]] = {}
    resources: dict[_Name, Annotated[_Float, Field(gt=0)]] = {}

    @model_validator(mode="after")
    def _names_something(self) -> NodeRequirements:
        if not self.labels and not self.resources:
            raise ValueError("an empty requirement is ambiguous")
        return self


_ENDPOINT = "tcp://HOST:PORT, or ipc://PATH for a single rank"


class KVEventsSource(BaseModel):
    """A vLLM engine on the cache's own node that publishes KV events (vLLM's ``--kv-events-config``).

    Attributes:
        endpoint: Where to connect for events, e.g. ``tcp://127.0.0.1:5557`` for vLLM's ``tcp://*:5557``.
        replay_endpoint: Likewise for its ``replay_endpoint``; without it what is missed once stays unknown.
        topic: The engine's topic. "" takes the first that comes.
        model: What clients of this engine give as ``model`` at connect; others are never answered by it.
        dp_ranks: Its data-parallel ranks; rank r publishes on ports that are higher by r.
        block_size: Its tokens per KV block; ``chunk_size`` must be a multiple of it.
        extra_keys: What its events tell apart prompts by, besides tokens. ``auto``: what can be seen in them.
            ``offsets``: items come with their offsets, so a bare text in the first block is a salt. ``none``: the
            engine has neither salts nor multimodal prompts, and its events don't tell.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: str = Field(strict=True, description=_ENDPOINT)
    replay_endpoint: str | None = Field(None, strict=True, description=f"{_ENDPOINT}, or null")
    topic: str = Field("", strict=True, description="text")
    model: str = Field("", strict=True, description="text")
    dp_ranks: _Int = Field(1, ge=1, le=1024, description="a whole number of ranks from 1 to 1024")
    block_size: _Int = Field(16, ge=1, le=_INT32_MAX, description=f"a whole number of tokens from 1 to {_INT32_MAX}")
    extra_keys: Literal["auto", "offsets", "none"] = Field("auto", description="'auto', 'offsets' or 'none'")

    @model_validator(mode="after")
    def _can_connect(self) -> KVEventsSource:
        for field, endpoint in (("endpoint", self.endpoint), ("replay_endpoint", self.replay_endpoint)):
            if endpoint is not None:
                _check_endpoint(field, endpoint, self.dp_ranks)
        return self

    def endpoints(self, rank: int) -> tuple[str, str | None]:
        """Where data-parallel rank `rank` publishes, and where it answers for replay."""
        replay = self.replay_endpoint
        return _of_rank(self.endpoint, rank), None if replay is None else _of_rank(replay, rank)

    def is_on_this_node(self) -> bool:
        """Whether `endpoint` means the node where it is used, whichever that is."""
        scheme, _, rest = self.endpoint.partition("://")
        host = rest.rpartition(":")[0].strip("[]")
        try:
            return scheme == "ipc" or host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False


def _check_endpoint(field: str, endpoint: str, ranks: int) -> None:
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host and "*" not in host and port.isascii() and port.isdigit():
        if 0 < int(port) <= _MAX_PORT + 1 - ranks:
            return
    elif scheme == "ipc" and rest and ranks == 1:
        return
    raise ValueError(f"{field}: got {endpoint!r}, expected {_ENDPOINT}")


def _of_rank(endpoint: str, rank: int) -> str:
    # As `offset_endpoint_port` of vllm/distributed/kv_events.py (vLLM, Apache-2.0) does it.
    head, _, port = endpoint.rpartition(":")
    return f"{head}:{int(port) + rank}" if rank else endpoint


class CacheConfig(BaseModel):
    """Settings of one cache service; immutable, comparable and picklable.

    Build it with :meth:`load`, or directly from keyword arguments, which reads neither files nor the environment.
    Numbers and booleans are accepted as text too (``"256"``, ``"yes"``), because the environment has nothing else.

    Each field's ``description`` completes the sentence "expected ..." in the error for a wrong value.

    Raises:
        ConfigError: a key is unknown or a value is wrong.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    chunk_size: _Int = Field(256, gt=0, le=_INT32_MAX, description=f"a whole number of tokens from 1 to {_INT32_MAX}")
    enable_hidden_state_cache: bool = Field(False, description="true or false")
    max_hidden_state_cpu_size: _Float = Field(
        2.0, gt=0, le=_MAX_GIB, description=f"a number of GiB per node greater than 0 and at most {_MAX_GIB}"
    )
    hidden_state_layers: tuple[_Layer, ...] | None = Field(
        None, description="a list of whole numbers (in text: separated by commas), or null to accept every layer"
    )
    save_unfull_chunk: bool = Field(False, description="true or false")
    hidden_states_retrieve_mode: Literal["prefix_strict"] = Field("prefix_strict", description="'prefix_strict'")
    node_selector: Literal["auto", "gpu", "all"] | NodeRequirements = Field(
        "auto",
        description="'auto', 'gpu', 'all', or a mapping with one or both of labels: {name: text} and "
        "resources: {name: number > 0}",
    )
    kv_source: Literal["reports", "lmcache", "vllm_events", "none"] = Field(
        "reports", description="'reports', 'lmcache', 'vllm_events' or 'none'"
    )
    pre_caching_hash_algorithm: str = Field(
        LMCACHE_HASHES[0], description=f"with kv_source 'lmcache', one of {', '.join(map(repr, LMCACHE_HASHES))}"
    )
    kv_hash_seed: str | None = Field(
        None, description="with kv_source 'lmcache', the PYTHONHASHSEED of engines that run in vLLM, or null"
    )
    rpc_timeout_s: _Float = Field(
        2.0, gt=0, le=_DAY_S, description=f"a number of seconds greater than 0 and at most {_DAY_S}"
    )
    max_leased_fraction: _Float = Field(0.5, gt=0, le=1, description="a number greater than 0 and at most 1")
    kv_index_capacity: _Int = Field(
        262_144, gt=0, le=_INT32_MAX, description=f"a whole number of chunks per node from 1 to {_INT32_MAX}"
    )
    kv_events: tuple[KVEventsSource, ...] = Field(
        (),
        validate_default=True,
        description="a list of mappings with endpoint, and where they differ from the defaults replay_endpoint, topic, "
        "model, dp_ranks, block_size and extra_keys",
    )

    def __init__(self, origins: Mapping[str, str] | None = None, /, **values: Any) -> None:
        """Validate `values`; `origins` says for each key where its value came from, for the error messages."""
        origins = origins or {}
        _refuse_unknown(values, "the arguments", known=type(self).model_fields)
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError("; ".join(_complaints(error, values, origins))) from None

    @field_validator("hidden_state_layers", mode="before")
    @classmethod
    def _layers_from_text(cls, value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool):
            return [value]  # LMCache takes a lone number for a list of one
        if not isinstance(value, str):
            return value
        text = value.strip()
        if text.lower() in ("null", "none"):
            return None
        parts = text.removeprefix("[").removesuffix("]").split(",")
        if len(parts) > 1 and not parts[-1].strip():
            parts.pop()
        return [] if text == "[]" else [part.strip() for part in parts]

    @field_validator("hidden_state_layers", mode="after")
    @classmethod
    def _layers_are_a_set(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return None if value is None else tuple(sorted(set(value)))

    @field_validator("hidden_states_retrieve_mode", mode="before")
    @classmethod
    def _only_prefix_strict(cls, value: object) -> object:
        # The spellings are those of lmcache/v1/config.py, `_to_hidden_states_retrieve_mode`, in lmcache 0.5.6.
        if value is None:
            return "prefix_strict"
        text = str(value).strip().lower().replace("-", "_")
        if text in ("skip_missing_chunks", "skipmissingchunks", "legacy"):
            raise ValueError(
                "a hole in the prefix would hand the next stage rows at wrong positions, "
                "and nothing in the result would tell which rows are missing"
            )
        return "prefix_strict" if text in ("prefix_strict", "prefixstrict") else value

    @field_validator("pre_caching_hash_algorithm", mode="after")
    @classmethod
    def _hash_is_known(cls, value: str, info: ValidationInfo) -> str:
        # LMCache has more of them; a file that serves both must load where nobody asks for chunks by these hashes.
        if info.data.get("kv_source") == "lmcache" and value not in LMCACHE_HASHES:
            raise ValueError("chunk hashes of that kind can't be computed here")
        return value

    @field_validator("kv_hash_seed", mode="before")
    @classmethod
    def _seed_from_number(cls, value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)  # YAML takes 0 for a number, the environment for text
        return None if isinstance(value, str) and value.lower() in ("null", "none") else value

    @field_validator("kv_hash_seed", mode="after")
    @classmethod
    def _seed_of_builtin_is_a_number(cls, value: str | None, info: ValidationInfo) -> str | None:
        builtin = info.data.get("pre_caching_hash_algorithm") == LMCACHE_HASHES[0]
        if info.data.get("kv_source") == "lmcache" and builtin and value is not None and not is_hash_seed(value):
            raise ValueError(
                "with pre_caching_hash_algorithm 'builtin' only digits, less than 2**32, make Python's hashes the same "
                "in all processes"
            )
        return value

    @field_validator("node_selector", mode="before")
    @classmethod
    def _selector_from_text(cls, value: object) -> object:
        if isinstance(value, str) and value.lstrip().startswith("{"):
            return _parse_yaml(value)
        return value

    @field_validator("kv_events", mode="before")
    @classmethod
    def _events_from_text(cls, value: object) -> object:
        if isinstance(value, str):
            value = _parse_yaml(value)
        return () if value is None else value

    @field_validator("kv_events", mode="after")
    @classmethod
    def _events_of_one_kind_per_model(
        cls, value: tuple[KVEventsSource, ...], info: ValidationInfo
    ) -> tuple[KVEventsSource, ...]:
        if not value and info.data.get("kv_source") == "vllm_events":
            raise ValueError("kv_source vllm_events needs at least one engine to listen to")
        kv_source, chunk_size = info.data.get("kv_source"), info.data.get("chunk_size")
        for i, source in enumerate(value):
            if kv_source == "vllm_events" and chunk_size is not None and chunk_size % source.block_size:
                raise ValueError(
                    f"kv_events[{i}].block_size is {source.block_size}, of which chunk_size {chunk_size} is no multiple"
                )
        taken: dict[str, str] = {}
        for i, source in enumerate(value):
            for rank in range(source.dp_ranks):
                for field, endpoint in zip(("endpoint", "replay_endpoint"), source.endpoints(rank), strict=True):
                    name = f"kv_events[{i}].{field}" + (f" of rank {rank}" if rank else "")
                    if endpoint is not None and taken.setdefault(endpoint, name) != name:
                        raise ValueError(f"{name} and {taken[endpoint]} are both {endpoint}")
        sizes = {(source.model, source.block_size) for source in value}
        if len(sizes) > len({model for model, _ in sizes}):
            raise ValueError("engines of one model need the same block_size, as it is part of how chunks are named")
        return value

    @property
    def max_hidden_state_cpu_bytes(self) -> int:
        """Pool size per node in bytes: ``max_hidden_state_cpu_size`` GiB, rounded up to a whole byte."""
        return math.ceil(self.max_hidden_state_cpu_size * 2**30)

    def differences(self, running: CacheConfig) -> list[str]:
        """Which settings that are set here a running service has otherwise, as text.

        Whether a client wants the cache says nothing of how a service runs, and ``auto`` is what it has decided on.
        """
        asked = {name: getattr(self, name) for name in sorted(self.model_fields_set - {"enable_hidden_state_cache"})}
        return [
            f"{name} is {getattr(running, name)!r}, asked for {value!r}"
            for name, value in asked.items()
            if getattr(running, name) != value and value != "auto"
        ]

    def is_set(self, name: str) -> bool:
        """Whether a file, a mapping, the environment or a keyword gave `name` a value, be it the default's.

        Tells an explicit ``enable_hidden_state_cache: false`` from saying nothing. Survives pickling; takes no part in
        ``==``.

        Raises:
            InvalidInputError: there is no such setting.
        """
        known = type(self).model_fields
        if name not in known:
            raise InvalidInputError(f"name: got {name!r}, expected one of {', '.join(known)}")
        return name in self.model_fields_set

    @classmethod
    def load(
        cls,
        source: str | Path | Mapping[str, Any] | CacheConfig | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> CacheConfig:
        """Read the configuration. Blocks for reading one small file.

        Args:
            source: Path of a YAML file, a mapping of keys to values, or None for the file that ``HS_CACHE_CONFIG_FILE``
                or ``LMCACHE_CONFIG_FILE`` names, if any. A CacheConfig is returned as it is: it is a finished decision,
                and the environment of whichever process it travels to must not change it.
            environ: Environment variables; ``os.environ`` when None.

        Raises:
            ConfigError: a file that is missing, not UTF-8, not YAML or not a mapping, an unknown key, or a wrong value.
        """
        if isinstance(source, CacheConfig):
            return source
        if environ is None:
            environ = os.environ
        document, origin = _read_source(source, environ)
        values = _without_foreign_keys(document, origin, cls.model_fields)
        origins = dict.fromkeys(values, origin)
        for name, (variable, text) in _read_environ(environ, cls.model_fields).items():
            values[name], origins[name] = text, variable
        return cls(origins, **values)


def _read_source(
    source: str | Path | Mapping[str, Any] | None, environ: Mapping[str, str]
) -> tuple[Mapping[Any, Any], str]:
    """The raw keys and values, and words for where they came from."""
    if isinstance(source, Mapping):
        return source, "the mapping given"
    if source is None:
        named = environ.get(_OWN_PREFIX + _FILE_SUFFIX) or environ.get(_LMCACHE_PREFIX + _FILE_SUFFIX)
        if not named:
            return {}, "nowhere"
        source = named
    if not isinstance(source, str | Path):
        raise ConfigError(
            f"config: got {_shown(source)}, expected the path of a YAML file, a mapping, a CacheConfig or None"
        )
    return _read_file(Path(source)), str(source)


def _read_file(path: Path) -> Mapping[Any, Any]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text, got other bytes at offset {error.start}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        raise ConfigError(f"{path}: the configuration file cannot be read: {error}") from error
    try:
        document = _parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if document is None:  # an empty file, or comments only
        return {}
    if not isinstance(document, Mapping):
        raise ConfigError(f"{path}: got {_shown(document)}, expected a mapping of keys to values")
    return document


def _parse_yaml(text: str) -> object:
    try:
        return yaml.safe_load(text)
    # PyYAML lets a date like 2026-13-45 out as a bare ValueError, and deep nesting as a RecursionError.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"not valid YAML: {error}") from error


def _read_environ(environ: Mapping[str, str], known: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Setting name -> (variable, text) for all that are set and not empty. LMCache's other variables are left alone."""
    names = {name.upper(): name for name in known}
    found: dict[str, tuple[str, str]] = {}
    for prefix in (_LMCACHE_PREFIX, _OWN_PREFIX):  # ours last, so that it wins
        for suffix, name in names.items():
            text = _unquoted(environ.get(prefix + suffix, ""))
            if text:
                found[name] = (prefix + suffix, text)
    unknown = [
        variable
        for variable, text in environ.items()
        if variable.startswith(_OWN_PREFIX)
        and text
        and variable.removeprefix(_OWN_PREFIX) not in (*names, _FILE_SUFFIX)
    ]
    _refuse_unknown(unknown, "the environment", known=[_OWN_PREFIX + suffix for suffix in (*names, _FILE_SUFFIX)])
    return found


def _unquoted(text: str) -> str:
    text = text.strip()
    # Env files of container runtimes keep quotes that a shell would have removed.
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1].strip()
    return text


def _without_foreign_keys(document: Mapping[Any, Any], origin: str, known: Iterable[str]) -> dict[str, Any]:
    """`document` less the keys that are LMCache's alone, which are named in one INFO line."""
    known = frozenset(known)
    foreign = [key for key in document if key not in known and _is_lmcache_key(key)]
    if foreign:
        _LOG.info("%s: ignoring keys that only LMCache uses: %s", origin, ", ".join(sorted(foreign)))
    ours = {key: value for key, value in document.items() if key not in foreign}
    _refuse_unknown(ours, origin, known=known, also_suggest=LMCACHE_KEYS)
    return ours


def _is_lmcache_key(key: object) -> bool:
    # `ec:` and `ec_<key>` set a second engine of LMCache's (lmcache/v1/config.py, `_collect_ec_overrides_from_file`).
    return isinstance(key, str) and (key == "ec" or key.removeprefix("ec_") in LMCACHE_KEYS)


def _refuse_unknown(
    keys: Iterable[object], origin: str, *, known: Iterable[str], also_suggest: Iterable[str] = ()
) -> None:
    known = list(known)
    unknown = [key for key in keys if key not in known]
    if not unknown:
        return
    suggested = [*known, *also_suggest]
    complaints = [_unknown_key(f"unknown key {_shown(key)} in {origin}", str(key), suggested) for key in unknown]
    raise ConfigError("; ".join(complaints) + f" (known keys: {', '.join(sorted(known))})")


def _complaints(error: ValidationError, values: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    """One sentence per wrong setting, in the order of the fields; of a list of mappings one per wrong key."""
    complaints: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        name = str(detail["loc"][0])
        # Only our own validators know more than the field's description does.
        own = str(detail["ctx"]["error"]) if detail["type"] == "value_error" else ""
        origin = f" from {origins[name]}" if name in origins else ""
        where = ".".join([f"{name}[{detail['loc'][1]}]", *map(str, detail["loc"][2:3])]) if detail["loc"][1:] else name
        if name == "kv_events" and where != name:
            complaints.setdefault(where, _nested_complaint(detail, where, origin, own))
        elif own or name not in complaints:
            expected = CacheConfig.model_fields[name].description
            complaints[name] = f"{name}: got {_shown(values.get(name))}{origin}, expected {expected}" + (
                f": {own}" if own else ""
            )
    return list(complaints.values())


def _nested_complaint(detail: ErrorDetails, where: str, origin: str, own: str) -> str:
    """What is wrong with an entry of ``kv_events``, or with a key of it."""
    entry, _, key = where.partition(".")
    if own and not key:
        return f"{entry}.{own}"
    if detail["type"] == "extra_forbidden":
        return _unknown_key(f"{entry}: unknown key {key!r}{origin}", key, KVEventsSource.model_fields)
    if detail["type"] == "missing":
        return f"{entry}: lacks the key {key!r}{origin}"
    expected = KVEventsSource.model_fields[key].description if key else "a mapping"
    return f"{where}: got {_shown(detail['input'])}{origin}, expected {expected}" + (f": {own}" if own else "")


def _unknown_key(complaint: str, key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return complaint + (f"; did you mean {near[0]!r}?" if near else "")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."
