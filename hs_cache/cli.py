"""``hs-cache``, the command line. `actors.commands` adds those that create actors."""

import json
import logging
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import click
import ray
import yaml
from ray.exceptions import GetTimeoutError, RayError
from rich.console import Console
from rich.table import Table

from hs_cache.config import CacheConfig, check_service
from hs_cache.doctor_facts import DoctorReport
from hs_cache.doctor_report import print_report
from hs_cache.errors import ConfigError, HiddenStateCacheError, ServiceError
from hs_cache.html import short_id
from hs_cache.kv_presence import KVStatistics
from hs_cache.launch import join
from hs_cache.messages import ControllerStatistics, NodeStatistics
from hs_cache.router import HIDDEN_STATES, KV, find_actor, find_controller, is_running, nodes_of
from hs_cache.weights import RevisionBump, bump_revision

_STATUS_TIMEOUT_S = 5.0
_GIB, _MIB = 1 << 30, 1 << 20
_DOCTOR = "hs_cache.doctor_run:doctor"
"""Looked up when it is asked for: it is a client, and so imports torch, which no other command needs."""

_FILE_COLUMNS = 160


class Commands(click.Group):
    """A group whose commands report our errors in one sentence, or as JSON after ``--json``, with exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except HiddenStateCacheError as error:
            if "--json" in sys.argv:
                click.echo(json.dumps({"error": {"type": type(error).__name__, "message": str(error)}}))
                ctx.exit(1)
            raise click.ClickException(str(error)) from error


def _checked_service(_context: click.Context, _option: click.Parameter, name: str) -> str:
    check_service(name)
    return name


def service_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every command."""
    options: tuple[Callable[..., Any], ...] = (
        click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts."),
        click.option(
            "--service", default="default", show_default=True, callback=_checked_service, help="Name of the service."
        ),
        click.option(
            "--address",
            envvar="RAY_ADDRESS",
            help="Address of the Ray cluster, HOST:PORT; default: RAY_ADDRESS, else the one running on this machine.",
        ),
    )
    for option in options:
        command = option(command)
    return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hs-cache", prog_name="hs-cache")
def cli() -> None:
    """A hidden-state cache that runs on Ray."""


@cli.command()
@service_options
def status(address: str | None, service: str, as_json: bool) -> None:
    """Show the nodes of a service, what their pools hold, and whether its controller answers."""
    join_quietly(address)
    nodes = [(node_id, _stats_of(service, node_id)) for node_id in nodes_of(service)]
    kv = {node_id: _kv_stats_of(service, node_id) for node_id, _ in nodes}
    runs = is_running(service)
    controller = _controller_stats(service) if runs else None
    if as_json:
        rows = [
            {
                "node_id": node_id,
                **(asdict(stats) if stats else {"error": "no answer"}),
                "kv": asdict(known) if (known := kv[node_id]) else {"error": "no answer"},
            }
            for node_id, stats in nodes
        ]
        found = asdict(controller) if controller else {"error": "no answer"} if runs else None
        click.echo(json.dumps({"service": service, "controller": found, "nodes": rows}))
    elif not nodes and not runs:
        which = "" if service == "default" else f" --service {service}"
        click.echo(f"No service named {service!r} runs in this Ray cluster; start one with: hs-cache start{which}")
    else:
        if nodes:
            print_nodes(service, nodes)
            for node_id, stats in nodes:
                click.echo(_kv_line(node_id, stats, kv[node_id]))
        else:
            click.echo(f"Service {service!r} runs, but no node carries it yet.")
        click.echo(_controller_line(controller))
        for current in controller.revisions if controller else ():
            click.echo(f"The current revision of model {current.model!r} is {current.name!r}.")
    if not nodes or not controller or any(stats is None for _, stats in nodes):
        raise SystemExit(1)


@cli.command("bump-revision")
@service_options
@click.option("--model", required=True, help="Name of the model, as clients give it when they connect.")
@click.argument("revision", required=False)
def bump(address: str | None, service: str, as_json: bool, model: str, revision: str | None) -> None:
    """Say that the weights of a model change: REVISION (default: a name made up) is the current one from now on.

    Rows of all other revisions of the model are dropped on every node, and stores of clients that connected before
    fail. Each engine connects again once it has loaded the new weights.
    """
    join_quietly(address)
    done = bump_revision(model, revision, service=service)
    if as_json:
        nodes = [{"node_id": node_id, **asdict(freed)} for node_id, freed in done.freed.items()]
        result = {name: value for name, value in asdict(done).items() if name != "freed"}
        click.echo(json.dumps({"service": service, **result, "nodes": nodes}))
        return
    click.echo(_bump_line(done))
    if done.changed and not done.previous and not done.chunks:
        click.echo(f"No node had rows of it: is {model!r} what clients call the model?")
    if done.unreached:
        short = ", ".join(short_id(node_id) for node_id in done.unreached)
        click.echo(f"Not reached, and told within a second or two if they still run: {short}.")


@cli.command("doctor")
@service_options
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="Seconds that a node may take for one step.",
)
def examine(address: str | None, service: str, as_json: bool, timeout_s: float) -> None:
    """Check, from every node, what is installed there, what the service runs with, and that nodes reach each other.

    A few MiB are stored on every node that has room for them, read from all nodes, and dropped. Exits with 1 if a check
    fails.
    """
    join_quietly(address)
    doctor: Callable[..., DoctorReport] = pkgutil.resolve_name(_DOCTOR)
    report = doctor(service=service, timeout_s=timeout_s)
    if as_json:
        click.echo(json.dumps({**asdict(report), "ok": report.ok}))
    else:
        print_report(report, Console(width=None if sys.stdout.isatty() else _FILE_COLUMNS))
    if not report.ok:
        raise SystemExit(1)


def _bump_line(done: RevisionBump) -> str:
    if not done.changed:
        return f"Revision {done.revision!r} of model {done.model!r} is current already; nothing has changed."
    before = f", before it was {done.previous!r}" if done.previous else ""
    held_bytes = sum(freed.held_bytes for freed in done.freed.values())
    held = f" ({_mib(held_bytes)} of them when their readers let go)" if held_bytes else ""
    chunks = f"{done.chunks:,} chunk{'' if done.chunks == 1 else 's'}"
    nodes = f"{len(done.freed)} node{'' if len(done.freed) == 1 else 's'}"
    return (
        f"Revision {done.revision!r} of model {done.model!r} is current now{before}. "
        f"Freed {chunks}, {_mib(done.nbytes)}{held}, on {nodes}."
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.1f} MiB"


def join_quietly(address: str | None) -> None:
    """See `hs_cache.launch.join`; without an address, the cluster that runs on this machine."""
    join(address or "auto", logging_level=logging.ERROR, log_to_driver=False)


def _controller_line(stats: ControllerStatistics | None) -> str:
    if stats is None:
        return "The controller doesn't answer: nodes serve what they have, and what is on others isn't found."
    count = len(stats.nodes)
    return (
        f"The controller knows {stats.num_keys:,} chunks on {count} node{'s' if count != 1 else ''}, and was asked "
        f"{stats.locates_total:,} times."
    )


def _stats_of(service: str, node_id: str) -> NodeStatistics | None:
    stats: NodeStatistics | None = _answer(lambda: find_actor(service, HIDDEN_STATES, node_id))
    return stats


def _kv_stats_of(service: str, node_id: str) -> KVStatistics | None:
    stats: KVStatistics | None = _answer(lambda: find_actor(service, KV, node_id))
    return stats


def _kv_line(node_id: str, node: NodeStatistics | None, kv: KVStatistics | None) -> str:
    if kv is None:
        return f"KV on {short_id(node_id)}: no answer, so nothing that it must vouch for is served."
    if node is not None and node.kv_source == "none":
        return f"KV on {short_id(node_id)}: counts as present."
    engines = ", ".join(repr(engine) for engine in kv.engines) or "none"
    source = f"{node.kv_source}, " if node is not None else ""
    gaps = f"; something that they said was lost {kv.gaps_total:,} times" if kv.gaps_total else ""
    return (
        f"KV on {short_id(node_id)}: {source}{kv.present:,} chunks present, {kv.absent:,} absent, {kv.unknown:,} "
        f"unknown; engines heard of: {engines}{gaps}."
    )


def _controller_stats(service: str) -> ControllerStatistics | None:
    stats: ControllerStatistics | None = _answer(lambda: find_controller(service))
    return stats


def _answer(find: Callable[[], Any]) -> Any:
    """An actor's statistics, None if it doesn't answer."""
    try:
        return ray.get(find().stats.remote(), timeout=_STATUS_TIMEOUT_S)
    except (GetTimeoutError, RayError, ServiceError):
        return None


def print_nodes(service: str, nodes: Sequence[tuple[str, NodeStatistics | None]]) -> None:
    """The table of `status`. Retrieves are those that asked this node, also for clients of other nodes."""
    table = Table(title=f"hs_cache service {service!r}", title_justify="left")
    for name in (
        "node",
        "pool GiB",
        "free",
        "resident",
        "leased",
        "chunks",
        "clients",
        "retrieves",
        "with a hit",
        "tokens hit",
    ):
        if name == "node":
            table.add_column(name, min_width=max((len(short_id(node_id)) for node_id, _ in nodes), default=0))
        else:
            table.add_column(name, justify="right")
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}  # type: ignore[no-untyped-call]
    for node_id, stats in nodes:
        short = f"{short_id(node_id)} {addresses.get(node_id, '')}".strip()
        if stats is None:
            table.add_row(short, "[red]no answer[/red]")
            continue
        store = stats.store
        table.add_row(
            short,
            f"{store.capacity_bytes / _GIB:.2f}{' pinned' if stats.pinned else ''}",
            f"{store.free_bytes / store.capacity_bytes:.0%}",
            f"{store.resident_bytes / store.capacity_bytes:.0%}",
            f"{store.leased_bytes / store.capacity_bytes:.0%}",
            f"{store.num_chunks:,}",
            str(stats.num_clients),
            f"{stats.retrieves_total:,}",
            f"{stats.hits_total / stats.retrieves_total:.0%}" if stats.retrieves_total else "-",
            f"{stats.tokens_served_total / stats.tokens_asked_total:.0%}" if stats.tokens_asked_total else "-",
        )
    Console(width=None if sys.stdout.isatty() else _FILE_COLUMNS).print(table)


def read_config(path: str | None) -> CacheConfig:
    """The configuration of ``--config``: a file, then the environment; or ``-``, exactly what standard input says.

    Raises:
        ConfigError: a key or value is wrong, or the file can't be read.
    """
    if path != "-":
        return CacheConfig.load(path)
    try:
        settings = yaml.safe_load(sys.stdin)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"standard input: not valid YAML: {error}") from error
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise ConfigError(f"standard input: got {settings!r:.60}, expected a mapping of keys to values")
    return CacheConfig(**settings)
