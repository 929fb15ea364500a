"""The commands of `hs_cache.cli`, and the two that create and end actors."""

import json

import click

from actors import deploy
from hs_cache.cli import cli, join_quietly, read_config, service_options
from hs_cache.router import is_running


@cli.command()
@service_options
@click.option("--config", metavar="FILE", help="YAML file with the settings, - for standard input.")
def start(address: str | None, service: str, as_json: bool, config: str | None) -> None:
    """Start a service on the nodes of a Ray cluster, or complete one that runs."""
    settings = read_config(config)
    join_quietly(address)
    nodes = deploy.start(settings, service=service)
    if as_json:
        click.echo(json.dumps({"service": service, "nodes": [{"node_id": node_id} for node_id in nodes]}))
        return
    running = deploy.running_config(service)
    wanted = running.model_dump(mode="json", include={"node_selector"})["node_selector"]
    if nodes:
        click.echo(
            f"Service {service!r} runs on {len(nodes)} node{'s' if len(nodes) > 1 else ''}, "
            f"{running.max_hidden_state_cpu_size:g} GiB each (node_selector {json.dumps(wanted)})."
        )
    else:
        click.echo(
            f"Service {service!r} runs, but no node matches its node_selector ({json.dumps(wanted)}) yet; "
            "each one that joins and does gets a pool."
        )


@cli.command()
@service_options
def stop(address: str | None, service: str, as_json: bool) -> None:
    """Stop a service on all nodes. Rows that clients hold stay valid."""
    join_quietly(address)
    ran = is_running(service)
    stopped = deploy.stop(service=service)
    if as_json:
        click.echo(json.dumps({"service": service, "stopped": stopped}))
    elif ran or stopped:
        click.echo(f"Service {service!r} stopped on {stopped} node{'' if stopped == 1 else 's'}.")
    else:
        click.echo(f"No service named {service!r} runs in this Ray cluster.")


def main() -> None:
    """Carry out the command line."""
    cli(prog_name="hs-cache")
