"""The command line: six commands, one exit."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from moespeq_cli import console
from moespeq_cli.bench.command import bench
from moespeq_cli.inspect import inspect
from moespeq_cli.pack.command import pack
from moespeq_cli.profile.command import profile
from moespeq_cli.quantize.command import quantize
from moespeq_cli.run.command import run
from runtime.errors import MoespeqError
from runtime.threads import sleep_between_operations

app = typer.Typer(
    name="moespeq",
    help="Run Mixture-of-Experts models bigger than memory, with the output of the unquantised model",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for command in (quantize, profile, pack, run, inspect):
    app.command()(command)
app.add_typer(bench, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"moespeq {version('moespeq')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    pass


def main(argv: list[str] | None = None) -> None:
    """Run one command; exit 0 when done, 1 when it could not be done, 2 when the command line was wrong."""
    sleep_between_operations()
    try:
        app(argv)
    except MoespeqError as error:
        console.note(f"error: {error}\nhint: {error.mend}")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        console.note("stopped")
        raise SystemExit(130) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(1) from None
    except PermissionError as error:
        console.note(f"error: expected access to {error.filename}; found {error.strerror}\nhint: check its permissions")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
