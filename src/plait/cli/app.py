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


app.command("demo")(demo.demo)
app.command("profile")(profile.profile)
app.command("plan")(plan.plan)
app.command("sim")(sim.sim)
app.command("run")(run.run)
app.command("launch", context_settings={"allow_interspersed_args": False})(launch.launch)
app.add_typer(lab.app, name="lab")
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)
