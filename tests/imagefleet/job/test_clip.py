import unicodedata

import ftfy
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import growth
from imagefleet.job import clip

_SIGNS = [
    *"abcz 019,.:()<&;#\n\t'\"é\u0301東ア",
    *map(chr, (*range(0x2018, 0x2020), 0x2BC, 0x3000, *range(0xFF01, 0xFFF0))),
    *map(
        chr, (*range(0x132, 0x134), 0x149, *range(0x1C4, 0x1CD), *range(0x1F1, 0x1F4))
    ),
    *map(chr, (*range(0xFB00, 0xFB07), 0xFEFF, 0x206A, 0xFFFC, 0x7F, 1, 8, 0x0B, 0x1F)),
    "&amp;",
    "&lt;",
    "&quot;",
    "&#39;",
    "&#x2019;",
    "&eacute;",
    "&notin;",
    "&nothing;",
]


def words(text: str) -> str:
    """As the tokenizers then read them."""
    return " ".join(unicodedata.normalize("NFC", text).split())


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("\u201cit\u2019s\u201d", '"it\'s"'),
        ("1girl\uff0cred\u3000dress\uff08blue\uff09", "1girl,red dress(blue)"),
        ("\uff23\uff21\uff34", "CAT"),
        ("\ufb01sh, \ufb03", "fish, ffi"),
        ("black &amp; white", "black & white"),
        ("a &lt;b&gt; &amp;amp; c", "a <b> & c"),
        ("<b> black &amp; white", "<b> black &amp; white"),
        ("this&not that; &madeup; R&B", "this&not that; &madeup; R&B"),
        ("a\ufeff cat\u0007", "a cat"),
        ("東京, naïve — 8k…", "東京, naïve — 8k…"),
        ("cafÃ© it", "café it"),
    ],
)
def test_signs_that_only_look_different_are_the_same_words_as_in_automatic1111(
    prompt: str, read: str
):
    assert clip.cleaned(prompt) == read


@settings(max_examples=100)
@example(["<", "&amp;", "\n", "&amp;"])
@example(["&amp;", "\n", "<", "&amp;"])
@example(["\uff06", "a", "m", "p", "\uff1b"])
@given(st.lists(st.sampled_from(_SIGNS), max_size=12))
def test_prompts_are_cleaned_as_automatic1111s_tokenizers_clean_them(
    signs: list[str],
):
    prompt = "".join(signs)
    assert words(clip.cleaned(prompt)) == words(ftfy.fix_text(prompt))


@pytest.mark.parametrize(
    ("unit", "count", "begin", "end"),
    [
        ("amp;", 16_000, "&", "\u2019"),
        ("&", 65_000, "", "\u2019"),
        ("&" + "amp;" * 499 + " ", 32, "", ""),
    ],
)
def test_the_longest_prompt_of_names_within_names_is_cleaned_in_linear_time(
    unit: str, count: int, begin: str, end: str
):
    growth.assert_linear(
        lambda count: clip.cleaned(begin + unit * count + end), size=count
    )
