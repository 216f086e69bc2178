"""`imagefleet deploy`: what takes a fleet to where its GPUs are."""

from __future__ import annotations

import typer

from fleet import deploy_salad

app = typer.Typer(no_args_is_help=True, help="Deploys workers to where the GPUs are.")
app.add_typer(deploy_salad.app, name="salad", short_help="SaladCloud's container groups.")
