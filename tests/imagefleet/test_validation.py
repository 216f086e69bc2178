import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from imagefleet import validation


class Noun(BaseModel):
    weight: float


class Order(BaseModel):
    model_config = ConfigDict(extra="forbid")

    steps: int = Field(ge=1)
    token: str = "x"
    nouns: list[Noun] = []

    @field_validator("token")
    @classmethod
    def _is_signed(cls, token: str) -> str:
        if "sig=" not in token:
            return token
        raise ValueError("is not a token")


def sentence(**fields: object) -> str:
    with pytest.raises(ValidationError) as caught:
        Order(**fields)
    return validation.sentence(caught.value, Order.model_fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "steps: is required"),
        ({"steps": 0}, "steps: should be greater than or equal to 1"),
        ({"steps": 1, "stepps": 2}, "stepps: unknown key; did you mean 'steps'?"),
        ({"steps": 1, "qqqq": 2}, "qqqq: unknown key"),
        ({"steps": 1, "nouns": [{"weight": 1}, {}]}, "nouns[1].weight: is required"),
        ({"token": "sig=s3cret"}, "steps: is required; token: is not a token"),
    ],
)
def test_a_sentence_names_each_field_and_no_value(
    fields: dict[str, object], expected: str
):
    assert sentence(**fields) == expected


def test_a_sentence_lists_a_few_of_many_reasons():
    text = sentence(steps=1, **{f"odd{number}" * 9: 1 for number in range(8)})
    assert text.count("unknown key") == validation.MAX_REASONS
    assert text.endswith("; and 3 more")
