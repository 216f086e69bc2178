"""Descriptions of an HTTP API for people and programs, from its routes and their docstrings."""

import html
import inspect
import json
import re

from aiohttp.web import Application
from pydantic import BaseModel

from imagefleet.validation import JSONDict


def page(app: Application) -> str:
    """An application's API as a page."""
    rows = "".join(
        f"<tr><td><code>{method} {html.escape(path)}</code><td>{html.escape(summary)}"
        for method, path, summary in _operations(app)
    )
    title = "<!doctype html><title>imagefleet</title><h1>imagefleet</h1>"
    return f"{title}<table>{rows}</table>"


def openapi(app: Application, payload: type[BaseModel]) -> str:
    """The same as an OpenAPI document; *payload*: the body of paths that draw images."""
    answers = {"200": {"description": "done"}, "default": {"description": "refused"}}
    paths: dict[str, JSONDict] = {}
    for method, path, summary in _operations(app):
        operation: JSONDict = {"summary": summary, "responses": answers}
        if method == "POST":
            kind = (
                "multipart/form-data" if path.endswith("/edits") else "application/json"
            )
            content = (
                {"$ref": f"#/components/schemas/{payload.__name__}"}
                if "img" in path
                else {}
            )
            operation["requestBody"] = {"content": {kind: {"schema": content}}}
        operation["parameters"] = [
            {"name": each, "in": "path", "required": True, "schema": {"type": "string"}}
            for each in re.findall(r"\{(\w+)\}", path)
        ]
        paths.setdefault(path, {})[method.lower()] = operation
    schema = payload.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas = {**schema.pop("$defs", {}), payload.__name__: schema}
    keys = {name: {"type": "http", "scheme": name} for name in ("bearer", "basic")}
    document = {
        "openapi": "3.1.0",
        "info": {"title": "imagefleet", "version": "1"},
        "security": [{name: []} for name in keys],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": keys},
    }
    return json.dumps(document)


def _operations(app: Application) -> list[tuple[str, str, str]]:
    """Each method and path, and what it does in a sentence."""
    return [
        (route.method, route.resource.canonical, str(inspect.getdoc(route.handler)))
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    ]
