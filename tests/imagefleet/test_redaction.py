import pytest

import growth
from imagefleet import redaction


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://u:secret@h:8443/a/b?sig=secret#x", "https://h:8443/a/b"),
        ("HTTP://h", "http://h"),
        ("http://[::1]:80/a", "http://[::1]:80/a"),
        ("http://u:secret/x@h/y", "(secret)"),
        ("http://h:secret/x", "(secret)"),
        ("u:secret@h/x", "(secret)"),
        ("https://h/a/http://u:secret@x", "https://x"),
    ],
)
def test_an_address_is_shown_without_its_secrets(address: str, shown: str):
    assert redaction.address(address) == shown


@pytest.mark.parametrize(
    "text",
    [
        "AccountName=a;AccountKey=secret==;EndpointSuffix=x",
        "SharedAccessSignature=sv=1&sig=secret",
        "cannot connect to http://u:secret@h:80/x",
        "the path 'http:/u:secret@h/x' is none",
        "u:secret@h:9090 is no URL",
        "GET https://h/x?code=secret failed",
        "h/a.safetensors?token=secret&x=1",
        "Authorization: Bearer secret123.x",
        "Authorization: Basic secret123==",
        "token eyJhbGciOiJFUzI1NiJ9.eyJzZWNyZXQiOjF9.secret",
    ],
)
def test_a_librarys_text_is_shown_without_the_secrets_in_it(text: str):
    shown = redaction.message(text)

    assert "secret" not in shown.replace(redaction.MASKED, "")
    assert len(shown) > 5


@pytest.mark.parametrize(
    "text",
    [
        "append ?token=YOUR_TOKEN",
        "registry.example.com/acme/imagefleet:1.2@sha256:0123",
        "--push-url must be an address (.../api/v1/import/prometheus)",
        "fetching https://h/x: 5 of 10 MB",
        "give --push-token or user:password@ in --push-url, not both",
        "the server asks for Basic authentication, or a bearer authorization",
    ],
)
def test_a_text_without_secrets_stays_as_it_is(text: str):
    assert redaction.message(text) == text


def test_words_around_a_password_say_that_one_was_there():
    assert (
        redaction.message("'u:secret@h:90' is no URL")
        == f"'{redaction.MASKED}@h:90' is no URL"
    )


@pytest.mark.parametrize(
    "text", ["a:@", "://", "http://a?", "eyJ-.", "sig=", "@", "?token="]
)
def test_a_hostile_text_is_shown_in_linear_time(text: str):
    growth.assert_linear(lambda count: redaction.message(text * count), size=5_000)


@pytest.mark.parametrize(
    "address",
    [
        "h:80",
        "ftp://h",
        "http://",
        "http://h:0",
        "http://h:99999",
        "http://h:x",
        "http://h:",
    ],
)
def test_an_address_that_is_not_valid_is_refused_without_quoting_it(
    address: str,
):
    with pytest.raises(ValueError, match="should be a URL") as refused:
        redaction.check_address(address)

    assert address not in str(refused.value).removesuffix(
        "http:// or https://, has a host and, if any, a port from 1 to 65535, say"
        " http://HOST:9090"
    )
