"""`imagefleet deploy`: what takes a fleet to where its GPUs are."""

from __future__ import annotations

import typer

from fleet.salad import apply

app = typer.Typer(no_args_is_help=True, help="Deploys workers to where the GPUs are.")
app.add_typer(apply.app, name="salad", short_help="SaladCloud's container groups.")
