"""The application that the commands hang on."""

from __future__ import annotations

import typer

from plait.cli import bench, demo, doctor, lab, launch, plan, profile, run, sim

app = typer.Typer(
    name="plait",
    help="Train deep networks on small, shared, slow-to-talk hardware, on stock PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from plait import __version__

        typer.echo(f"plait {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


# The panels are the chapters of `plait --help`, in the order in which they come first here, and every
# command is one line in its chapter: what it does in full stands in its own help.
_LOOK, _TRAIN, _DECIDE, _MEASURE = "Look around", "Train", "Decide", "Measure"

app.command("doctor", rich_help_panel=_LOOK)(doctor.doctor)
app.command("demo", rich_help_panel=_LOOK)(demo.demo)
app.command("run", rich_help_panel=_TRAIN)(run.run)
app.command(
    "launch",
    rich_help_panel=_TRAIN,
    short_help="Run a training script as it is, its gradients compressed.",
    context_settings={"allow_interspersed_args": False},
)(launch.launch)
app.command("profile", rich_help_panel=_DECIDE)(profile.profile)
app.command(
    "plan",
    rich_help_panel=_DECIDE,
    short_help="Compare the strategies for a job: what to run, and why.",
)(plan.plan)
app.command(
    "sim",
    rich_help_panel=_DECIDE,
    short_help="Play a plan on a modelled cluster: what a run would take.",
)(sim.sim)
app.command(
    "bench",
    rich_help_panel=_MEASURE,
    short_help="Ask a benchmark's question, or all of them.",
)(bench.bench)
app.add_typer(lab.app, name="lab", rich_help_panel=_MEASURE)
