import base64
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagefleet import errors
from imagefleet.job import samplers, settings_table, sizes
from imagefleet.job.message import Job, is_safe_id, read_job
from imagefleet.job.noise import Noise
from imagefleet.job.passes import hires
from imagefleet.validation import JSONDict
from messages import read

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=12), inner, max_size=4)
    ),
    max_leaves=12,
)

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True)

words = st.text(
    alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0<>")
)

jobs = st.builds(
    Job,
    prompt=words,
    negative_prompt=words,
    sampler_name=st.sampled_from(sorted(samplers.NAMES)),
    scheduler=st.sampled_from([None, "", *samplers.SCHEDULERS]),
    steps=st.integers(2, 150),
    cfg_scale=st.floats(1, 30),
    width=st.none() | st.integers(8, 256).map(lambda side: side * 8),
    height=st.none() | st.integers(8, 256).map(lambda side: side * 8),
    seed=st.integers(0, 2**32 - 65),
    batch_size=st.integers(1, 8),
    n_iter=st.integers(1, 8),
    clip_skip=st.integers(1, 12),
    eta=st.none() | st.floats(0, 1),
    s_churn=st.floats(0, 100),
    s_tmax=st.floats(0, 1000),
    randn_source=st.sampled_from(["CPU", "GPU", "NV"]),
    eta_noise_seed_delta=st.integers(-100, 31337),
    subseed=st.integers(0, 2**32 - 1),
    subseed_strength=st.floats(0, 1),
    seed_resize_from_w=st.sampled_from([0, 64, 512]),
    enable_prompt_comments=st.booleans(),
    id=names,
    campaign=st.none() | names,
    output=st.fixed_dictionaries(
        {
            "format": st.sampled_from(["png", "jpeg", "webp"]),
            "quality": st.integers(1, 100),
        }
    ),
    metadata=st.dictionaries(words, st.integers() | words | st.booleans(), max_size=3),
)


def refusal(body: str) -> str | None:
    """Why a message is not a valid job; other exceptions propagate."""
    try:
        read_job(body, "message-1")
    except errors.InvalidMessageError as error:
        return error.message
    return None


@given(st.text())
def test_any_text_raises_only_invalid_message(text: str):
    assert refusal(text) != ""


@given(json_values)
def test_any_json_raises_only_invalid_message(value: object):
    assert refusal(json.dumps(value)) != ""


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from(sorted(Job.model_fields)), json_values))
def test_any_values_of_known_fields_raise_only_invalid_message(
    fields: dict[str, object],
):
    assert refusal(json.dumps({"prompt": "", **fields})) != ""


@settings(max_examples=50)
@given(
    st.dictionaries(
        st.sampled_from(sorted(settings_table.FIELDS)), json_values, min_size=1
    )
)
def test_any_values_of_foreign_fields_raise_only_invalid_message(
    fields: dict[str, object],
):
    reason = refusal(json.dumps({"prompt": "", **fields}))

    assert reason is None or any(name in reason for name in fields)


@given(st.binary())
def test_any_base64_raises_only_invalid_message(data: bytes):
    assert refusal(base64.b64encode(data).decode()) != ""


@pytest.mark.parametrize(
    "body",
    [
        "[" * 100_000,
        '{"prompt":' * 50_000,
        '{"prompt":"a","metadata":' + '{"a":' * 2_000 + "1" + "}" * 2_001,
        '{"prompt":"a","seed":' + "9" * 5_000 + "}",
        '{"prompt":"a","cfg_scale":1e999}',
        '{"prompt":"a","cfg_scale":NaN}',
        '{"prompt":"\\ud800"}',
        '{"prompt":"a","metadata":{"\\ud800":1}}',
        '{"prompt":"a","\\ud800":1}',
        '{"prompt":"a","id":"\\u0000"}',
    ],
)
def test_what_breaks_parsers_is_an_invalid_message(body: str):
    with pytest.raises(errors.InvalidMessageError):
        read_job(body, "message-1")


@settings(max_examples=100)
@given(jobs)
def test_a_job_survives_the_way_through_its_message(job: Job):
    (message,) = sizes.checked_messages([job.to_message()])
    encoded = base64.b64encode(message.encode()).decode()

    assert "\n" not in message
    assert read_job(message, "another-message") == job
    assert read_job(f" {encoded}\n", "another-message") == job


def test_a_job_without_an_id_takes_its_messages_and_always_the_same_seed():
    first = read()
    again = read()

    assert first.id == "message-1"
    assert first.seed == again.seed >= 0
    assert read_job('{"prompt": "a cat"}', "message-2").seed != first.seed


def test_seeds_count_up_by_image_and_wrap_at_32_bits():
    job = read(seed=2**32 - 1, batch_size=2)

    assert [job.image_seed(0), job.image_seed(1)] == [2**32 - 1, 2**32]


def test_blob_names_follow_from_the_job_alone():
    assert read(id="a").blob_name(0) == "default/a.png"
    assert read(id="a", campaign="spring", n_iter=2).blob_name(1) == "spring/a~1.png"
    assert read(id="a", output={"format": "jpeg"}).blob_name(0) == "default/a.jpg"


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("cfg_scale", [-0.5, 31, math.nan, math.inf]),
        ("width", [0, 63, 64.5, 2056, -512]),
        ("seed", [-2, 2**63, 0.5]),
        ("id", ["", "../a", "a/b", "-a", "x" * 129, "a b", "a\n"]),
        ("campaign", ["", "..", "a/b", "a\n"]),
        ("model", ["../m", "", "a/b", ".m", "m\n"]),
        ("randn_source", ["cuda", "", 1]),
        ("infotext", ["Steps: 30, CFG scale: 9"]),
        ("sampler_name", ["LSM", "", "DDIM Karras", "DPM++ 4M SDE"]),
        ("scheduler", ["Exponent", "SGM", 5]),
        ("output", [{"format": "gif"}, {"quality": 0}, {"qualty": 5}, "png"]),
        ("metadata", ["x", {"a": "x" * 4096}, {"a": "\u4e00" * 1400}]),
        ("prompt", [None, 5, "x" * 65_537, "<lora:../x:1>", "a AND " * 8, "(a:1.1.1)"]),
        ("negative_prompt", ["x" * 65_537, "[" * 33 + ":1]" * 33, "(a:1000)"]),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_the_fields_name(
    field: str, values: list[object]
):
    for value in values:
        with pytest.raises(errors.InvalidMessageError, match=field):
            read(**{field: value})
        assert field != "id" or not is_safe_id(value)


@pytest.mark.parametrize(
    "fields",
    [
        {"negative_prompt": None},
        {"sampler_name": None, "steps": None, "randn_source": None},
        {"hr_prompt": None, "enable_prompt_comments": None, "alwayson_scripts": None},
    ],
)
def test_null_switches_a_field_off(fields: dict[str, None]):
    assert read(**fields).digest == read().digest


def test_too_many_images_are_refused():
    with pytest.raises(errors.InvalidMessageError, match="batch_size x n_iter is 1200"):
        read(batch_size=600, n_iter=2)


def test_a_misspelt_field_is_refused_with_a_suggestion():
    with pytest.raises(errors.InvalidMessageError, match="did you mean 'cfg_scale'"):
        read(cfg_scael=7)


@pytest.mark.parametrize(
    "title",
    [
        "dreamshaper_8",
        "dreamshaper_8.safetensors",
        "dreamshaper_8.safetensors [879db523c3]",
        "dreamshaper_8 [879db523c3]",
        "sd/1.5/dreamshaper_8.ckpt [879db523c3]",
        "sd\\dreamshaper_8.safetensors",
    ],
)
def test_the_checkpoint_of_override_settings_is_the_model(title: str):
    job = read(
        override_settings={"sd_model_checkpoint": title, "CLIP_stop_at_last_layers": 2},
        override_settings_restore_afterwards=True,
    )

    assert (job.model, job.clip_skip) == ("dreamshaper_8", 2)
    assert job == read(model="dreamshaper_8", clip_skip=2)


@pytest.mark.parametrize(
    ("field", "value", "setting"),
    [
        ("model", "b", "sd_model_checkpoint"),
        ("clip_skip", 1, "CLIP_stop_at_last_layers"),
    ],
)
def test_an_override_that_contradicts_a_field_is_refused_naming_both(
    field: str, value: object, setting: str
):
    override = {"sd_model_checkpoint": "a", "CLIP_stop_at_last_layers": 2}[setting]
    with pytest.raises(
        errors.InvalidMessageError,
        match=rf"override_settings\.{setting} contradicts the field {field}",
    ):
        read(**{field: value}, override_settings={setting: override})


def test_settings_of_samplers_and_noise_are_fields_of_the_job():
    settings = {
        "randn_source": "NV",
        "eta_noise_seed_delta": 31337,
        "s_churn": 2,
        "s_tmin": 0.1,
        "s_tmax": 9,
        "s_noise": 1.1,
        "s_min_uncond": 2.5,
        "enable_prompt_comments": False,
    }
    job = read(override_settings=settings)
    assert job == read(**settings)
    assert job.sampler_options == samplers.Options(None, 2, 0.1, 9, 1.1, 2.5)
    assert job.image_noise(0) == Noise("NV", 31337)
    assert read().sampler_options == samplers.Options()
    assert read().image_noise(3) == Noise()


@pytest.mark.parametrize(
    ("sampler", "payload", "eta"),
    [
        ("Euler a", {}, 0.25),
        ("DDIM", {}, 0.75),
        ("Euler a", {"eta": 0}, 0),
        ("DDIM", {"eta": 1}, 1),
        ("DDIM", {"eta": None}, 0.75),
    ],
)
@pytest.mark.parametrize("field", ["sampler_name", "sampler_index"])
def test_eta_is_the_payloads_or_the_setting_of_its_sampler(
    sampler: str, payload: JSONDict, eta: float, field: str
):
    settings = {"eta_ancestral": 0.25, "eta_ddim": 0.75}
    job = read(**{field: sampler}, **payload, override_settings=settings)
    assert job.sampler_options.eta == eta


@pytest.mark.parametrize(
    ("first", "second", "payload", "etas"),
    [
        ("Euler a", "DDIM", {}, (0.25, 0.75)),
        ("DDIM", "Euler a", {}, (0.75, 0.25)),
        ("DDIM", "Euler a", {"eta": 0.5}, (0.5, 0.5)),
    ],
)
def test_each_pass_has_the_eta_of_its_own_sampler(
    first: str, second: str, payload: JSONDict, etas: tuple[float, float]
):
    settings = {"eta_ancestral": 0.25, "eta_ddim": 0.75}
    fields = {"sampler_name": first, "hr_sampler_name": second, **payload}
    job = read(**fields, enable_hr=True, override_settings=settings)
    assert (job.sampler_options.eta, job.options_of(hires.sampler(job)).eta) == etas


def test_with_a_variation_the_subseed_counts_up_instead_of_the_seed():
    job = read(seed=5, subseed=8, subseed_strength=0.5, batch_size=2)
    assert [job.image_seed(index) for index in range(2)] == [5, 5]
    assert [job.image_noise(index).subseed for index in range(2)] == [8, 9]
    chosen = read(seed=5, subseed_strength=0.5)
    assert chosen.subseed >= 0
    assert chosen.subseed == read(seed=5, subseed_strength=0.5).subseed != chosen.seed


def test_a_seed_is_resized_only_from_a_whole_size():
    size = {"seed_resize_from_w": 512, "seed_resize_from_h": 768}
    assert read(**size).image_noise(0).resize_from == (512, 768)
    for name in size:
        assert read(**size | {name: -1}).image_noise(0).resize_from is None


@pytest.mark.parametrize("source", ["CPU", "GPU", "NV"])
def test_seeds_have_63_bits_and_those_of_further_images_too(source: str):
    fields = {"randn_source": source, "batch_size": 2}
    job = read(seed=8834915829939807712, **fields)
    assert [job.image_seed(at) for at in range(2)] == [
        8834915829939807712,
        8834915829939807713,
    ]
    with pytest.raises(
        errors.InvalidMessageError, match="seed: the seeds of 2 images from 9223"
    ):
        read(seed=2**63 - 1, **fields)
    with pytest.raises(errors.InvalidMessageError, match="seed: the seeds of 2 images"):
        read(subseed=2**63 - 1, **fields)


@pytest.mark.parametrize("name", ["DDIM", "PLMS"])
def test_one_step_that_draws_only_noise_is_refused(name: str):
    with pytest.raises(
        errors.InvalidMessageError, match=rf"steps is 1: {name} takes 2 at least"
    ):
        read(sampler_name=name, steps=1)


def test_the_prompts_own_weight_multiplies_the_guidance():
    assert read(
        prompt="a cat:3", cfg_scale=8, negative_prompt="a dog:5"
    ).parsed_prompt.weights == (3,)
    with pytest.raises(
        errors.InvalidMessageError, match=r"cfg_scale: 8 times .* is 4, is more"
    ):
        read(prompt="a cat:4", cfg_scale=8)
    with pytest.raises(
        errors.InvalidMessageError, match=r"cfg_scale: 8 times .* is -4, is more"
    ):
        read(prompt="a cat AND a dog:-4", cfg_scale=8)


def test_prompts_are_edited_by_the_steps_of_the_job():
    """A sampler of two calls a step has twice as many, as in AUTOMATIC1111."""
    words = {"prompt": "[a:b:0.5]", "negative_prompt": "[a:b:5]", "steps": 8}
    for sampler, last in (("Euler", 4), ("Heun", 8)):
        job = read(**words, sampler_name=sampler)
        prompts = job.parsed_prompt, job.parsed_negative_prompt
        assert [one.subprompts[0].states[0].until for one in prompts] == [last, 5]
        assert (
            job.model_copy(update={"steps": 4}).parsed_prompt.states[0].until
            == last // 2
        )


def test_comments_are_not_part_of_the_prompts():
    words = {"prompt": "a cat # <lora:x:1>\n", "negative_prompt": "# (a:1.1.1)\nblurry"}
    job = read(**words)
    assert job.parsed_prompt.loras == ()
    assert job.shown_prompts == ("a cat \n", "\nblurry")
    assert (job.prompt, job.negative_prompt) == tuple(words.values())
    with pytest.raises(errors.InvalidMessageError, match="negative_prompt"):
        read(**words, override_settings={"enable_prompt_comments": False})
    job = read(prompt="a #1 cat", enable_prompt_comments=False)
    assert job.parsed_prompt.text == job.shown_prompts[0] == "a #1 cat"


@pytest.mark.parametrize("usual", ["Automatic", "None", "", None])
def test_a_vae_is_named_by_its_file_as_the_setting_is(usual: object):
    for title in (
        "sharp",
        "sharp.safetensors",
        "folder/sharp.safetensors [0123456789]",
    ):
        assert read(sd_vae=title) == read(override_settings={"sd_vae": title})
        assert read(sd_vae=title).sd_vae == "sharp"
    assert (
        read(sd_vae=usual).sd_vae
        is read(override_settings={"sd_vae": usual}).sd_vae
        is None
    )
    assert read(sd_vae=usual).digest == read().digest
    with pytest.raises(
        errors.InvalidMessageError, match="sd_vae: should be the name of a file"
    ):
        read(sd_vae="a/..")


@pytest.mark.parametrize(
    ("setting", "hint"),
    [("sd_unet", ""), ("sd_model_chekpoint", ".*did you mean 'sd_model_checkpoint'")],
)
def test_an_override_that_changes_the_image_is_refused_by_name(setting: str, hint: str):
    with pytest.raises(
        errors.InvalidMessageError, match=rf"override_settings\.{setting} is not{hint}"
    ):
        read(override_settings={setting: 31337})


@given(
    st.dictionaries(
        st.sampled_from([*settings_table.SETTINGS]) | st.text(),
        json_values,
    )
    | json_values
)
def test_any_override_settings_raise_only_invalid_message(settings: object):
    assert refusal(json.dumps({"prompt": "", "override_settings": settings})) != ""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("", "the message is empty"),
        ("null", "the message is JSON, but no object"),
        ("[1]", "the message is JSON, but no object"),
        ('"text"', "the message is JSON, but no object"),
        ("   ", "the message is empty"),
        (
            '{"prompt": "a", "output": "png"}',
            "output: should be an object of names and values",
        ),
        ('{"prompt": "a", "then": {"steps": 2}}', "then: should be a list"),
    ],
)
def test_a_refusal_uses_the_words_of_json(body: str, expected: str):
    assert refusal(body) == expected


def test_a_reason_is_bounded_however_long_the_message():
    fields = {f"unknown{number}": 1 for number in range(5_000)}
    with pytest.raises(errors.InvalidMessageError) as caught:
        read(**fields)

    assert len(caught.value.message) < 5_000
