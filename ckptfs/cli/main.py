"""The `ckptfs` command: the group, and the one place where errors become a line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from .. import __version__
from ..errors import CkptfsError, Exit
from . import helper
from .mount import mount
from .output import fail
from .probe import probe
from .resolve import discard, publish, skip
from .status import status
from .umount import umount
from .wait import wait


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="ckptfs", message="%(prog)s %(version)s")
def cli() -> None:
    """A checkpoint file system: writes at memory speed, publishes to a tier in order."""


for _command in (mount, probe, status, wait, umount, publish, discard, skip):
    cli.add_command(_command)


def run(arguments: Sequence[str], program: str = "ckptfs") -> int:
    """Carry out one command line; returns the exit code. Every failure is one sentence on stderr."""
    try:
        if helper.is_helper_call(program, arguments):
            return helper.run(arguments)
        # Without standalone mode click gives back ctx.exit()'s code and raises its errors to here.
        result = cli.main(list(arguments), prog_name="ckptfs", standalone_mode=False)
        return int(result) if isinstance(result, int) else Exit.OK
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else error.format_message(), err=True)
        return Exit.USAGE
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "ckptfs"
        message = " ".join(error.format_message().split()).rstrip(".")
        return fail(f"{message}; see {command} --help", Exit.USAGE)
    except click.ClickException as error:
        return fail(" ".join(error.format_message().split()), Exit.USAGE)
    except (click.Abort, KeyboardInterrupt):
        return 130
    except CkptfsError as error:
        return fail(error.message, error.code)
    except BrokenPipeError:
        # The reader of our output went away (`ckptfs status | head`): not an error worth a word.
        _silence_stdout()
        return Exit.FAILED
    except OSError as error:
        where = f": {os.fsdecode(error.filename)}" if error.filename else ""
        return fail(f"{error.strerror or error}{where}", Exit.FAILED)


def _silence_stdout() -> None:
    """Keep the interpreter from complaining when it flushes stdout at its end."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass


def main() -> None:
    """Entry point of the console script, and of `mount.ckptfs` when it is a link to it."""
    code = run(sys.argv[1:], os.path.basename(sys.argv[0]))
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()
    sys.exit(code)
