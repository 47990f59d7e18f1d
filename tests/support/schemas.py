# SPDX-License-Identifier: LGPL-2.1-or-later
"""Documents validated with the JSON Schema that ``memcg-inspect schema`` prints."""

from __future__ import annotations

from functools import cache
from typing import Any

from memcg_inspect.answers import schema


def strict(schema: Any) -> Any:
    """Return a schema that refuses fields that it does not name."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(part) for name, part in schema.items()}
    if "properties" in made:
        made["additionalProperties"] = False
    return made


@cache
def validator(command: str) -> Any:
    """Return the validator of the documents of a command."""
    from jsonschema import Draft202012Validator

    made = strict(schema(command))
    Draft202012Validator.check_schema(made)
    return Draft202012Validator(made)


def errors(document: dict[str, Any]) -> dict[str, str]:
    """Return what the strict schema of its command refuses in a document, by path."""
    found = validator(document.get("command", "audit")).iter_errors(document)
    return {error.json_path: error.message[:300] for error in sorted(found, key=str)}


def checked(document: dict[str, Any]) -> dict[str, Any]:
    """Validate a document with the strict schema of its command; return it."""
    assert errors(document) == {}
    return document
