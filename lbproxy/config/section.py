# SPDX-License-Identifier: Apache-2.0
"""What every part of the settings tree is: frozen, without unknown keys, its docstrings the schema's descriptions."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


class Section(BaseModel):
    """A part of the tree: frozen, without unknown keys. Docstrings of attributes become the schema's descriptions."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,  # so that a check between keys also sees the key that was not written
        hide_input_in_errors=True,
    )


class ShortSection(Section):
    """A section that may also be written as one string."""

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        mapping = handler.resolve_ref_schema(handler(schema))
        whole = {"description": mapping.pop("description"), "anyOf": [{"type": "string"}, dict(mapping)]}
        mapping.clear()
        mapping.update(whole)
        return mapping
