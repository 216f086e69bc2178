import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

import growth
from imagefleet import errors
from imagefleet.job import prompt


def test_the_reference_prompt_is_split_into_words_and_its_lora():
    read = prompt.read_prompt(
        "a jump rope, <lora:magic-fantasy-forest-v2:0.35>, ((no humans))"
    )

    assert read.text == "a jump rope, , ((no humans))"
    assert read.loras == (prompt.LoraTag("magic-fantasy-forest-v2", 0.35, 0.35),)


@pytest.mark.parametrize(
    ("tag", "text_encoder_weight", "unet_weight"),
    [
        ("<lora:x>", 1, 1),
        ("<lora:x:0.5>", 0.5, 0.5),
        ("<lora:x:0.5:0.8>", 0.5, 0.8),
        ("<lora:x:te=0.2:unet=0.9>", 0.2, 0.9),
        ("<lora:x:unet=0.9>", 1, 0.9),
        ("<lora:x:0.4:unet=-0.9>", 0.4, -0.9),
        ("<LYCO:x:0.5>", 0.5, 0.5),
    ],
)
def test_weights_are_read_as_automatic1111_reads_them(
    tag: str, text_encoder_weight: float, unet_weight: float
):
    assert prompt.read_prompt(tag).loras == (
        prompt.LoraTag("x", text_encoder_weight, unet_weight),
    )


def test_a_lora_that_is_named_twice_has_its_last_weight_both_times():
    loras = prompt.read_prompt("<lora:a:0.5> <lora:b:1> <lora:a:0.2:0.3>").loras

    again = prompt.LoraTag("a", 0.2, 0.3)
    assert loras == (again, prompt.LoraTag("b", 1, 1), again)


@pytest.mark.parametrize(
    "name",
    ["../secret", "a/b", "a\\b", ".hidden", "", "a\nb", "a|b", "x" * 201, "a\0b"],
)
def test_a_name_that_is_not_a_plain_file_name_is_refused(name: str):
    with pytest.raises(errors.JobError, match="is refused"):
        prompt.read_prompt(f"<lora:{name}:1>")


@pytest.mark.parametrize(
    "weight", ["35", "-10.1", "nan", "inf", "-inf", "", "high", "1e9"]
)
def test_a_lora_weight_out_of_range_is_refused(weight: str):
    with pytest.raises(errors.JobError, match="between"):
        prompt.read_prompt(f"<lora:x:{weight}>")


@pytest.mark.parametrize(
    "tag", ["<lora:x:1:1:1>", "<lora:x:dyn=1>", "<lora:x:te=1:foo=2>"]
)
def test_a_malformed_tag_is_refused_with_the_valid_forms(tag: str):
    with pytest.raises(errors.JobError, match="<lora:name:weight>"):
        prompt.read_prompt(tag)


def test_another_extra_network_is_refused_instead_of_silently_dropped():
    with pytest.raises(errors.JobError, match="<hypernet:"):
        prompt.read_prompt("a cat <hypernet:style:1>")


def test_angle_brackets_that_are_not_a_tag_stay_words():
    assert prompt.read_prompt("a <3 b, x < y > z").text == "a <3 b, x < y > z"


@given(st.text(alphabet="<>lora:te=.x1-", max_size=60))
def test_names_are_safe_and_weights_bounded(text: str):
    try:
        read = prompt.read_prompt(text)
    except errors.JobError:
        return
    for lora in read.loras:
        assert prompt.SAFE_NAME.fullmatch(lora.name)
        assert abs(lora.unet_weight) <= prompt.WEIGHT_LIMIT
        assert abs(lora.text_encoder_weight) <= prompt.WEIGHT_LIMIT


def parts(text: str) -> list[list[tuple[str, float]]]:
    """Each section's words with their weights, rounded: 1.1 * 1.1 is not 1.21 in binary."""
    return [
        [(part.text, round(part.weight, 6)) for part in section]
        for section in prompt.weighted_parts(text)
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("words", [("words", 1.0)]),
        ("(x)", [("x", 1.1)]),
        ("[x]", [("x", 0.909091)]),
        ("(x:1.3)", [("x", 1.3)]),
        ("( x : 1.3 )", [(" x ", 1.3)]),
        ("(x:-1)", [("x", -1.0)]),
        ("(x:+.5)", [("x", 0.5)]),
        ("(x:0)", [("x", 0.0)]),
        ("((x))", [("x", 1.21)]),
        ("([x])", [("x", 1.0)]),
        ("((x:1.3))", [("x", 1.43)]),
        ("((x:1.3):2)", [("x", 2.6)]),
        ("a (b (c)) d", [("a ", 1.0), ("b ", 1.1), ("c", 1.21), (" d", 1.0)]),
        ("a(b:1.0)c", [("abc", 1.0)]),
        ("(a)(b)", [("ab", 1.1)]),
        ("(a)[b]", [("a", 1.1), ("b", 0.909091)]),
        # never closed: closed at the end
        ("a (b", [("a ", 1.0), ("b", 1.1)]),
        ("((a", [("a", 1.21)]),
        ("a [b (c:1.3", [("a ", 1.0), ("b ", 0.909091), ("c:1.3", 1.0)]),
        # never opened: a letter
        ("a) b", [("a) b", 1.0)]),
        ("a] b:1.3)", [("a] b:1.3)", 1.0)]),
        # square brackets have no number, and a round one ends whichever round one is open
        ("[x:1.3]", [("x:1.3", 0.909091)]),
        ("(a [b) c]", [("a ", 1.1), ("b", 1.0), (" c", 0.909091)]),
        # escapes
        (r"\(x\)", [("(x)", 1.0)]),
        (r"\[x\]", [("[x]", 1.0)]),
        (r"(a\)b)", [("a)b", 1.1)]),
        (r"a\\(b)", [("a\\", 1.0), ("b", 1.1)]),
        (r"a\b", [("ab", 1.0)]),
        ("a\\", [("a", 1.0)]),
        # a colon that is no weight is a letter
        (
            "a: b (c:d) (e::1.5)",
            [("a: b ", 1.0), ("c:d", 1.1), (" ", 1.0), ("e:", 1.5)],
        ),
        ("(a:1.3 b)", [("a:1.3 b", 1.1)]),
        ("(a:1e5)", [("a:1e5", 1.1)]),
        ("(:1.3)", []),
        ("()[]", []),
    ],
)
def test_emphasis_is_read_as_automatic1111_reads_it(
    text: str, expected: list[tuple[str, float]]
):
    assert parts(text) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a BREAK b", [[("a", 1.0)], [("b", 1.0)]]),
        ("a,\nBREAK\nb", [[("a,", 1.0)], [("b", 1.0)]]),
        ("BREAK", [[], []]),
        ("a BREAK BREAK b", [[("a", 1.0)], [], [("b", 1.0)]]),
        ("a (b) BREAK (c)", [[("a ", 1.0), ("b", 1.1)], [("c", 1.1)]]),
        ("(a BREAK b)", [[("a", 1.1), ("BREAK", -1.1), ("b", 1.1)]]),
        ("(a BREAK b:1.0)", [[("a", 1.0)], [("b", 1.0)]]),
        ("[a BREAK b", [[("a", 0.909091), ("BREAK", -0.909091), ("b", 0.909091)]]),
        ("(a)BREAK(b)", [[("a", 1.1)], [("b", 1.1)]]),
        ("BREAKFAST aBREAK break", [[("BREAKFAST aBREAK break", 1.0)]]),
    ],
)
def test_break_ends_a_section_and_swallows_white_space(
    text: str, expected: list[list[tuple[str, float]]]
):
    assert parts(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(a:1.2.3)", "'1.2.3' in the prompt is not a number"),
        ("(a:.)", "'.' in the prompt is not a number"),
        (
            "a (cat:101)",
            "gives 'cat' the weight 101; a weight is a number between -100 and 100",
        ),
        ("((a:50):50)", "gives 'a' the weight 2.5e"),
        ("(a:" + "9" * 400 + ")", "gives 'a' the weight inf"),
    ],
)
def test_a_word_weight_out_of_range_is_refused(text: str, reason: str):
    for read in (prompt.read_prompt, prompt.read_negative_prompt):
        with pytest.raises(errors.JobError) as refusal:
            read(text)
        assert reason in refusal.value.message


def test_a_tag_in_a_negative_prompt_is_plain_words_as_in_automatic1111():
    read = prompt.read_negative_prompt("blurry, <lora:x:0.5>")
    assert (read.text, read.loras) == ("blurry, <lora:x:0.5>", ())


@pytest.mark.parametrize(
    ("text", "stripped"),
    [
        ("a cat", "a cat"),
        ("a cat # on a mat", "a cat \n"),
        ("a # b\nc", "a \nc"),
        ("# all of it", "\n"),
        ("a\n# b\nc", "a\nc"),
        ("a\n# b\n# c\nd", "a\n\nd"),
        ("#a\n#b\nc", "\n\nc"),
        ("a #x\n#y\nb", "a \nb"),
        ("a\\#b", "a\\\n"),
        ("a#", "a\n"),
    ],
)
def test_comments_are_taken_out(text: str, stripped: str):
    assert prompt.without_comments(text) == stripped
    assert prompt.read_prompt(text) == prompt.read_prompt(stripped)
    assert prompt.read_negative_prompt(text).text == stripped
    if "#" in text:
        assert "#" in prompt.read_prompt(text, comments=False).text
        assert "#" in prompt.read_negative_prompt(text, comments=False).text


@pytest.mark.parametrize(
    ("text", "words", "weight"),
    [
        ("a cat:1.3", "a cat", 1.3),
        ("a cat : 1.3 \n", "a cat", 1.3),
        ("a cat:-.5", "a cat", -0.5),
        ("a cat:+2.", "a cat", 2.0),
        ("a cat :0", "a cat", 0.0),
        (":1.3", "", 1.3),
        ("a:b:1.5", "a:b", 1.5),
        ("(a cat:1.3", "(a cat", 1.3),
        ("a cat:1.3 <lora:x:1>", "a cat", 1.3),
        ("a cat # of mine\n:2", "a cat", 2.0),
        ("(a cat:1.3)", "(a cat:1.3)", 1.0),
        ("a cat:1.3,", "a cat:1.3,", 1.0),
        ("a cat:1e3", "a cat:1e3", 1.0),
        ("a cat: 1.3.1", "a cat: 1.3.1", 1.0),
        ("a cat:", "a cat:", 1.0),
        ("1.3", "1.3", 1.0),
    ],
)
def test_a_number_after_the_last_colon_is_the_prompts_own_weight(
    text: str, words: str, weight: float
):
    read = prompt.read_prompt(text)
    assert (read.text, read.weights) == (words, (weight,))
    assert read.sections == prompt.weighted_parts(words)
    # A negative prompt has none in AUTOMATIC1111.
    assert prompt.read_negative_prompt(text).weights == (1.0,)


def test_a_time_of_day_is_not_taken_for_a_weight_in_silence():
    with pytest.raises(errors.JobError, match="':45', which is its weight as a whole"):
        prompt.read_prompt("a clock that shows 12:45")


prompts = st.one_of(st.text(), st.text(alphabet="()[]:|\\<>lora 1.5a,\nBREAKND"))


@given(prompts)
def test_no_words_are_lost_or_added(text: str):
    try:
        sections = prompt.weighted_parts(text)
    except errors.JobError:
        return
    found = iter("".join(part.text for section in sections for part in section))
    rest = iter(text)
    assert all(letter in rest for letter in found), (
        "what is read is the text, less its signs"
    )
    for section in sections:
        weights = [part.weight for part in section]
        assert all(abs(weight) <= prompt.EMPHASIS_LIMIT for weight in weights)
        assert all(part.text for part in section)


def states(read: prompt.Prompt) -> list[list[tuple[int, str]]]:
    return [[(each.until, each.text) for each in one.states] for one in read.subprompts]


def test_words_change_in_both_prompts():
    for read in (prompt.read_prompt, prompt.read_negative_prompt):
        assert states(read("a [b:(c:1.3):0.5]", steps=4)) == [
            [(2, "a b"), (4, "a (c:1.3)")]
        ]
        last = read("a [b:(c:1.3):0.5]", steps=4).subprompts[0].states[-1]
        assert last.sections == prompt.weighted_parts("a (c:1.3)")
        assert states(read("[a:b:21]", steps=4, first_steps=20)) == [
            [(1, "a"), (4, "b")]
        ]


def test_each_call_has_the_words_of_the_first_state_that_lasts_until_it():
    """As in AUTOMATIC1111, the first words last a call longer, and are those beyond all steps."""
    (one,) = prompt.read_prompt("[a|b]", steps=4).subprompts
    assert "".join(one.at(call).text for call in range(7)) == "aabab" + "aa"


@pytest.mark.parametrize(
    "text",
    [
        "[a]",
        "[a:b]",
        "[a:b:c]",
        "[a:0.5:b]",
        "[a:b:c:0.5]",
        "[a:b:0.5 c",
        "a:b:0.5]",
        "a: b | c",
        "(a|b)",
        "(a:1.2) [b]",
        "[(a:1.2)]",
        "[a|b:0.5]",
        "[(a|b):0.5]",
        r"\[a:b:0.5\]",
        r"[a\:0.5]",
        r"[a\|b]",
        "[(a:b:0.5]",
        "[a:b:0.5)",
        "[a:0.5 b]",
        *["ANDY", "hand", "a and b", "SAND", "And", "AND_1"],
    ],
)
def test_what_automatic1111_reads_as_words_is_words(text: str):
    assert prompt.read_prompt(text).text == text


@pytest.mark.parametrize(
    ("text", "words", "weights"),
    [
        ("a cat AND a dog", ["a cat", " a dog"], (1.0, 1.0)),
        ("a cat:0.7 AND a dog :-1.2 ", ["a cat", " a dog"], (0.7, -1.2)),
        ("AND", ["", ""], (1.0, 1.0)),
        ("a\nAND\nb:.5", ["a", "\nb"], (1.0, 0.5)),
        ("a,AND,b", ["a,", ",b"], (1.0, 1.0)),
        ("a AND # b\nc", ["a", " \nc"], (1.0, 1.0)),
        ("(a AND b:1.3)", ["(a", " b:1.3)"], (1.0, 1.0)),
    ],
)
def test_and_joins_prompts_of_their_own_weight(
    text: str, words: list[str], weights: tuple[float, ...]
):
    read = prompt.read_prompt(text)
    assert [one.states[0].text for one in read.subprompts] == words
    assert read.weights == weights


def test_what_and_joins_is_edited_by_itself():
    read = prompt.read_prompt("[a:b:2] AND [c AND d:1] <lora:x:0.5>", steps=4)
    assert states(read) == [[(2, "a"), (4, "b")], [(4, " [c")], [(4, " d:1]")]]
    assert [lora.name for lora in read.loras] == ["x"]


def test_too_many_prompts_or_texts_are_refused():
    assert len(prompt.read_prompt(" AND ".join("abcdefgh")).subprompts) == 8
    with pytest.raises(
        errors.JobError, match="the prompt joins 9 prompts with AND; at most 8 work"
    ):
        prompt.read_prompt(" AND ".join("abcdefghi"))
    of_20 = [
        f"{letter}[1|2|3|4|5|6|7|8|9|10|11|12|13|14|15|16|17|18|19|20]"
        for letter in "abcd"
    ]
    assert len(prompt.read_prompt(" AND ".join(of_20[:3])).states) == 60
    with pytest.raises(errors.JobError, match="more than 64 different texts"):
        prompt.read_prompt(" AND ".join(of_20))


def test_and_in_a_negative_prompt_is_a_word_as_in_automatic1111():
    assert prompt.read_negative_prompt("cats AND dogs").text == "cats AND dogs"


def test_tags_are_removed_before_editing_is_looked_for():
    assert prompt.read_prompt("[<lora:x:0.5>]").text == "[]"
    read = prompt.read_prompt("[a<lora:x:0.5>:b:0.5]", steps=2)
    assert [lora.name for lora in read.loras] == ["x"], "in all steps"
    assert states(read) == [[(1, "a"), (2, "b")]]


@given(st.text(alphabet="[](){}:|\\ a.5\n"))
def test_editing_raises_only_job_errors(text: str):
    with contextlib.suppress(errors.JobError):
        prompt.read_prompt(text)


def try_to_read(text: str) -> None:
    """Reads a prompt that may be refused, each time anew."""
    prompt.read_prompt.cache_clear()
    with contextlib.suppress(errors.JobError):
        prompt.read_prompt(text)


@pytest.mark.parametrize("unit", ["(", "[", ")", "]", "()", "[]"])
def test_many_brackets_are_read_in_seconds_not_in_hours(unit: str):
    growth.assert_linear(
        lambda size: try_to_read(unit * (size // len(unit)) + ":|a]"), size=2**16
    )


@pytest.mark.parametrize("pair", ["()", "[]"])
def test_deeply_nested_brackets_are_read_in_seconds_not_in_hours(pair: str):
    growth.assert_linear(
        lambda depth: try_to_read(pair[0] * depth + "a:" + pair[1] * depth), size=2**15
    )


@pytest.mark.parametrize(
    "unit",
    [
        "(:",
        "[a:",
        "[a|",
        "(a:1.1)",
        "[a:b]",
        "\\",
        "<a:",
        "BREAK ",
        ": ",
        ":1",
        "#",
        "\n#",
        "(a:1" + " " * 99,
    ],
)
@pytest.mark.parametrize("end", ["", ":|a]", ">", ")"])
def test_a_long_prompt_is_read_in_linear_time_whatever_its_text(unit: str, end: str):
    growth.assert_linear(
        lambda size: try_to_read(unit * (size // len(unit)) + end), size=2**15
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (r"a \(very\) red boat, <lora:ink:0.5>", "a (very) red boat"),
        ("a (red:1.3) [small] boat:1.2", "a red small boat"),
        ("a boat BREAK a house", "a boat a house"),
        ("a boat, <lora:ink>, at sea", "a boat, at sea"),
        ("a boat AND a [red:blue:5] house:0.5", "a boat a blue house"),
        ("a boat <lora:/:1>", "a boat <lora:/:1>"),  # refused, so not drawn
    ],
)
def test_the_words_of_a_prompt_have_neither_weights_nor_escapes(text: str, words: str):
    assert prompt.read_words(text)[0] == words
