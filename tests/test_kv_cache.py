"""Layers with room ahead say what transformers' own layers say."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from builders import tiny_config
from ppo_lora.kv_cache import RoomyLayer, give_room


def states(tokens: int, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 2, tokens, 4), torch.randn(rows, 2, tokens, 4)


def test_steps_and_leaving_rows_are_those_of_the_plain_layer():
    torch.manual_seed(0)
    roomy, plain = RoomyLayer(), DynamicLayer()
    rows = 5
    for step in range(100):
        keys, values = states(7 if step == 0 else 1, rows)
        for ours, theirs in zip(roomy.update(keys, values), plain.update(keys, values), strict=True):
            assert torch.equal(ours, theirs)
        assert roomy.get_seq_length() == plain.get_seq_length() == 7 + step
        if step in (3, 40, 41):
            kept = torch.tensor([0, 2, 1][: rows - 1])
            rows = len(kept)
            roomy.batch_select_indices(kept)
            plain.batch_select_indices(kept)


def test_a_step_leaves_what_was_there_where_it_was():
    layer = RoomyLayer()
    first, _ = layer.update(*states(6))
    places = {layer.update(*states(1))[0].data_ptr() for _ in range(20)}
    assert places == {first.data_ptr()}


def test_only_plain_layers_that_stay_on_the_device_make_room():
    cache = DynamicCache(config=tiny_config("llama"))
    give_room(cache)
    assert [type(layer) for layer in cache.layers] == [RoomyLayer] * 2
    sliding = DynamicCache(config=tiny_config("mistral", sliding_window=4))
    give_room(sliding)
    assert {type(layer) for layer in sliding.layers} == {DynamicSlidingWindowLayer}


@pytest.mark.filterwarnings("ignore:.*CUDA.*:UserWarning")
def test_offloaded_caches_are_left_alone():
    class Offloaded(DynamicCache):
        offloading = True

        def __init__(self):
            super().__init__(config=tiny_config("llama"))
            self.offloading = True

    cache = Offloaded()
    give_room(cache)
    assert {type(layer) for layer in cache.layers} == {DynamicLayer}
