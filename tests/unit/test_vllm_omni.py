"""How the connector joins vLLM-Omni, and what it makes of trouble; without Ray. tests/cluster has the real thing."""

import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hs_cache.errors import ConfigError, InvalidInputError, ServiceTimeoutError
from hs_cache.integrations import vllm_omni
from hs_cache.integrations.vllm_omni import CONNECTOR_NAME, HiddenStateCacheConnector
from hs_cache.leases import this_process
from tests.direct import REPOSITORY, Clock, DirectCache, Node, lost_call, lost_reply

BASE = """
from abc import ABC, abstractmethod

class OmniConnectorBase(ABC):
    supports_raw_data = False
    @abstractmethod
    def put(self, from_stage, to_stage, put_key, data): ...
    @abstractmethod
    def get(self, from_stage, to_stage, get_key, metadata=None): ...
    @abstractmethod
    def cleanup(self, request_id): ...
    @abstractmethod
    def health(self): ...
    @abstractmethod
    def close(self): ...
    def get_with_deadline(self, from_stage, to_stage, get_key, metadata=None, *, deadline):
        raise NotImplementedError
    def __del__(self):
        self.close()
    @staticmethod
    def serialize_obj(obj):
        return b"base"
"""
FACTORY = """
class OmniConnectorFactory:
    _registry = {}
    options = None

    @classmethod
    def register_connector(cls, name, constructor%s):
        if name in cls._registry:
            raise ValueError(f"Connector '{name}' is already registered.")
        cls._registry[name] = constructor
        cls.options = %s

    @classmethod
    def list_registered_connectors(cls):
        return list(cls._registry)
"""
SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from hs_cache.integrations import vllm_omni as ours
from vllm_omni.distributed.omni_connectors.connectors.base import OmniConnectorBase
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
ours.register()
ours.register()
made = ours.HiddenStateCacheConnector
refused = ""
try:
    OmniConnectorFactory._registry["HiddenStateCacheConnector"]({"service": 5})
except ValueError as error:
    refused = str(error)
print(json.dumps({
    "names": OmniConnectorFactory.list_registered_connectors(),
    "options": OmniConnectorFactory.options,
    "is_subclass": issubclass(made, OmniConnectorBase),
    "abstract": sorted(made.__abstractmethods__),
    "raw": made.supports_raw_data,
    "own_del": made.__del__ is not OmniConnectorBase.__del__,
    "inherited": made.serialize_obj(1).decode(),
    "refused": refused,
}))
"""


def fake_package(directory: Path, dual: bool) -> None:
    package = directory / "vllm_omni" / "distributed" / "omni_connectors"
    (package / "connectors").mkdir(parents=True)
    for folder in (package.parent.parent, package.parent, package, package / "connectors"):
        (folder / "__init__.py").touch()
    (package / "connectors" / "base.py").write_text(BASE)
    options = (", *, supports_dual=False", '{"supports_dual": supports_dual}') if dual else ("", "{}")
    (package / "factory.py").write_text(FACTORY % options)


@pytest.mark.parametrize("dual", [False, True], ids=["an older release", "main"])
def test_it_registers_itself(tmp_path: Path, dual: bool) -> None:
    fake_package(tmp_path, dual)
    line = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "names": [CONNECTOR_NAME],
        "options": {"supports_dual": True} if dual else {},
        "is_subclass": True,
        "abstract": [],
        "raw": True,
        "own_del": True,
        "inherited": "base",
        "refused": "service: got 5, expected str",
    }
    assert "Exception ignored" not in done.stderr


@pytest.mark.skipif(find_spec("vllm_omni") is not None, reason="vLLM-Omni is installed")
def test_without_vllm_omni() -> None:
    with pytest.raises(ImportError, match="vllm_omni"):
        vllm_omni.register()
    assert HiddenStateCacheConnector.__mro__ == (HiddenStateCacheConnector, object)
    assert HiddenStateCacheConnector._make_key("req_0", "0", "1") == "req_0@0_1"


def test_vllm_omni_finds_it_by_its_plugin_group() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm_omni.general_plugins"]' in text
    assert 'hs_cache = "hs_cache.integrations.vllm_omni:register"' in text


def test_the_documented_configuration_is_one() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (REPOSITORY / "docs" / "vllm_omni.md").read_text(), re.DOTALL)
    stages = yaml.safe_load(text)
    connectors = stages["connectors"]
    assert [connector["name"] for connector in connectors.values()] == [CONNECTOR_NAME]
    for connector in connectors.values():
        vllm_omni._settings(connector["extra"])
    used = [
        name
        for stage in stages["stages"]
        for side in ("input_connectors", "output_connectors")
        for name in stage.get(side, {}).values()
    ]
    assert used
    assert set(used) == set(connectors)


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("namspace", "namespace"),
        ("name_space", "namespace"),
        ("Namespace", "namespace"),
        ("adress", "address"),
        ("timout_s", "timeout_s"),
        ("timeout", "timeout_s"),
        ("ttl-s", "ttl_s"),
        ("services", "service"),
        ("confg", "config"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_misspelt_setting_is_refused(typo: str, meant: str, nested: bool) -> None:
    settings = {"stage_id": 0, typo: "x"}
    with pytest.raises(ConfigError, match=f"unknown key '{typo}' .*did you mean '{meant}'"):
        HiddenStateCacheConnector({"extra": settings} if nested else settings)


def test_settings_of_vllm_omni_and_its_own_connectors_are_ignored() -> None:
    theirs = [
        "role",
        "from_stage",
        "to_stage",
        "stage_id",
        "extra",
        "outgoing",
        "host",
        "port",
        "zmq_port",
        "sender_host",
        "sender_zmq_port",
        "rank_mapping",
        "wakeup_scope",
        "metadata_server",
        "master",
        "segment",
        "localbuf",
        "proto",
        "protocol",
        "device_name",
        "memory_pool_size",
        "memory_pool_device",
        "backends",
        "num_threads",
        "agent_name",
        "receive_device",
        "memory_type",
        "lease_seconds",
        "transfer_timeout_s",
        "poll_interval_s",
        "handshake_timeout_ms",
        "metadata_query_timeout_ms",
        "handshake_max_wait_s",
        "handshake_retry_s",
        "get_sub_timeout_ms",
        "shm_threshold_bytes",
        "connector_get_sleep_s",
        "connector_get_max_wait",
        "codec_streaming",
        "codec_chunk_frames",
        "name",
        "server",
        "device",
    ]
    settings = vllm_omni._settings({**dict.fromkeys(theirs), "extra": {**dict.fromkeys(theirs), "namespace": "blue"}})
    assert settings["namespace"] == "blue"


@pytest.mark.parametrize("name", ["timeout_s", "ttl_s"])
@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), True, "1"])
def test_seconds_are_seconds(name: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"{name}: got {value!r}"):
        vllm_omni._settings({name: value})
    assert vllm_omni._settings({name: None})[name] is None
    assert vllm_omni._settings({name: 1})[name] == 1


class DirectRouter:
    """Carries operations out against servers in this process."""

    def __init__(self, cache: DirectCache) -> None:
        self.cache = cache
        self.run = cache.run


class DirectClient:
    """What `hs_cache.connect` gives, of which the connector uses no more than this."""

    def __init__(self, cache: DirectCache) -> None:
        self.cache = cache

    def parts(self) -> tuple[Any, Any]:
        return DirectRouter(self.cache), self.cache.session

    def close(self) -> None:
        self.cache.session.close()


@pytest.fixture
def node() -> Node:
    return Node(16384)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The connectors' time."""
    clock = Clock()
    monkeypatch.setattr(vllm_omni, "time", clock)
    return clock


Make = Callable[..., HiddenStateCacheConnector]


@pytest.fixture
def make(node: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """``make(far=False, **settings)``: a connector, whose node may be another one."""
    made = []

    def make(far: bool = False, **settings: Any) -> HiddenStateCacheConnector:
        monkeypatch.setattr(vllm_omni, "connect", lambda config, *, service: DirectClient(DirectCache(node, far=far)))
        made.append(HiddenStateCacheConnector(settings))
        return made[-1]

    yield make
    for connector in made:
        connector.close()
    node.unreachable = False
    this_process().releaser.flush()
    stats = node.settled()
    assert (stats.num_kept, stats.num_chunks, stats.free_bytes) == (0, 0, stats.capacity_bytes)


@pytest.fixture
def connector(make: Make) -> HiddenStateCacheConnector:
    return make()


def faults(connector: HiddenStateCacheConnector) -> Any:
    return connector._cache.cache  # type: ignore[attr-defined]


@pytest.mark.parametrize("fault", [lost_call, lost_reply], ids=lambda fault: fault.__name__)
def test_a_payload_that_could_not_be_dropped_is_not_delivered_twice(
    connector: HiddenStateCacheConnector, node: Node, fault: Any
) -> None:
    connector.put("0", "1", "k", [1, 2])
    faults(connector).faults = {1: fault}
    assert connector.get("0", "1", "k") is not None
    assert faults(connector).effects[1] == "drop_key"
    for _ in range(3):
        assert connector.get("0", "1", "k") is None
    connector.put("0", "1", "k", [3])
    taken = connector.get("0", "1", "k")
    assert taken is not None
    assert taken[0] == [3]


def test_trouble_is_logged_once_and_never_raised(
    connector: HiddenStateCacheConnector, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    connector.put("0", "1", "k", 1)
    node.unreachable = True
    with caplog.at_level(logging.WARNING, logger=vllm_omni.__name__):
        for _ in range(5):
            assert connector.put("0", "1", "other", 2) == (False, 0, None)
            assert connector.get("0", "1", "k") is None
    assert len([record for record in caplog.records if record.name == vllm_omni.__name__]) == 1
    assert connector.get_with_deadline("0", "1", "k", deadline=time.monotonic() + 0.05) is None
    assert connector.cleanup("k") is None
    assert connector.health()["status"] == "unhealthy"
    connector.reap_consumed()
    node.unreachable = False
    this_process().releaser.flush()
    assert connector.get("0", "1", "k") is None  # what could not be cleaned up then is gone by now
    assert connector.put("0", "1", "other", 2)[0]
    assert connector.health()["status"] == "healthy"
    assert connector.get("0", "1", "other") is not None


def test_a_put_that_fails_takes_what_it_would_have_replaced_with_it(
    connector: HiddenStateCacheConnector, node: Node
) -> None:
    connector.put("0", "1", "k", "old")
    faults(connector).faults = {0: lost_call}
    assert connector.put("0", "1", "k", "new") == (False, 0, None)
    this_process().releaser.flush()
    assert connector.get("0", "1", "k") is None


def _explode() -> None:
    raise ModuleNotFoundError("no such class here")


class Exploding:
    def __reduce__(self) -> Any:
        return _explode, ()


def test_a_payload_that_can_not_be_unpickled_is_lost_and_said_so(
    connector: HiddenStateCacheConnector, caplog: pytest.LogCaptureFixture
) -> None:
    assert connector.put("0", "1", "k", Exploding())[0]
    assert connector.get("0", "1", "k") is None
    assert "can't be unpickled here" in caplog.text
    assert connector.health()["get_failures"] == 1


def test_a_timeout_within_a_deadline_is_no_error(connector: HiddenStateCacheConnector) -> None:
    def late(perform: Any) -> Any:
        raise ServiceTimeoutError("late")

    connector.put("0", "1", "k", 1)
    faults(connector).faults = {0: late}
    assert connector.get_with_deadline("0", "1", "k", deadline=time.monotonic() + 5) is not None


def test_one_that_was_never_finished_can_be_collected() -> None:
    made = HiddenStateCacheConnector.__new__(HiddenStateCacheConnector)
    made.__del__()


@pytest.mark.parametrize("by", ["put", "reap_consumed"])
@pytest.mark.parametrize("far", [False, True], ids=["kept", "kept by nobody"])
def test_what_nobody_takes_expires(
    make: Make, clock: Clock, caplog: pytest.LogCaptureFixture, far: bool, by: str
) -> None:
    producer, consumer = make(far), make()
    for key in ("aborted", "taken", "put again"):
        producer.put("0", "1", key, key)
    producer.put("0", "2", "aborted", "on another route")
    assert consumer.get("0", "1", "taken") is not None
    clock.advance(400)
    producer.put("0", "1", "put again", "put again")
    producer.put("0", "1", "waits", "waits")
    clock.advance(201)
    assert (producer.health()["outstanding"], producer.health()["expired"]) == (5, 0)
    if by == "put":
        producer.put("0", "1", "last", "last")
    else:
        producer.reap_consumed()
    this_process().releaser.flush()
    assert (producer.health()["outstanding"], producer.health()["expired"]) == (3 if by == "put" else 2, 2)
    assert caplog.text.count("nobody took 2 payloads within 600 s") == 1
    assert consumer.get("0", "1", "aborted") is consumer.get("0", "2", "aborted") is None
    for key in ("put again", "waits"):
        assert consumer.get("0", "1", key) == (key, consumer.health()["bytes_got"] // consumer.health()["gets"])
    consumer.get("0", "1", "last")


def test_a_put_finds_the_room_of_what_has_expired(make: Make, node: Node, clock: Clock) -> None:
    connector, patient = make(ttl_s=5), make(ttl_s=None, namespace="patient")
    rows = torch.zeros(int(0.4 * node.server.store.stats().capacity_bytes), dtype=torch.uint8)
    assert patient.put("0", "1", "stays", rows)[0]
    assert connector.put("0", "1", "aborted", rows)[0]
    assert not connector.put("0", "1", "k", rows)[0]
    clock.advance(4.9)
    assert not connector.put("0", "1", "k", rows)[0]
    clock.advance(0.2)
    assert connector.put("0", "1", "k", rows)[0]
    clock.advance(1e6)
    patient.reap_consumed()
    assert patient.get("0", "1", "stays") is not None
    assert (connector.health()["expired"], patient.health()["expired"]) == (1, 0)


def test_what_expires_while_the_node_is_unreachable_goes_when_it_is_back(
    connector: HiddenStateCacheConnector, node: Node, clock: Clock
) -> None:
    connector.put("0", "1", "aborted", 1)
    clock.advance(601)
    node.unreachable = True
    assert connector.put("0", "1", "k", 2) == (False, 0, None)
    assert connector.health()["outstanding"] == 0
    node.unreachable = False
    assert connector.put("0", "1", "k", 2)[0]
    assert connector.get("0", "1", "aborted") is None


def test_cleanup_reaches_more_routes_than_are_remembered(connector: HiddenStateCacheConnector) -> None:
    for stage in range(2 * vllm_omni._MAX_ROUTES):
        connector.put("0", str(stage), "k", stage)
    assert connector.cleanup("k") is True
    assert connector.health()["reclaimed"] == 2 * vllm_omni._MAX_ROUTES
    assert connector.get("0", "0", "k") is None
