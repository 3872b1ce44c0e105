"""Entry point of `fusion`: finds the subcommand, and turns every error into one line and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from fusion.base.errors import FusionError

#: Subcommand -> (module that has a click command of the same name, one line of help). Listed in this order.
COMMANDS = {
    "demo": ("fusion.cli.demo", "Train a model over an emulated WAN on this machine."),
    "join": ("fusion.cli.join", "Become an owner of jobs in a cluster."),
    "submit": ("fusion.cli.submit", "Submit the job that a Python file defines."),
    "status": ("fusion.cli.status", "Show your jobs, or one of them."),
    "logs": ("fusion.cli.logs", "Show what nodes and coordinator wrote about a job."),
    "plan": ("fusion.cli.plan", "Plan a job for a cluster without any node running."),
    "simulate": ("fusion.cli.simulate", "Simulate a plan's steps, and draw them."),
    "move": ("fusion.cli.move", "Let a running job go on on other nodes."),
    "pause": ("fusion.cli.pause", "Let a job stop at a step's end, and keep its state."),
    "resume": ("fusion.cli.resume", "Let a paused, failed or cancelled job go on."),
    "checkpoints": ("fusion.cli.checkpoints", "List a job's checkpoints, or download one."),
    "cancel": ("fusion.cli.cancel", "Cancel a job."),
    "weights": ("fusion.cli.weights", "Download the trained weights of a job."),
    "doctor": ("fusion.cli.doctor", "Check this machine and its way to the coordinator."),
}
# Before grpc is loaded: whatever it has to say is said again in our own line.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

INTERRUPTED = 130
BROKEN_PIPE = 141


class LazyGroup(click.Group):
    """A group whose subcommands are imported when they are called, so that `--help` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _show_version(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        from fusion import __version__

        click.echo(f"fusion {__version__}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show it.")
def cli() -> None:
    """Train one PyTorch model on machines in different places."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `fusion` and leave the process with its exit code."""
    sys.exit(run(cli, arguments, "fusion"))


def run(command: click.Command, arguments: Sequence[str] | None, program: str) -> int:
    """Run a click command and return its exit code; errors become one line on stderr, never a traceback."""

    def invoke() -> Any:
        # Not command.main(): that has ways of its own with Ctrl-C and closed pipes.
        with command.make_context(program, list(sys.argv[1:] if arguments is None else arguments)) as context:
            return command.invoke(context)

    return guarded(invoke, program)


def guarded(action: Callable[[], Any], program: str) -> int:
    """Run `action` and return the exit code that its end stands for."""
    try:
        result = action()
        sys.stdout.flush()
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else error.format_message(), err=True)
        return error.exit_code
    except click.ClickException as error:
        return _fail(program, error.format_message(), error.exit_code)
    except FusionError as error:
        return _fail(program, str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return _fail(program, "interrupted", INTERRUPTED)
    except BrokenPipeError:
        return _closed_pipe()
    return result if isinstance(result, int) else 0


def _fail(program: str, message: str, code: int) -> int:
    line = " ".join(message.split())
    try:
        print(f"{program}: {line}", file=sys.stderr)
    except (OSError, ValueError):
        return code
    return code


def _closed_pipe() -> int:
    """Whoever read our output has gone. Point stdout at nothing, so that the interpreter's last flush is quiet."""
    with open(os.devnull, "w") as nothing:  # noqa: PTH123 - a device, not a path
        os.dup2(nothing.fileno(), sys.stdout.fileno())
    return BROKEN_PIPE


if __name__ == "__main__":
    main()
