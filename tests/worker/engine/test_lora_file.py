"""What is read from a LoRA file, and why the rest is refused: always by the LoRA's name."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from jobs import errors
from worker.engine import contract, lora_file

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def layers(engine: Any) -> lora_file.Layers:
    layers: lora_file.Layers = engine._lora_cache._layers
    return layers


@pytest.fixture
def cache(layers: lora_file.Layers) -> lora_file.LoraCache:
    return lora_file.LoraCache(layers, cache_bytes=10**9)


def named(path: Path) -> contract.Lora:
    return contract.Lora("some-style", path, 1.0, 1.0)


def without(part: str) -> Callable[[Weights], Weights]:
    return lambda weights: {key: weight for key, weight in weights.items() if part not in key}


def changed(
    ending: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Weights], Weights]:
    def change_one(weights: Weights) -> Weights:
        key = next(key for key in weights if key.endswith(ending))
        return {**weights, key: change(weights[key]).contiguous()}

    return change_one


FOREIGN: dict[str, torch.Tensor] = {"transformer.blocks.0.lora_A.weight": torch.zeros(4, 4)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda _: FOREIGN, "answers to its 'transformer.blocks.0.lora_A.weight'"),
        (lambda weights: {**weights, **FOREIGN}, "answers to its 'transformer"),
        (lambda weights: {**weights, "lora_te2_x.alpha": torch.tensor(1.0)}, "lora_te2_x.alpha"),
        (lambda weights: {"emb_params": torch.zeros(3)}, "emb_params"),
        (lambda _: {"lora_unet_conv_in.hada_w1_a": torch.zeros(4, 4)}, "hada_w1_a"),
        (lambda weights: {**weights, "lora_unet_conv_in.dora_scale": torch.ones(4)}, "dora_scale"),
        (lambda _: {}, "holds no weights"),
        (without("lora_up"), "does not fit this model: for"),
        (without("lora_down"), "does not fit this model: for"),
        (changed("lora_down.weight", lambda tensor: tensor[:, :-1]), "does not fit this model"),
        (changed("lora_up.weight", lambda tensor: tensor[:-1]), "does not fit this model"),
        (changed("lora_up.weight", lambda tensor: tensor[:, :-1]), "does not fit this model"),
        (changed("lora_up.weight", lambda tensor: tensor[:0]), "does not fit this model"),
        (changed("alpha", lambda _: torch.ones(2)), "does not fit this model"),
        (changed("alpha", lambda alpha: alpha * torch.nan), "is damaged"),
        (changed("lora_up.weight", lambda tensor: tensor / 0), "is damaged"),
        (changed("lora_up.weight", lambda tensor: tensor.to(torch.int8)), "is damaged"),
    ],
)
def test_a_lora_that_does_not_fit_is_refused_by_name(
    cache: lora_file.LoraCache,
    lora_paths: list[Path],
    tmp_path: Path,
    change: Callable[[Weights], Weights],
    reason: str,
) -> None:
    path = tmp_path / "x.safetensors"
    save_file(change(load_file(lora_paths[0])), path)
    with pytest.raises(errors.UnusableFileError) as refusal:
        cache.get(named(path))
    assert "'some-style'" in refusal.value.message
    assert reason in refusal.value.message
    assert str(tmp_path) not in refusal.value.message, "the worker's folders concern nobody"


def test_a_lora_that_does_not_exist_is_refused_by_name(
    cache: lora_file.LoraCache, tmp_path: Path
) -> None:
    for path in (tmp_path / "gone.safetensors", tmp_path):
        with pytest.raises(errors.MissingFileError, match="'some-style' does not exist"):
            cache.get(named(path))


def test_a_pickle_is_refused_unread(cache: lora_file.LoraCache, tmp_path: Path) -> None:
    path = tmp_path / "evil.safetensors"
    torch.save({"lora_unet_conv_in.alpha": torch.tensor(1.0)}, path)
    with pytest.raises(
        errors.UnusableFileError, match=r"'some-style' is no complete \.safetensors"
    ):
        cache.get(named(path))


@pytest.mark.parametrize("size", [0, 4, 100, -100])
def test_a_truncated_file_is_refused(
    cache: lora_file.LoraCache, lora_paths: list[Path], tmp_path: Path, size: int
) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes(lora_paths[0].read_bytes()[:size])
    with pytest.raises(
        errors.UnusableFileError, match=r"'some-style' is no complete \.safetensors"
    ):
        cache.get(named(path))


def test_a_file_that_is_too_large_is_refused_unread(
    cache: lora_file.LoraCache, tmp_path: Path
) -> None:
    path = tmp_path / "huge.safetensors"
    path.touch()
    os.truncate(path, 2 * 1024**3)
    with pytest.raises(errors.UnusableFileError, match="2,147,483,648 bytes"):
        cache.get(named(path))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('{"unet.use_dora": true}', "use_dora"),
        ('{"text_encoder.alpha_pattern": {"fc1": 3}}', "alpha_pattern"),
        ('{"unet.lora_alpha": "much"}', "damaged metadata"),
        ("[1]", "damaged metadata"),
        ("{", "damaged metadata"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(
    cache: lora_file.LoraCache, lora_paths: list[Path], tmp_path: Path, config: str, reason: str
) -> None:
    path = tmp_path / "x.safetensors"
    save_file(load_file(lora_paths[0]), path, {"lora_adapter_metadata": config})
    with pytest.raises(errors.UnusableFileError, match=reason):
        cache.get(named(path))


def test_the_scale_is_alpha_over_rank_wherever_alpha_stands(
    cache: lora_file.LoraCache, lora_paths: list[Path], tmp_path: Path
) -> None:
    weights = load_file(lora_paths[0])
    path = tmp_path / "x.safetensors"
    scales = []
    for kept, config in (
        (weights, {}),
        (without(".alpha")(weights), {"unet.lora_alpha": 8}),
        (without(".alpha")(weights), {"lora_alpha": 1}),
        (without(".alpha")(weights), {}),
    ):
        save_file(kept, path, {"lora_adapter_metadata": json.dumps(config)})
        os.utime(path, ns=(0, len(scales)))
        (scale,) = {delta.scale for delta in cache.get(named(path)).deltas["unet"].values()}
        scales.append(scale)
    assert scales == [0.5, 2.0, 0.25, 1.0]


def test_threads_that_want_the_same_file_read_it_once(
    cache: lora_file.LoraCache, lora_paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    read = lora_file.read_lora

    def slow_read(*arguments: Any) -> lora_file.LoraFile:
        reads.append(arguments)
        time.sleep(0.05)
        return read(*arguments)

    monkeypatch.setattr(lora_file, "read_lora", slow_read)
    got: list[lora_file.LoraFile] = []
    threads = [
        threading.Thread(target=lambda: got.append(cache.get(named(lora_paths[0]))))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reads) == 1
    assert len(got) == 6
    assert len({id(file) for file in got}) == 1


def test_threads_that_want_the_same_bad_file_all_hear_of_it(
    cache: lora_file.LoraCache, tmp_path: Path
) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"bad")
    for _ in range(2):
        with pytest.raises(errors.UnusableFileError):
            cache.get(named(path))


def test_the_cache_keeps_to_its_bytes_and_drops_the_least_recently_used(
    layers: lora_file.Layers, lora_paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = lora_file.LoraCache(layers, 0).get(named(lora_paths[0])).size_bytes
    cache = lora_file.LoraCache(layers, cache_bytes=2 * size)
    files = [cache.get(named(lora_paths[at])) for at in (0, 1, 0, 2)]
    assert cache.get(named(lora_paths[0])) is files[0]
    assert cache.get(named(lora_paths[2])) is files[3]
    assert cache.get(named(lora_paths[1])) is not files[1]


def test_a_file_that_was_replaced_is_read_again(
    cache: lora_file.LoraCache, lora_paths: list[Path], tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(lora_paths[0].read_bytes())
    first = cache.get(named(path))
    path.write_bytes(lora_paths[1].read_bytes())
    os.utime(path, ns=(0, 1))
    second = cache.get(named(path))
    assert first.identity != second.identity
    layer = next(iter(first.deltas["unet"]))
    assert not torch.equal(first.deltas["unet"][layer].up, second.deltas["unet"][layer].up)


def test_prepare_refuses_a_bad_lora_even_at_weight_zero(
    engine: Any, make_request: Any, tmp_path: Path
) -> None:
    gone = contract.Lora("gone", tmp_path / "gone.safetensors", 0.0, 0.0)
    with pytest.raises(errors.MissingFileError, match="'gone'"):
        engine.prepare(make_request(loras=(gone,)))
