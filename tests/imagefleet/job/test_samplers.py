"""The names of samplers and schedulers that jobs have."""

import pytest

from imagefleet import errors
from imagefleet.job.passes import hires
from imagefleet.validation import JSONDict
from messages import read


def test_the_older_sampler_field_is_read():
    assert read(sampler_index="Euler a").sampler == "euler_ancestral"
    with pytest.raises(errors.InvalidMessageError, match="sampler_name"):
        read(sampler_index="LSM")


@pytest.mark.parametrize(
    ("field", "name", "said"),
    [
        (
            "sampler_name",
            "Eular a",
            "did you mean 'Euler a'? (of models of latents: Euler a, ",
        ),
        (
            "sampler_name",
            "DPM++ 2M Karas",
            "did you mean 'DPM++ 2M Karras'? (of models of lat",
        ),
        (
            "sampler_name",
            "smart5",
            "did you mean 'smart50'? (of models of pixels: Euler a, ",
        ),
        (
            "sampler_name",
            "qqqq",
            "unknown sampler 'qqqq' (of models of latents: Euler a, ",
        ),
        (
            "scheduler",
            "Karas",
            "did you mean 'Karras'?; known: Automatic, Uniform, Karras, ",
        ),
    ],
)
def test_an_unknown_sampler_or_scheduler_gets_a_look_alike_and_the_names_of_its_kind(
    field: str, name: str, said: str
):
    with pytest.raises(errors.InvalidMessageError) as caught:
        read(**{field: name})
    assert said in str(caught.value)
    assert ("smart50" in str(caught.value)) == (name == "smart5")


@pytest.mark.parametrize(
    ("name", "sampler"),
    [
        ("Euler a", "euler_ancestral"),
        ("K_EULER_A", "euler_ancestral"),
        ("DPM++ 2M Karras", "dpmpp_2m_karras"),
        ("k_dpmpp_2m_ka", "dpmpp_2m_karras"),
        ("DPM++ 2M SDE Heun Exponential", "dpmpp_2m_sde_heun_exponential"),
        ("k_dpmpp_2m_sde_heun_exp", "dpmpp_2m_sde_heun_exponential"),
        ("k_lms_ka", "lms_karras"),
        ("Euler SGM Uniform", "euler_sgm_uniform"),
        ("DDIM CFG++", "ddim_cfgpp"),
    ],
)
def test_samplers_have_the_names_of_a1111_and_k_diffusion(name: str, sampler: str):
    assert read(sampler_name=name).sampler == sampler


@pytest.mark.parametrize(
    ("name", "scheduler", "sampler"),
    [
        ("DPM++ 2M", "Karras", "dpmpp_2m_karras"),
        ("DPM++ 2M", "Automatic", "dpmpp_2m_karras"),
        ("DPM++ 2M", "uniform", "dpmpp_2m"),
        ("DPM++ 2M", "", "dpmpp_2m"),
        ("DPM++ 2M Karras", "Uniform", "dpmpp_2m"),
        ("DPM++ 2M Karras", "", "dpmpp_2m_karras"),
        ("DPM++ 2M Karras", "Automatic", "dpmpp_2m_karras"),
        ("DPM++ 2M Karras", "Exponential", "dpmpp_2m_exponential"),
        ("DPM++ 2M SDE Karras", "automatic", "dpmpp_2m_sde_exponential"),
        ("Euler Karras", "Automatic", "euler"),
        ("Euler a", "karras", "euler_ancestral_karras"),
        ("DPM++ 3M SDE", "Automatic", "dpmpp_3m_sde_exponential"),
        ("Restart", "Automatic", "restart"),
        ("LCM", "sgm_uniform", "lcm_sgm_uniform"),
        ("LCM", "SGMUniform", "lcm_sgm_uniform"),
        ("DDIM", "Karras", "ddim"),
    ],
)
def test_the_scheduler_field_means_what_it_does_in_a1111_1_9(
    name: str, scheduler: str, sampler: str
):
    assert read(sampler_name=name, scheduler=scheduler).sampler == sampler


@pytest.mark.parametrize(
    ("fields", "second"),
    [
        ({"sampler_name": "Euler Karras"}, "dpmpp_sde_karras"),
        ({"sampler_name": "DPM++ 2M Karras"}, "dpmpp_sde"),
        ({"sampler_name": "DPM++ 2M Uniform"}, "dpmpp_sde"),
        ({"sampler_name": "Euler", "scheduler": "Beta"}, "dpmpp_sde_beta"),
        ({"hr_scheduler": "Simple", "scheduler": "Beta"}, "dpmpp_sde_simple"),
        (
            {"hr_sampler_name": "DPM++ SDE Karras", "scheduler": "Beta"},
            "dpmpp_sde_karras",
        ),
        (
            {"hr_sampler_name": "DPM++ SDE Karras", "hr_scheduler": "Beta"},
            "dpmpp_sde_beta",
        ),
    ],
)
def test_a_second_passs_schedule_is_its_own_or_that_of_the_first_in_field_or_name(
    fields: JSONDict, second: str
):
    job = read(**{"enable_hr": True, "hr_sampler_name": "DPM++ SDE", **fields})
    assert hires.sampler(job) == second


@pytest.mark.parametrize(
    ("fields", "title"),
    [
        ({"sampler_name": "PLMS"}, "PLMS"),
        ({"sampler_name": "LCM Karras"}, "LCM"),
        ({"sampler_name": "smart50"}, "smart50"),
        ({"enable_hr": True, "hr_sampler_name": "DDIM"}, "DDIM"),
    ],
)
def test_a_downcast_schedule_is_refused_for_samplers_that_round_elsewhere(
    fields: JSONDict, title: str
):
    settings = {"override_settings": {"use_downcasted_alpha_bar": True}}
    with pytest.raises(errors.JobError, match=f"bar: is not for {title}$"):
        read(**fields, **settings)
    assert read(sampler_name="DPM++ 2M Karras", **settings).sampler_options.is_downcast


@pytest.mark.parametrize("name", ["DPM adaptive", "DPM adaptive Karras"])
def test_a_refiner_is_refused_where_the_image_decides_the_steps(name: str):
    with pytest.raises(errors.JobError, match="not supported with DPM adaptive"):
        read(sampler_name=name, refiner_checkpoint="xl", refiner_switch_at=0.8)
