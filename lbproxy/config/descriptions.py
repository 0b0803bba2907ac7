# SPDX-License-Identifier: Apache-2.0
"""What each key of the settings is for: the docstring below it in the source, read only when somebody asks.

Pydantic can do this as the classes are made (`use_attribute_docstrings`), which took a tenth of every start.
"""

from __future__ import annotations

import ast
import inspect
from functools import cache
from types import ModuleType

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema


def descriptions(section: type[BaseModel]) -> dict[str, str]:
    """Of a section's keys, those that it inherits included: the docstring by the key's name."""
    found: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        module = inspect.getmodule(kind)
        if module is not None and issubclass(kind, BaseModel) and kind is not BaseModel:
            found |= _in_source(module).get(kind.__name__, {})
    return found


@cache
def _in_source(module: ModuleType) -> dict[str, dict[str, str]]:
    """By class and attribute."""
    found = {}
    for kind in ast.parse(inspect.getsource(module)).body:
        if isinstance(kind, ast.ClassDef):
            found[kind.name] = {
                key.target.id: inspect.cleandoc(text.value.value)
                for key, text in zip(kind.body, kind.body[1:], strict=False)
                if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name)
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                if isinstance(text.value.value, str)
            }
    return found


class DescribedSchema(GenerateJsonSchema):
    """Pydantic's generator, which puts the descriptions into each section's properties."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        """One section's schema."""
        made = super().model_schema(schema)
        for key, text in descriptions(schema["cls"]).items():
            if key in made.get("properties", {}):
                made["properties"][key]["description"] = text
        return made
