import logging
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hs_cache.config import LMCACHE_KEYS, CacheConfig, NodeRequirements
from hs_cache.errors import ConfigError, InvalidInputError

# As LMCache's documentation shows it, with keys of its KV side around it.
LMCACHE_YAML = """
chunk_size: 128
local_cpu: true
max_local_cpu_size: 20
remote_url: "redis://localhost:6379"
nixl_role: sender        # a deprecated name
ec_chunk_size: 32        # its second engine
ec: {local_cpu: true}
extra_config: {some: thing}
enable_hidden_state_cache: true
max_hidden_state_cpu_size: 4          # GiB, pinned CPU pool size
hidden_state_layers: [0, 1]
"""

WRONG = [
    ("pre_caching_hash_algorithm", None),
    ("pre_caching_hash_algorithm", 1),
    ("kv_hash_seed", True),
    ("kv_hash_seed", ["0"]),
    ("chunk_size", 0),
    ("chunk_size", -1),
    ("chunk_size", True),
    ("chunk_size", 1.5),
    ("chunk_size", "many"),
    ("chunk_size", None),
    ("chunk_size", 2**31),
    ("enable_hidden_state_cache", "perhaps"),
    ("enable_hidden_state_cache", 2),
    ("enable_hidden_state_cache", None),
    ("max_hidden_state_cpu_size", 0),
    ("max_hidden_state_cpu_size", -2.0),
    ("max_hidden_state_cpu_size", True),
    ("max_hidden_state_cpu_size", math.nan),
    ("max_hidden_state_cpu_size", math.inf),
    ("max_hidden_state_cpu_size", 1e300),
    ("max_hidden_state_cpu_size", "4GiB"),
    ("hidden_state_layers", [0, "x"]),
    ("hidden_state_layers", [True]),
    ("hidden_state_layers", [0.5]),
    ("hidden_state_layers", "0,,1"),
    ("hidden_state_layers", ","),
    ("hidden_state_layers", True),
    ("hidden_state_layers", [2**63]),
    ("save_unfull_chunk", "si"),
    ("hidden_states_retrieve_mode", "lenient"),
    ("node_selector", "gpus"),
    ("node_selector", 1),
    ("node_selector", None),
    ("node_selector", {}),
    ("node_selector", {"labels": {}}),
    ("node_selector", {"label": {"zone": "a"}}),
    ("node_selector", {"labels": {"zone": 1}}),
    ("node_selector", {"labels": {"": "a"}}),
    ("node_selector", {"labels": ["zone"]}),
    ("node_selector", {"resources": {"GPU": 0}}),
    ("node_selector", {"resources": {"GPU": True}}),
    ("node_selector", {"resources": {"GPU": math.inf}}),
    ("kv_source", "lmcash"),
    ("kv_source", None),
    ("rpc_timeout_s", 0),
    ("rpc_timeout_s", -1),
    ("rpc_timeout_s", math.inf),
    ("rpc_timeout_s", math.nan),
    ("max_leased_fraction", 0),
    ("max_leased_fraction", 1.01),
    ("max_leased_fraction", True),
    ("kv_index_capacity", 0),
    ("kv_index_capacity", 2.5),
    ("kv_events", 1),
    ("kv_events", {"endpoint": "tcp://127.0.0.1:5557"}),
    ("kv_events", [{"endpoint": "tcp://h:1", "block_size": 8}, {"endpoint": "tcp://h:2"}]),
]

ADDRESS = "expected tcp://HOST:PORT, or ipc://PATH for a single rank"
WRONG_ENTRIES: list[tuple[Any, str]] = [
    ("tcp://127.0.0.1:5557", "kv_events[1]: got 'tcp://127.0.0.1:5557', expected a mapping"),
    ({}, "kv_events[1]: lacks the key 'endpoint'"),
    ({"endpoint": 5557}, f"kv_events[1].endpoint: got 5557, {ADDRESS}"),
    *(
        ({"endpoint": address}, f"kv_events[1].endpoint: got {address!r}, {ADDRESS}")
        for address in (
            "",
            "tcp://*:5557",
            "tcp://127.0.0.1",
            "tcp://127.0.0.1:0",
            "tcp://127.0.0.1:65536",
            "udp://127.0.0.1:5557",
            "inproc://events",
            "ipc://",
        )
    ),
    ({"endpoint": "ipc:///tmp/e", "dp_ranks": 2}, f"kv_events[1].endpoint: got 'ipc:///tmp/e', {ADDRESS}"),
    ({"endpoint": "tcp://h:65535", "dp_ranks": 2}, f"kv_events[1].endpoint: got 'tcp://h:65535', {ADDRESS}"),
    ({"endpoint": "tcp://h:1", "replay_endpoint": "h:2"}, f"kv_events[1].replay_endpoint: got 'h:2', {ADDRESS}"),
    ({"endpoint": "tcp://h:1", "replay": "x"}, "kv_events[1]: unknown key 'replay'"),
    (
        {"endpoint": "tcp://h:1", "block_sise": 8},
        "kv_events[1]: unknown key 'block_sise'; did you mean 'block_size'?",
    ),
    ({"endpoint": "tcp://h:1", "topic": 1}, "kv_events[1].topic: got 1, expected text"),
    ({"endpoint": "tcp://h:1", "model": None}, "kv_events[1].model: got None, expected text"),
    ({"endpoint": "tcp://h:1", "dp_ranks": 0}, "kv_events[1].dp_ranks: got 0, expected a whole number of ranks"),
    ({"endpoint": "tcp://h:1", "dp_ranks": True}, "kv_events[1].dp_ranks: got True, expected a whole number of ranks"),
    ({"endpoint": "tcp://h:1", "block_size": "x"}, "kv_events[1].block_size: got 'x', expected a whole number of"),
    ({"endpoint": "tcp://h:1", "extra_keys": "some"}, "kv_events[1].extra_keys: got 'some', expected 'auto', 'off"),
]

MEETING: list[tuple[list[dict[str, Any]], str]] = [
    (
        [{"endpoint": "tcp://h:1"}, {"endpoint": "tcp://h:1"}],
        "kv_events[1].endpoint and kv_events[0].endpoint are both",
    ),
    (
        [{"endpoint": "tcp://h:1", "dp_ranks": 3}, {"endpoint": "tcp://h:3"}],
        "kv_events[1].endpoint and kv_events[0].endpoint of rank 2 are both tcp://h:3",
    ),
    (
        [{"endpoint": "tcp://h:1", "replay_endpoint": "tcp://h:1"}],
        "kv_events[0].replay_endpoint and kv_events[0].endpoint are both tcp://h:1",
    ),
    (
        [{"endpoint": "tcp://h:1", "dp_ranks": 4, "replay_endpoint": "tcp://h:2"}],
        "kv_events[0].endpoint of rank 1 and kv_events[0].replay_endpoint are both tcp://h:2",
    ),
    (
        [{"endpoint": "tcp://h:1", "dp_ranks": 4}, {"endpoint": "tcp://h:9", "replay_endpoint": "tcp://h:4"}],
        "kv_events[1].replay_endpoint and kv_events[0].endpoint of rank 3 are both tcp://h:4",
    ),
]


def load(source: Any = None, **environ: str) -> CacheConfig:
    return CacheConfig.load(source, environ=environ)


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "config.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_defaults() -> None:
    assert load().model_dump() == {
        "chunk_size": 256,
        "enable_hidden_state_cache": False,
        "max_hidden_state_cpu_size": 2.0,
        "hidden_state_layers": None,
        "save_unfull_chunk": False,
        "hidden_states_retrieve_mode": "prefix_strict",
        "node_selector": "auto",
        "kv_source": "reports",
        "pre_caching_hash_algorithm": "builtin",
        "kv_hash_seed": None,
        "rpc_timeout_s": 2.0,
        "max_leased_fraction": 0.5,
        "kv_index_capacity": 262_144,
        "kv_events": (),
    }


def test_lmcache_file_loads_and_its_other_keys_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, LMCACHE_YAML)
    with caplog.at_level(logging.INFO, logger="hs_cache.config"):
        config = load(path)
    assert (config.chunk_size, config.enable_hidden_state_cache, config.hidden_state_layers) == (128, True, (0, 1))
    assert config.max_hidden_state_cpu_bytes == 4 * 2**30
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage() == (
        f"{path}: ignoring keys that only LMCache uses: "
        "ec, ec_chunk_size, extra_config, local_cpu, max_local_cpu_size, nixl_role, remote_url"
    )


def test_every_lmcache_key_is_read_or_ignored() -> None:
    shared = LMCACHE_KEYS & set(CacheConfig.model_fields)
    assert shared == {
        "chunk_size",
        "enable_hidden_state_cache",
        "hidden_state_layers",
        "hidden_states_retrieve_mode",
        "max_hidden_state_cpu_size",
        "pre_caching_hash_algorithm",
        "save_unfull_chunk",
    }
    assert load(dict.fromkeys(LMCACHE_KEYS - shared, "anything")) == load()


def test_own_keys_alone_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        load({"chunk_size": 4}, LMCACHE_LOCAL_CPU="true")
    assert caplog.records == []


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_value_names_key_value_and_what_was_expected(name: str, value: Any) -> None:
    description = CacheConfig.model_fields[name].description
    for build in (lambda: load({name: value}), lambda: CacheConfig(**{name: value})):
        with pytest.raises(ConfigError) as caught:
            build()
        message = str(caught.value)
        assert message.startswith(f"{name}: got {value!r}")
        assert f"expected {description}" in message
        assert "pydantic" not in message


def test_every_setting_says_what_it_expects() -> None:
    assert all(field.description for field in CacheConfig.model_fields.values())
    assert {name for name, _ in WRONG} == set(CacheConfig.model_fields)


def test_all_wrong_values_are_reported_with_their_own_source(tmp_path: Path) -> None:
    path = write(tmp_path, "chunk_size: 0\nrpc_timeout_s: 1\n")
    with pytest.raises(ConfigError) as caught:
        load(path, HS_CACHE_KV_SOURCE="x")
    assert f"chunk_size: got 0 from {path}, expected" in str(caught.value)
    assert "; kv_source: got 'x' from HS_CACHE_KV_SOURCE, expected" in str(caught.value)
    assert "rpc_timeout_s" not in str(caught.value)


def test_a_hash_of_lmcaches_that_cannot_be_computed_is_wrong_only_where_it_matters() -> None:
    assert load({"pre_caching_hash_algorithm": "sha256"}).pre_caching_hash_algorithm == "sha256"
    with pytest.raises(
        ConfigError, match="pre_caching_hash_algorithm: got 'sha256', expected with kv_source 'lmcache'"
    ):
        CacheConfig(kv_source="lmcache", pre_caching_hash_algorithm="sha256")


@pytest.mark.parametrize(("given", "seed"), [(0, "0"), ("0", "0"), ("null", None), (None, None), ("random", "random")])
def test_a_seed_is_text(given: Any, seed: str | None) -> None:
    assert load({"kv_hash_seed": given}).kv_hash_seed == seed


@pytest.mark.parametrize("seed", ["abc", "", "random", "-1", "4294967296", "\u0663"])
def test_a_seed_that_python_cannot_hash_by_is_wrong_only_where_it_matters(seed: str) -> None:
    asked = {"kv_source": "lmcache", "kv_hash_seed": seed}
    with pytest.raises(
        ConfigError, match=r"kv_hash_seed: got .*: with pre_caching_hash_algorithm 'builtin' only digits"
    ):
        load(asked)
    assert load({**asked, "kv_source": "reports"}).kv_hash_seed == seed
    assert load({**asked, "pre_caching_hash_algorithm": "sha256_cbor"}).kv_hash_seed == seed
    assert load({**asked, "kv_hash_seed": "4294967295"}).kv_hash_seed == "4294967295"


KV_EVENTS = """
- {endpoint: "tcp://127.0.0.1:5557", replay_endpoint: "tcp://127.0.0.1:5657", model: a, dp_ranks: 2}
- endpoint: tcp://[::1]:6000
  topic: kv
  block_size: 32
- {endpoint: "ipc:///tmp/events", extra_keys: none, model: a}
"""


def test_engines_to_listen_to_come_from_yaml_or_from_text(tmp_path: Path) -> None:
    indented = "\n".join("  " + line for line in KV_EVENTS.splitlines())
    in_file = load(write(tmp_path, f"kv_source: vllm_events\nkv_events:\n{indented}\n"))
    config = load(HS_CACHE_KV_SOURCE="vllm_events", HS_CACHE_KV_EVENTS=KV_EVENTS)
    assert config.kv_events == in_file.kv_events
    one, two, three = config.kv_events
    assert one.endpoints(0) == ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657")
    assert one.endpoints(1) == ("tcp://127.0.0.1:5558", "tcp://127.0.0.1:5658")
    assert two.endpoints(0) == ("tcp://[::1]:6000", None)
    assert (one.block_size, one.topic, one.extra_keys) == (16, "", "auto")
    assert (two.block_size, two.topic, two.model) == (32, "kv", "")
    assert three.extra_keys == "none"
    assert pickle.loads(pickle.dumps(config)) == config
    assert load({"kv_events": None}).kv_events == ()


def test_the_example_of_the_documentation_loads(tmp_path: Path) -> None:
    text = Path(__file__).parents[2].joinpath("docs/kv_events.md").read_text(encoding="utf-8")
    (source,) = load(write(tmp_path, text.split("```yaml\n")[1].split("```")[0])).kv_events
    assert (source.model, source.dp_ranks, source.endpoints(1)[1]) == ("thinker", 2, "tcp://127.0.0.1:5658")
    (variable,) = load(
        HS_CACHE_KV_SOURCE="vllm_events", HS_CACHE_KV_EVENTS=text.split("HS_CACHE_KV_EVENTS='")[1].split("'")[0]
    ).kv_events
    assert variable.endpoint == source.endpoint


@pytest.mark.parametrize(("entry", "message"), WRONG_ENTRIES)
def test_a_wrong_entry_of_a_list_is_named_with_its_key(entry: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CacheConfig(kv_events=[{"endpoint": "tcp://127.0.0.1:5000"}, entry])
    assert str(caught.value).startswith(message)
    assert ";" not in message or str(caught.value) == message


def test_all_wrong_entries_are_named_with_their_source() -> None:
    with pytest.raises(ConfigError) as caught:
        load(HS_CACHE_KV_EVENTS='[{dp_ranks: 0, endpoint: "tcp://h:1", tropic: x}, {}]')
    assert str(caught.value).split("; ") == [
        "kv_events[0].dp_ranks: got 0 from HS_CACHE_KV_EVENTS, expected a whole number of ranks from 1 to 1024",
        "kv_events[0]: unknown key 'tropic' from HS_CACHE_KV_EVENTS",
        "did you mean 'topic'?",
        "kv_events[1]: lacks the key 'endpoint' from HS_CACHE_KV_EVENTS",
    ]


@pytest.mark.parametrize(("entries", "message"), MEETING)
def test_engines_and_ranks_that_would_share_an_address_are_refused(entries: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"kv_events": entries})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.1.2.3:1", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:1", True),
        ("ipc:///tmp/events", True),
        ("tcp://10.0.0.1:1", False),
        ("tcp://engine:1", False),
        ("tcp://[fe80::1]:1", False),
    ],
)
def test_which_engines_are_on_the_node_that_listens(endpoint: str, local: bool) -> None:
    (source,) = load({"kv_events": [{"endpoint": endpoint}]}).kv_events
    assert source.is_on_this_node() is local


def test_chunks_must_be_whole_blocks_where_events_are_listened_to() -> None:
    entries = [{"endpoint": "tcp://h:1", "block_size": 8}, {"endpoint": "tcp://h:2", "model": "m"}]
    with pytest.raises(ConfigError, match=r"kv_events\[1\]\.block_size is 16, of which chunk_size 8 is no multiple"):
        load({"kv_source": "vllm_events", "chunk_size": 8, "kv_events": entries})
    assert load({"chunk_size": 8, "kv_events": entries}).kv_source == "reports"


def test_listening_needs_engines_to_listen_to() -> None:
    for values in ({"kv_source": "vllm_events"}, {"kv_source": "vllm_events", "kv_events": []}):
        with pytest.raises(ConfigError, match=r"kv_events: .* vllm_events needs at least one engine to listen to"):
            load(values)
    with pytest.raises(ConfigError, match="not valid YAML"):
        load(HS_CACHE_KV_EVENTS="[")


def test_long_values_are_shortened_in_messages() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"kv_source": "x" * 10_000})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("spelling", ["skip_missing_chunks", "skip-missing-chunks", "SkipMissingChunks", "legacy"])
def test_skipping_missing_chunks_is_refused_with_the_reason(spelling: str) -> None:
    with pytest.raises(ConfigError, match="a hole in the prefix would hand the next stage rows at wrong positions"):
        load({"hidden_states_retrieve_mode": spelling})


@pytest.mark.parametrize("spelling", ["prefix_strict", "prefix-strict", "PrefixStrict", None])
def test_prefix_strict_in_lmcaches_spellings(spelling: str | None) -> None:
    assert load({"hidden_states_retrieve_mode": spelling}).hidden_states_retrieve_mode == "prefix_strict"


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("chunk_szie", "chunk_size"),
        ("Chunk_Size", "chunk_size"),
        ("max_hidden_cpu_size", "max_hidden_state_cpu_size"),
        ("max_local_cpu_siz", "max_local_cpu_size"),
        ("rpc_timeout", "rpc_timeout_s"),
    ],
)
def test_unknown_key_suggests_the_nearest_and_names_the_file(tmp_path: Path, key: str, suggestion: str) -> None:
    path = write(tmp_path, f"{key}: 1\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert f"unknown key {key!r} in {path}; did you mean {suggestion!r}?" in str(caught.value)


@pytest.mark.parametrize("key", ["service", "zzzzzz", 5, True, None])
def test_unknown_key_without_a_near_one_lists_the_known(key: object) -> None:
    with pytest.raises(ConfigError, match="known keys: chunk_size, enable_hidden_state_cache,") as caught:
        load({key: 1})
    assert f"unknown key {key!r}" in str(caught.value)


def test_unknown_keyword_argument() -> None:
    with pytest.raises(ConfigError, match="did you mean 'chunk_size'"):
        CacheConfig(chunk_siz=4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- chunk_size\n", "expected a mapping"),
        ("chunk_size", "expected a mapping"),
        ("chunk_size: [1\n", "not valid YAML"),
        ("chunk_size: 2026-13-45\n", "not valid YAML"),
        ("? [a]\n: 1\n", "not valid YAML"),
        ("a: " + "[" * 5000, "not valid YAML"),
        ("chunk_size: !!python/object/apply:os.getpid []\n", "not valid YAML"),
        (b"chunk_size: 4 # \xff\n", "UTF-8 text, got other bytes at offset 16"),
    ],
)
def test_unusable_file(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ConfigError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("content", ["", "# nothing\n", "---\n", "{}\n", b"\xef\xbb\xbf{}\n"])
def test_empty_file_is_the_defaults(tmp_path: Path, content: str | bytes) -> None:
    config = load(write(tmp_path, content))
    assert config == load()
    assert not config.model_fields_set


@pytest.mark.parametrize("name", ["missing.yaml", ".", "", "a\0b"])
def test_unreadable_path(tmp_path: Path, name: str) -> None:
    for path in (tmp_path / name, str(tmp_path / name)):
        with pytest.raises(ConfigError, match="cannot be read"):
            load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(HS_CACHE_CONFIG_FILE=str(tmp_path / name) + "/")


@pytest.mark.parametrize("source", [5, b"config.yaml", ["chunk_size"], object()])
def test_source_of_a_wrong_type(source: Any) -> None:
    with pytest.raises(ConfigError, match=r"config: got .*, expected the path of a YAML file, a mapping"):
        load(source)


def test_file_from_the_environment(tmp_path: Path) -> None:
    ours, theirs, given_path = (tmp_path / name for name in ("ours.yaml", "theirs.yaml", "given.yaml"))
    for size, path in enumerate((ours, theirs, given_path), start=1):
        path.write_text(f"chunk_size: {size}\n")
    both = {"HS_CACHE_CONFIG_FILE": str(ours), "LMCACHE_CONFIG_FILE": str(theirs)}
    assert load(**both).chunk_size == 1
    assert load(LMCACHE_CONFIG_FILE=str(theirs)).chunk_size == 2
    assert load(HS_CACHE_CONFIG_FILE="", LMCACHE_CONFIG_FILE=str(theirs)).chunk_size == 2
    assert load(given_path, **both).chunk_size == 3
    assert load({}, **both).chunk_size == 256


def test_environment_wins_over_the_file_and_ours_over_lmcaches(tmp_path: Path) -> None:
    path = write(tmp_path, "chunk_size: 1\nrpc_timeout_s: 7\nkv_source: none\n")
    config = load(path, LMCACHE_CHUNK_SIZE="2", LMCACHE_KV_SOURCE="lmcache", HS_CACHE_CHUNK_SIZE="3")
    assert (config.chunk_size, config.kv_source, config.rpc_timeout_s) == (3, "lmcache", 7.0)


def test_os_environ_is_the_default_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HS_CACHE_CHUNK_SIZE", "12")
    assert CacheConfig.load().chunk_size == 12
    assert CacheConfig().chunk_size == 256


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("CHUNK_SIZE", " 64 ", 64),
        ("CHUNK_SIZE", '"64"', 64),
        ("ENABLE_HIDDEN_STATE_CACHE", "True", True),
        ("ENABLE_HIDDEN_STATE_CACHE", "1", True),
        ("ENABLE_HIDDEN_STATE_CACHE", "yes", True),
        ("ENABLE_HIDDEN_STATE_CACHE", "on", True),
        ("ENABLE_HIDDEN_STATE_CACHE", "false", False),
        ("SAVE_UNFULL_CHUNK", "off", False),
        ("MAX_HIDDEN_STATE_CPU_SIZE", "0.25", 0.25),
        ("RPC_TIMEOUT_S", "1e1", 10.0),
        ("HIDDEN_STATE_LAYERS", "0, 24", (0, 24)),
        ("HIDDEN_STATE_LAYERS", "-1", (-1,)),
        ("HIDDEN_STATE_LAYERS", "24,0,24,", (0, 24)),
        ("HIDDEN_STATE_LAYERS", "[1, 0]", (0, 1)),
        ("HIDDEN_STATE_LAYERS", "[]", ()),
        ("HIDDEN_STATE_LAYERS", "null", None),
        ("NODE_SELECTOR", "gpu", "gpu"),
        ("NODE_SELECTOR", "{resources: {GPU: 1}}", NodeRequirements(resources={"GPU": 1})),
        ("HIDDEN_STATES_RETRIEVE_MODE", "prefix_strict", "prefix_strict"),
    ],
)
def test_text_of_the_environment(name: str, text: str, value: object) -> None:
    for prefix in ("HS_CACHE_", "LMCACHE_"):
        config = load({"hidden_state_layers": [7]}, **{prefix + name: text})
        assert getattr(config, name.lower()) == value
        assert config.is_set(name.lower())


@pytest.mark.parametrize("text", ["", "  ", '""'])
def test_empty_variable_counts_as_not_set(text: str) -> None:
    config = load(HS_CACHE_HIDDEN_STATE_LAYERS=text, HS_CACHE_CHUNK_SIZE=text)
    assert config == load()
    assert not config.model_fields_set
    assert load({"hidden_state_layers": [3]}, HS_CACHE_HIDDEN_STATE_LAYERS=text).hidden_state_layers == (3,)
    assert load(LMCACHE_CHUNK_SIZE="4", HS_CACHE_CHUNK_SIZE=text).chunk_size == 4


def test_unknown_variables() -> None:
    with pytest.raises(
        ConfigError, match="'HS_CACHE_CHUNKSIZE' in the environment; did you mean 'HS_CACHE_CHUNK_SIZE'"
    ):
        load(HS_CACHE_CHUNKSIZE="4")
    with pytest.raises(ConfigError, match="did you mean 'HS_CACHE_CONFIG_FILE'"):
        load(HS_CACHE_CONFIG_FILES="x.yaml")
    with pytest.raises(ConfigError, match="unknown key 'HS_CACHE_chunk_size'"):
        load(HS_CACHE_chunk_size="4")
    assert load(LMCACHE_CHUNKSIZE="4", LMCACHE_LOCAL_CPU="x", HS_CACHED="1", CHUNK_SIZE="4") == load()


@pytest.mark.parametrize(
    ("given_layers", "layers"),
    [(None, None), ([], ()), ([24, 0, 24], (0, 24)), ((1,), (1,)), ({5, -1}, (-1, 5)), (3, (3,)), (["2", 1], (1, 2))],
)
def test_hidden_state_layers(given_layers: Any, layers: tuple[int, ...] | None) -> None:
    assert load({"hidden_state_layers": given_layers}).hidden_state_layers == layers


def test_node_selector_mapping(tmp_path: Path) -> None:
    path = write(tmp_path, "node_selector:\n  labels: {market-type: on-demand}\n  resources: {GPU: 1, ns2: 0.5}\n")
    selector = load(path).node_selector
    assert isinstance(selector, NodeRequirements)
    assert selector.labels == {"market-type": "on-demand"}
    assert selector.resources == {"GPU": 1.0, "ns2": 0.5}


def test_is_set_tells_explicit_defaults_from_silence(tmp_path: Path) -> None:
    assert not load().is_set("enable_hidden_state_cache")
    assert load({"enable_hidden_state_cache": False}).is_set("enable_hidden_state_cache")
    assert load(write(tmp_path, "enable_hidden_state_cache: false")).is_set("enable_hidden_state_cache")
    assert load(LMCACHE_ENABLE_HIDDEN_STATE_CACHE="false").is_set("enable_hidden_state_cache")
    explicit = CacheConfig(chunk_size=256)
    assert explicit.is_set("chunk_size")
    assert not explicit.is_set("kv_source")
    assert explicit == CacheConfig()
    with pytest.raises(InvalidInputError, match="got 'chunk', expected one of chunk_size"):
        explicit.is_set("chunk")


def test_a_config_is_taken_as_it_is() -> None:
    config = CacheConfig(chunk_size=4)
    assert load(config, HS_CACHE_CHUNK_SIZE="8") is config


def test_frozen() -> None:
    config = CacheConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.chunk_size = 4
    assert config.chunk_size == 256


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "chunk_size": st.integers(1, 2**31 - 1),
            "enable_hidden_state_cache": st.booleans(),
            "max_hidden_state_cpu_size": st.floats(1e-300, 2**20),
            "hidden_state_layers": st.none() | st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
            "node_selector": st.sampled_from(["auto", "gpu", "all", {"labels": {"zone": "a"}}]),
            "max_leased_fraction": st.floats(0, 1, exclude_min=True),
        },
    )
)
def test_round_trips(values: dict[str, Any]) -> None:
    config = load(values)
    assert config.max_hidden_state_cpu_bytes >= 1
    for copy in (pickle.loads(pickle.dumps(config)), load(config.model_dump(mode="json", exclude_unset=True))):
        assert copy == config
        assert copy.model_fields_set == set(values)


def test_loads_neither_torch_nor_ray() -> None:
    code = "import sys, hs_cache.config; print(sorted({'torch', 'ray'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
