"""The command ``gpujobs``. Data goes to stdout, messages to stderr.

Modules that take long to import are imported inside the commands that use them: ``--version`` and
``render`` must not import dask.
"""

from __future__ import annotations

import copy
import io
import sys
from functools import partial

import click
from click.core import ParameterSource

from ..errors import GpujobsError
from ..version import __version__
from . import cluster_commands, live, profile_commands, site_commands
from .live import progress

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
HOSTED = (
    "submit", "plan", "status", "report", "nodes", "logs", "connect", "scale", "cancel", "clean",
    "queues",
)  # fmt: skip
"""The commands that can run on another host; the others run here."""


GROUPS = {
    "Every day": ("submit", "status", "logs", "connect", "scale", "cancel"),
    "Sizes and results": ("plan", "queues", "report", "nodes", "clean"),
    "Sites": ("sites", "doctor"),
    "More": ("run", "render", "schema", "completion"),
}
"""The commands in the order of `gpujobs --help`."""


class ErrorHandlingGroup(click.Group):
    """Turns exceptions of commands into one message and an exit code."""

    def invoke(self, ctx: click.Context) -> object:
        """Run a command; exit with the code of the error if it fails."""
        live.keep_descriptors()
        live.install_handler()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # for locales that lack a letter
        try:
            return super().invoke(ctx)
        except GpujobsError as error:
            progress.write(f"error: {error}")
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)
        except BrokenPipeError:  # for example `gpujobs status | head`
            live.discard_output()
            sys.exit(EXIT_BROKEN_PIPE)
        except OSError as error:  # for example a folder that was removed, or stdout is full
            live.discard_output()
            progress.write(f"error: {error}")
            sys.exit(1)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in `GROUPS`."""
        width = max(map(len, self.commands))
        for title, names in GROUPS.items():
            with formatter.section(title):
                limit = formatter.width - width - 6
                formatter.write_dl(
                    [
                        (name.ljust(width), self.commands[name].get_short_help_str(limit))
                        for name in names
                    ]
                )

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return a command that runs on its host, if it has one."""
        name, command, words = super().resolve_command(ctx, args)
        if command is None or ctx.resilient_parsing:
            return name, command, words
        if name in HOSTED:
            from . import laptop

            there = copy.copy(command)
            there.callback = partial(laptop.run_command, ctx, command, list(words))
            return name, there, words
        if ctx.get_parameter_source("host") is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{name} runs on this computer, without --host", ctx)
        return name, command, words


@click.group(cls=ErrorHandlingGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gpujobs")
@click.option(
    "--host",
    envvar="GPUJOBS_HOST",
    metavar="HOST",
    help="Run the command on this login node, through ssh.",
)
@click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    help="Colours: auto is those of a terminal without NO_COLOR.",
)
@click.pass_context
def main(ctx: click.Context, host: str | None, color: str) -> None:
    """Dask on the GPUs of a batch cluster.

    \b
    gpujobs submit profile.yaml     start a cluster and its command
    gpujobs status                  show the state of my clusters
    gpujobs logs ID                 print the output of the command
    gpujobs connect ID              show how to connect from Python
    gpujobs cancel ID               end a cluster
    """
    ctx.color = {"always": True, "never": False}.get(color)


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for SHELL.

    Append it to the start-up file of SHELL, for example ~/.bashrc.
    """
    from click import shell_completion

    if completion_class := shell_completion.get_completion_class(shell):
        click.echo(completion_class(main, {}, "gpujobs", "_GPUJOBS_COMPLETE").source())


@main.command("at-login", hidden=True)
def at_login() -> None:
    """Run the command that `gpujobs --host` sends."""
    from . import laptop

    laptop.serve(main)


for command in (
    profile_commands.submit,
    profile_commands.run,
    profile_commands.plan,
    profile_commands.render,
    profile_commands.explain,
    cluster_commands.status,
    cluster_commands.report,
    cluster_commands.nodes,
    cluster_commands.logs,
    cluster_commands.connect,
    cluster_commands.scale,
    cluster_commands.cancel,
    cluster_commands.clean,
    site_commands.queues,
    site_commands.doctor,
    site_commands.sites,
    site_commands.schema,
):
    main.add_command(command)
