import pytest

from imagefleet import yaml_file

#: Nine levels of nine aliases: a billion strings.
LAUGHS = "a0: &a0 [x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [secret", "in line 1"),
        ("secret: 'x", "in line 1"),
        ("a: *secret", "undefined alias"),
        ("!!python/name:secret.x y", "in line 1"),
        ("a: " + "9" * 5000, "not of its type"),
        ("a: 2026-13-41", "not of its type"),
        ("!!bool x", "not of its type"),
        ("[" * 5000, "nested too deeply"),
        (LAUGHS, "more than 1,000,000 values"),
        ("a: &a [*a]", "contains itself"),
        (b"\xff\xfe\xff", "not"),
    ],
)
def test_what_is_no_yaml_or_endless_is_one_sentence(text: str | bytes, reason: str):
    with pytest.raises(yaml_file.YamlError, match=reason) as refused:
        yaml_file.parse(text)

    assert len(str(refused.value)) < 250
    assert "\n" not in str(refused.value)


def test_anchors_are_read_as_they_are():
    assert yaml_file.parse("a: &a [1, 2]\nb: *a\nc: {d: *a}") == {
        "a": [1, 2],
        "b": [1, 2],
        "c": {"d": [1, 2]},
    }
