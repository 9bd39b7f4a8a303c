"""The description of the interface for programs: OpenAPI, and the same as a page."""

import base64
import hashlib
import json
from collections.abc import Mapping
from html import escape
from typing import Any

from selfadapt.app.answers import FORMATS
from selfadapt.app.requests import HELP, QUERY_SETTINGS, RANGES, SCALES, defaults
from selfadapt.methods import settings_of
from selfadapt.modes import MODES

ERRORS = {
    400: "A parameter or the image cannot be used.",
    401: "The token of the server is missing.",
    403: "The request comes from another web site, or the interface is off.",
    406: "None of the accepted media types is available.",
    408: "The image takes too long to arrive.",
    413: "The image is too large.",
    415: "The body is neither an image nor a form with one.",
    429: "Too many images are waiting; the header Retry-After has the seconds to wait.",
    500: "The server failed; its log has the details.",
    503: "The server is shutting down.",
}
STYLE = """body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto }
td { vertical-align: top; padding: .2rem 1rem .2rem 0 }"""
STYLE_HASH = f"sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}"


def value_schema(setting: str) -> dict[str, Any]:
    """Return type and range of a setting as a JSON schema."""
    if setting == "mode":
        return {"type": "string", "enum": [*MODES]}
    if setting == "scales":
        item = {"type": "number", "minimum": min(SCALES), "maximum": max(SCALES)}
        return {"type": "array", "items": item, "minItems": 1, "maxItems": len(SCALES)}
    low, high = RANGES[setting]
    kind = "integer" if setting == "steps" else "number"
    return {"type": kind, "minimum": low, "maximum": high}


def offered_settings(method: str, chosen: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return help, default and range of the settings of a method.

    Args:
        method: The method's name.
        chosen: Values tuned for the network.
    """
    parameters = settings_of(method)
    values = {"mode": parameters["mode"].default, **defaults(method, chosen)}
    return {
        name: {"help": HELP[name], "default": values[name], **value_schema(name)}
        for name in QUERY_SETTINGS
        if name in values
    }


def segment_route() -> dict[str, Any]:
    """Return the description of ``POST /v1/segment`` for FastAPI."""
    texts = {
        "model": "A network of /v1/models; else the first.",
        "method": "A method of the network; else the last.",
        **HELP,
        "format": "The format of the answer; else as the header Accept says, or a PNG.",
        "probs": "Add the probabilities of all classes to an NPZ file.",
    }
    schemas = {name: value_schema(name) for name in QUERY_SETTINGS} | {
        "model": {"type": "string"},
        "method": {"type": "string"},
        "format": {"type": "string", "enum": [*FORMATS]},
        "probs": {"type": "boolean", "default": False},
    }
    binary = {"type": "string", "format": "binary"}
    form = {"type": "object", "required": ["image"], "properties": {"image": binary}}
    bodies = {"image/*": binary, "multipart/form-data": form}
    return {
        "summary": "Segment an image.",
        "openapi_extra": {
            "parameters": [
                {
                    "name": name, "in": "query", "required": False, "description": text,
                    "schema": schemas[name], "style": "form", "explode": False,
                }
                for name, text in texts.items()
            ],
            "requestBody": {
                "required": True,
                "content": {kind: {"schema": schema} for kind, schema in bodies.items()},
            },
        },
        "responses": {
            200: {
                "description": "The class of each pixel. Of PNG and NPZ, the headers "
                "selfadapt-seconds, selfadapt-quality and selfadapt-notes have the rest.",
                "content": {
                    media_type: {"schema": {} if form == "json" else binary}
                    for form, media_type in FORMATS.items()
                },
            },
            **{status: {"description": text} for status, text in ERRORS.items()},
        },
    }  # fmt: skip


def page(schema: Mapping[str, Any]) -> str:
    """Return an OpenAPI schema as a page that loads nothing."""
    info = schema["info"]
    title = escape(f"{info['title']} {info['version']}")
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>',
        f"<style>{STYLE}</style><h1>{title}</h1><p>{escape(info['description'])}</p>",
        '<p>The same for programs: <a href="openapi.json">openapi.json</a></p>',
    ]
    for path, operations in schema["paths"].items():
        for verb, operation in operations.items():
            parts.append(f"<h2><code>{verb.upper()} {escape(path)}</code></h2>")
            parts.append(f"<p>{escape(operation.get('description', operation['summary']))}</p>")
            rows = [
                (parameter["name"], parameter["description"], json.dumps(parameter["schema"]))
                for parameter in operation.get("parameters", ())
            ]
            rows += [
                (status, response["description"], ", ".join(response.get("content", ())))
                for status, response in operation["responses"].items()
            ]
            parts.append("<table>")
            for name, text, more in rows:
                cells = f"<td><code>{escape(name)}</code><td>{escape(text)}<td>{escape(more)}"
                parts.append(f"<tr>{cells}")
            parts.append("</table>")
    return "\n".join(parts)
