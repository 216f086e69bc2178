"""A LoRA of its own in each slot, in every format, against diffusers or the dense difference."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from imagefleet import errors
from worker.engine import contract

pytestmark = pytest.mark.slow

Tensors = dict[str, torch.Tensor]

#: A LoRA, and the dense differences that it stands for.
Style = tuple[contract.Lora, Tensors]

#: Layers by their names in diffusers, and what Black Forest Labs' code calls them.
DOUBLE = {
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "ff.linear_in": "img_mlp.0",
    "ff.linear_out": "img_mlp.2",
    "ff_context.linear_in": "txt_mlp.0",
    "ff_context.linear_out": "txt_mlp.2",
}
FUSED = {
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
}
SINGLE = {"attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2"}
OUTSIDE = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
    "single_stream_modulation.linear": "single_stream_modulation.lin",
    "proj_out": "final_layer.linear",
}


def factors(layer: Any, rank: int, generator: torch.Generator) -> tuple[Any, Any]:
    """Up and down, of which the product is as large as the layer's weight."""
    outer, inner = layer.weight.shape
    up = torch.randn(outer, rank, generator=generator) / rank**0.5
    return up * 0.5, torch.randn(rank, inner, generator=generator) / inner**0.5


@pytest.fixture(scope="session")
def layers(pipeline) -> dict[str, Any]:
    network = pipeline().transformer
    linear = torch.nn.Linear
    return {
        path: each for path, each in network.named_modules() if isinstance(each, linear)
    }


def adapted(layers: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """The layers of one name in Black Forest Labs' code, by it."""
    found: dict[str, tuple[str, ...]] = {name: (own,) for own, name in OUTSIDE.items()}
    for number in range(2):
        double = f"double_blocks.{number}"
        single = f"single_blocks.{number}"
        block = f"transformer_blocks.{number}"
        for own, name in DOUBLE.items():
            found[f"{double}.{name}"] = (f"{block}.{own}",)
        for name, parts in FUSED.items():
            found[f"{double}.{name}"] = tuple(f"{block}.{each}" for each in parts)
        for own, name in SINGLE.items():
            found[f"{single}.{name}"] = (f"single_{block}.{own}",)
    assert {path for paths in found.values() for path in paths} <= layers.keys()
    return found


def change_all(
    layers: Mapping[str, Any], rank: int, seed: int
) -> tuple[dict[str, tuple[Any, Any]], Tensors]:
    """Factors by the makers' names, and the dense differences by diffusers'."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    dense = {}
    for name, paths in adapted(layers).items():
        up_and_down = [factors(layers[path], rank, generator) for path in paths]
        down = up_and_down[0][1]
        up = torch.cat([each for each, _ in up_and_down])
        made[name] = up, down
        for path, part in zip(paths, up.chunk(len(paths)), strict=True):
            dense[path] = part @ down
    return made, dense


#: Before diffusers' names.
PREFIXES = {
    "diffusers": "transformer.",
    "bare": "",
    "base_model": "base_model.model.",
    "cut off": "diffusion_model.",
}


def in_format(kind: str, made: Mapping[str, tuple[Any, Any]], layers: Any) -> Tensors:
    """A file's tensors in a format's names; alpha is half of the rank where one is written."""
    names = adapted(layers)
    tensors: Tensors = {}
    for name, (up, down) in made.items():
        paths = names[name]
        parts = up.chunk(len(paths))
        if kind in PREFIXES:
            for path, part in zip(paths, parts, strict=True):
                key = f"{PREFIXES[kind]}{path}"
                if kind == "cut off":  # the first of diffusers' names, by its export
                    key = key.replace(".transf", ".sf")
                tensors[f"{key}.lora_A.weight"] = down.clone()
                tensors[f"{key}.lora_B.weight"] = part.clone()
        elif kind == "ai-toolkit":
            tensors[f"diffusion_model.{name}.lora_A.weight"] = down
            tensors[f"diffusion_model.{name}.lora_B.weight"] = up
        else:  # kohya
            key = f"lora_unet_{name.replace('.', '_')}"
            tensors[f"{key}.lora_down.weight"] = down * 2
            tensors[f"{key}.lora_up.weight"] = up
            tensors[f"{key}.alpha"] = torch.tensor(len(down) / 2)
    return tensors


@pytest.fixture
def save(tmp_path) -> Callable[[str, Tensors], contract.Lora]:
    def write(name: str, tensors: Tensors, weight: float = 1.0) -> contract.Lora:
        path = tmp_path / f"{name}.safetensors"
        own = {key: each.contiguous().clone() for key, each in tensors.items()}
        save_file(own, path)
        return contract.Lora(name, path, weight, weight)

    return write


@pytest.fixture
def style(layers, save) -> Callable[..., Style]:
    """A LoRA in a format at a strength, and the dense differences that it stands for."""

    def make(kind: str, rank: int = 4, seed: int = 1, weight: float = 1.0) -> Style:
        made, dense = change_all(layers, rank, seed)
        lora = save(f"style-{seed}", in_format(kind, made, layers), weight)
        return lora, {path: weight * each for path, each in dense.items()}

    return make


@pytest.fixture
def draw_as_diffusers(expected, draw_floats) -> Callable[..., list[torch.Tensor]]:
    """Draws requests, each as diffusers does with the differences that stand beside it."""

    def check(
        engine: Any, *changed: tuple[contract.ImageRequest, Tensors]
    ) -> list[torch.Tensor]:
        drawn = draw_floats(engine, *(request for request, _ in changed))
        for image, (request, dense) in zip(drawn, changed, strict=True):
            difference = image.clamp(-1, 1) - expected(request, dense)
            assert difference.abs().max() < 1e-5
        return drawn

    return check


@pytest.mark.parametrize(
    "kind", ["diffusers", "bare", "base_model", "ai-toolkit", "kohya", "cut off"]
)
def test_each_format_changes_what_its_tensors_say(
    kind: str, make_engine, style, request_of, draw_as_diffusers
):
    lora, dense = style(kind)
    engine = make_engine()
    # Two unlike ones, so that neither is merged for all.
    plain, styled = draw_as_diffusers(
        engine, (request_of(), {}), (request_of(loras=(lora,)), dense)
    )
    assert (plain - styled).clamp(-1, 1).abs().max() > 0.1
    assert engine.weight_mode == "per_slot_convolutions"


def test_unlike_loras_ranks_strengths_and_steps_share_calls(
    make_engine, style, request_of, draw_as_diffusers
):
    changed = [(request_of(seed=2, steps=5), {})]
    for seed, (rank, weight, steps) in enumerate(
        [(4, 1.0, 4), (8, 0.35, 6), (128, -0.5, 3), (16, 1.0, 8)], 3
    ):
        lora, dense = style("ai-toolkit", rank, seed, weight)
        changed.append((request_of(seed=seed, steps=steps, loras=(lora,)), dense))
    draw_as_diffusers(make_engine(slots=3), *changed)


def test_two_loras_of_a_job_add_up(make_engine, style, request_of, draw_as_diffusers):
    one, first = style("diffusers", 4, 1, 0.5)
    other, second = style("kohya", 8, 2, 0.3)
    both = {path: first[path] + second[path] for path in first}
    draw_as_diffusers(
        make_engine(), (request_of(loras=(one, other)), both), (request_of(seed=2), {})
    )


def test_a_lora_of_all_slots_is_merged_once(
    make_engine, style, request_of, draw_as_diffusers
):
    lora, dense = style("kohya")
    engine = make_engine()
    styled = [request_of(seed=seed, loras=(lora,)) for seed in range(3)]
    draw_as_diffusers(engine, *((request, dense) for request in styled))
    assert engine.weight_mode == "shared"
    draw_as_diffusers(engine, (request_of(), {}))  # the weights are restored
    assert engine.self_check is not None
    assert engine.self_check.find_fault() is None


def lokr(
    layer_rows: int, inputs: int, split: int, rank: int | None, seed: int
) -> tuple[Tensors, torch.Tensor]:
    """A LoKr's tensors, with its second half of a *rank* or whole, and the dense difference."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(split, 2, generator=generator) * 0.2
    outer = layer_rows // split
    inner = inputs // 2
    tensors = {"lokr_w1": first}
    if rank is None:
        second = torch.randn(outer, inner, generator=generator) * 0.2
        tensors["lokr_w2"] = second
    else:
        left = torch.randn(outer, rank, generator=generator) * 0.2
        right = torch.randn(rank, inner, generator=generator) * 0.2
        tensors |= {"lokr_w2_a": left, "lokr_w2_b": right}
        second = left @ right
    return tensors, torch.kron(first, second)


@pytest.mark.parametrize("rank", [2, None])
@pytest.mark.parametrize("split", [2, 3])
def test_a_lokr_of_the_makers_names_changes_queries_keys_and_values_as_one(
    rank: int | None,
    split: int,
    make_engine,
    layers,
    save,
    request_of,
    draw_as_diffusers,
):
    tensors = {}
    dense = {}
    for seed, (name, paths) in enumerate(adapted(layers).items()):
        rows = sum(len(layers[path].weight) for path in paths)
        if rows % split or "double" not in name:
            continue
        parts, whole = lokr(rows, layers[paths[0]].in_features, split, rank, seed)
        tensors |= {
            f"diffusion_model.{name}.{part}": each for part, each in parts.items()
        }
        dense |= dict(zip(paths, whole.chunk(len(paths)), strict=True))
    styled = request_of(loras=(save("lokr", tensors),))
    draw_as_diffusers(make_engine(), (styled, dense), (request_of(seed=2), {}))


def test_lycoris_own_names_and_kinds_share_calls(
    make_engine, layers, save, request_of, draw_as_diffusers
):
    generator = torch.Generator().manual_seed(0)
    loha = {}
    hadamard = {}
    kron = {}
    kronecker = {}
    for seed, (path, layer) in enumerate(layers.items()):
        if "blocks" not in path:
            continue
        key = f"lycoris_{path.replace('.', '_')}"
        halves = [factors(layer, 2, generator) for _ in range(2)]
        for half, (up, down) in enumerate(halves, 1):
            loha[f"{key}.hada_w{half}_a"] = up
            loha[f"{key}.hada_w{half}_b"] = down
        loha[f"{key}.alpha"] = torch.tensor(2.0)
        one, other = (up @ down for up, down in halves)
        hadamard[path] = 4.0 * one * other
        parts, whole = lokr(*layer.weight.shape, 2, 2, seed)
        kron |= {f"{key}.{part}": each for part, each in parts.items()}
        kronecker[path] = whole
    engine = make_engine()
    draw_as_diffusers(
        engine,
        (request_of(seed=1, loras=(save("loha", loha, 4.0),)), hadamard),
        (request_of(seed=2, loras=(save("lokr", kron),)), kronecker),
    )
    assert engine.weight_mode == "per_slot_convolutions"


def test_a_lora_of_another_model_is_refused_by_what_does_not_fit(
    make_engine, save, request_of
):
    up = torch.zeros(64, 2)
    down = torch.zeros(2, 4096)
    key = "transformer.transformer_blocks.0.attn.to_q"
    wide = save("wide", {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up})
    with pytest.raises(errors.JobError, match=r"'wide' does not fit this model"):
        make_engine().prepare(request_of(loras=(wide,)))
