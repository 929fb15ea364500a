"""Starting and stopping a service from any process, by running ``hs-cache`` in a process of its own.

The actors must be imported from this installation: a user's working directory may well have an ``actors`` module of its
    own, and Ray hands the driver's import path to every worker. So what creates the actors is another driver, with a
    clean path.
"""

import json
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import AuthenticationError, RayError

from hs_cache import errors
from hs_cache.config import CacheConfig, check_service
from hs_cache.errors import ServiceError, ServiceTimeoutError
from hs_cache.router import bounded, require_ray

try:
    from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
    from ray._private.services import canonicalize_bootstrap_address
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
except ImportError:  # they are Ray's own, and another Ray may have them elsewhere
    CAN_LOOK_FIRST = False
else:
    CAN_LOOK_FIRST = True
"""Whether `join` sees by itself who is at an address. If not, ``ray.init`` has to find out, which takes it minutes."""

START_TIMEOUT_S = 120.0
_REACH_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 20.0
"""For a control store that takes connections: one that answers at all does so at once."""

_ROOT = Path(errors.__file__).parent.parent
_MAIN = "import sys; sys.path.insert(0, sys.argv.pop(1)); from actors.__main__ import main; main()"


def join(address: str | None = None, **options: Any) -> None:
    """``ray.init``, which goes on trying for minutes where there is nobody, and says little of why it failed.

    Args:
        address: as ``ray.init`` takes it.
        options: others of ``ray.init``.

    Raises:
        ServiceError: there is no cluster at that address, or it doesn't let this process in.
    """
    found = None if address in (None, "auto") else address
    try:
        if CAN_LOOK_FIRST and "://" not in (address or ""):
            found = canonicalize_bootstrap_address(address)  # type: ignore[arg-type]
            if found:
                _look_at(found)
        ray.init(address=address, **options)
    except AuthenticationError as error:
        raise ServiceError(
            f"the Ray cluster at {found} wants another authentication than this process has: where it was started with "
            "a token, set RAY_AUTH_MODE=token here too, and have its token in ~/.ray/auth_token or RAY_AUTH_TOKEN"
        ) from error
    except (OSError, OverflowError, RuntimeError, ValueError, RayError, ServiceTimeoutError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        if lines[0].startswith("Version mismatch"):
            raise ServiceError(
                f"the Ray cluster at {found} has other versions than this process: {' '.join(lines)} (both need the "
                "same Ray and the same Python)"
            ) from error
        named = f"{address}, which is {found}" if address not in (None, "auto", found) else found
        where = f"at {named}" if found else "on this machine"
        raise ServiceError(
            f"no Ray cluster can be joined {where}: {lines[0]} (start one with: ray start --head; one that is gone may "
            "still be named in RAY_ADDRESS or in /tmp/ray/ray_current_cluster)"
        ) from error


def _look_at(address: str) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_TIMEOUT_S).close()
    ensure_token_if_auth_enabled(create_token_if_missing=False)  # without one, Ray would end this process
    bounded(partial(GcsClient, address=address), _ANSWER_TIMEOUT_S)


def start(config: Any = None, *, service: str = "default") -> list[str]:
    """Start a service in the Ray cluster that this process has joined; joins one that runs already. Blocks until it
    answers.

    Args:
        config: as for `hs_cache.connect`; ``enable_hidden_state_cache`` plays no part, a service that is started is
            wanted.
        service: its name.

    Returns:
        The hex ids of the nodes that carry it; none if no node matches ``node_selector`` yet.

    Raises:
        ConfigError, ConfigMismatchError: `config` is wrong, or a service of that name runs with other settings.
        PoolTooLargeError: a node has less memory than ``max_hidden_state_cpu_size``.
        ServiceError: the service could not be started.
    """
    wanted = CacheConfig.load(config)
    check_service(service)
    settings = wanted.model_dump(mode="json", exclude_unset=True)
    reply = _run("start", "--service", service, "--config", "-", given=json.dumps(settings))
    return [str(node["node_id"]) for node in reply["nodes"]]


def stop(*, service: str = "default") -> int:
    """Stop a service on all nodes; returns on how many it ran. What it cached is gone, rows handed out stay valid.

    Raises:
        ServiceError: the cluster can't be reached.
    """
    check_service(service)
    return int(_run("stop", "--service", service)["stopped"])


def _run(command: str, *options: str, given: str = "") -> dict[str, Any]:
    require_ray()
    address = ray.get_runtime_context().gcs_address
    line = [sys.executable, "-c", _MAIN, str(_ROOT), command, *options, "--address", address, "--json"]
    try:
        done = subprocess.run(
            line, input=given, capture_output=True, text=True, cwd=_ROOT, timeout=START_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ServiceTimeoutError(f"hs-cache {command} did not end within {START_TIMEOUT_S:.0f} s") from error
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
    try:
        reply: dict[str, Any] = json.loads(last)
    except json.JSONDecodeError as error:
        tail = done.stderr.strip()[-2000:]
        raise ServiceError(f"hs-cache {command} failed with exit code {done.returncode}: {tail}") from error
    if "error" in reply:
        kind = getattr(errors, reply["error"]["type"], ServiceError)
        raise kind(reply["error"]["message"])
    return reply
