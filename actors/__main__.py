"""The ``hs-cache`` command: `hs_cache.cli`, and the two commands that create and end actors."""

import json

import click

from actors import deploy
from hs_cache.cli import cli, join, read_config, service_options


@cli.command()
@service_options
@click.option("--config", metavar="FILE", help="YAML file with the settings, - for standard input.")
def start(address: str | None, service: str, as_json: bool, config: str | None) -> None:
    """Start a service on the nodes of a Ray cluster, or complete one that runs."""
    settings = read_config(config)
    join(address)
    nodes = deploy.start(settings, service=service)
    if as_json:
        click.echo(json.dumps({"service": service, "nodes": [{"node_id": node_id} for node_id in nodes]}))
    else:
        size = deploy.running_config(service, nodes[0]).max_hidden_state_cpu_size
        click.echo(f"Service {service!r} runs on {len(nodes)} node{'s' if len(nodes) > 1 else ''}, {size:g} GiB each.")


@cli.command()
@service_options
def stop(address: str | None, service: str, as_json: bool) -> None:
    """Stop a service on all nodes. Rows that clients hold stay valid."""
    join(address)
    stopped = deploy.stop(service=service)
    if as_json:
        click.echo(json.dumps({"service": service, "stopped": stopped}))
    elif stopped:
        click.echo(f"Service {service!r} stopped on {stopped} node{'s' if stopped > 1 else ''}.")
    else:
        click.echo(f"No service named {service!r} runs in this cluster.")


def main() -> None:
    """Entry point of the console script."""
    cli(prog_name="hs-cache")


if __name__ == "__main__":
    main()
