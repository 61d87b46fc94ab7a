"""The command `schema`."""

import json

import click


@click.command("schema")
def command() -> None:
    """Print a JSON Schema of the YAML file, with which editors complete and check it."""
    from insitu.config.json_schema import json_schema

    click.echo(json.dumps(json_schema()))
