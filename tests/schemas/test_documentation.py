"""The docstrings of fields as descriptions."""

from pydantic import BaseModel, Field, create_model

from insitu.schemas.documentation import DocumentedSchema, field_docstrings


class Base(BaseModel):
    first: int = 1
    """Of the base,
    in two lines."""
    second: int = 2
    third: int = 3
    """Of the base."""


class Derived(Base):
    """Of the class."""

    second: int = Field(default=2, description="Said by the field.")
    """Below the field."""
    third: int = 4
    """Of the derived class."""
    fourth: int = Field(default=4, alias="4th")
    """With another name."""


def test_docstrings_of_a_class_and_its_bases() -> None:
    assert field_docstrings(Derived) == {
        "first": "Of the base,\nin two lines.",
        "second": "Below the field.",
        "third": "Of the derived class.",
        "fourth": "With another name.",
    }


def test_a_class_without_source_has_none_of_its_own() -> None:
    made = create_model("Made", __base__=Base, other=(int, 1))
    assert field_docstrings(made) == field_docstrings(Base)


def test_properties_are_described_unless_their_fields_are() -> None:
    properties = Derived.model_json_schema(schema_generator=DocumentedSchema)["properties"]
    assert {key: shown["description"] for key, shown in properties.items()} == {
        "first": "Of the base,\nin two lines.",
        "second": "Said by the field.",
        "third": "Of the derived class.",
        "4th": "With another name.",
    }
