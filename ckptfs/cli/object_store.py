"""The flags that say how an object store is reached, for all commands that take a tier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def _none_if_empty(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> object:
    """A repeatable flag that was not given is None, as all others."""
    return value or None


_OPTIONS = (
    click.option(
        "--endpoint-url",
        metavar="URL",
        multiple=True,
        callback=_none_if_empty,
        help="Address of the object store, like https://10.1.2.3; repeat it to spread over several.",
    ),
    click.option("--region", metavar="NAME", help="Region of the object store. Default: as for AWS tools."),
    click.option("--profile", metavar="NAME", help="Profile of ~/.aws/config and ~/.aws/credentials to use."),
    click.option("--ca-bundle", metavar="FILE", help="Certificate authorities of the store (PEM)."),
    click.option(
        "--verify-tls/--no-verify-tls", default=None, help="Check the store's certificate (default), or not."
    ),
)


def object_store_options(command: F) -> F:
    """Decorate a click command with the flags; those not given are None."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
