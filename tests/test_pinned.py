"""Tensors that leave the device and come back as the same objects with the same bits."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from omnirl_hpc.pinned import PinnedTensors


def pinned(*tensors: Tensor, frozen: bool = False) -> PinnedTensors:
    result = PinnedTensors()
    result.add(tensors, frozen=frozen)
    return result


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().clone().flatten().view(torch.uint8).numpy().tobytes()


ODD = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45, 3.5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("frozen", [True, False])
def test_comes_back_bit_for_bit_as_the_same_object(dtype, frozen):
    parameter = ODD.nan_to_num(7.0).to(dtype) if dtype in (torch.int64, torch.bool) else ODD.to(dtype)
    storage, before = parameter.untyped_storage(), bits(parameter)
    moved = pinned(parameter, frozen=frozen)
    for _ in range(2):
        moved.offload()
        assert moved.offloaded and storage.nbytes() == 0
        moved.onload()
        assert not moved.offloaded and bits(parameter) == before
        assert parameter.untyped_storage()._cdata == storage._cdata


def test_views_and_tied_weights_move_once_and_stay_tied():
    embedding, head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
    head.weight = embedding.weight
    row = embedding.weight.detach()[2]
    expected = row.clone()
    moved = pinned(embedding.weight, head.weight, row)
    moved.offload()
    assert moved.host_bytes() == 4 * 3 * 4
    moved.onload()
    assert torch.equal(row, expected)
    row.fill_(5)
    assert (head.weight[2] == 5).all() and (embedding.weight[2] == 5).all()


@pytest.mark.parametrize("offloaded", [True, False])
@pytest.mark.parametrize("saved", [True, False])
def test_frozen_parameters_may_be_rewritten(offloaded, saved):
    """Offloaded or not, with a copy on the host or without: the new values stay."""
    layer, other = nn.Linear(3, 2), nn.Parameter(torch.zeros(2))
    storage = layer.weight.untyped_storage()
    moved = pinned(layer.weight, layer.bias, frozen=True)
    if saved:
        moved.save()
    if offloaded:
        moved.offload()
    with torch.no_grad(), moved.rewriting([layer.weight, layer.bias, other]):
        layer.weight.fill_(4.0)
        other.fill_(5.0)
        assert (storage.nbytes() == 0) == offloaded
    if not offloaded:
        moved.offload()
    moved.onload()
    assert layer.weight.untyped_storage()._cdata == storage._cdata
    assert (layer.weight == 4).all() and (other == 5).all()


def test_an_error_while_rewriting_leaves_the_parameter_where_it_was():
    layer = nn.Linear(3, 2)
    storage = layer.weight.untyped_storage()
    moved = pinned(layer.weight, frozen=True)
    moved.offload()
    with pytest.raises(ZeroDivisionError), moved.rewriting([layer.weight]):
        raise ZeroDivisionError
    assert layer.weight.untyped_storage()._cdata == storage._cdata and storage.nbytes() == 0


def test_an_optimizer_goes_on_with_what_has_been_away():
    def train(away: bool) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        for step in range(4):
            layer(torch.full((5, 3), 1.0 + step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if away:
                state = [t for s in optimizer.state.values() for t in s.values()]
                moved = pinned(*layer.parameters(), *state)
                moved.offload()
                moved.onload()
        return layer.weight.detach(), optimizer.state[layer.weight]["exp_avg_sq"]

    for away, stayed in zip(train(away=True), train(away=False)):
        assert torch.equal(away, stayed)


def test_tensors_of_a_mapped_file_get_memory_of_their_own(tmp_path):
    save_file({"a": torch.arange(6.0), "b": torch.arange(6.0, 10.0)}, tmp_path / "weights.safetensors")
    loaded = load_file(tmp_path / "weights.safetensors")
    mapped = torch.UntypedStorage.from_file(str(tmp_path / "weights.safetensors"), shared=False, nbytes=16)
    slices = [torch.empty(0, dtype=torch.uint8).set_(mapped, offset, (8,), (1,)) for offset in (0, 8)]
    assert not mapped.resizable()  # what the rest of this test is about
    before = [bits(t) for t in (*loaded.values(), *slices)]
    moved = pinned(*loaded.values(), *slices, frozen=True)
    moved.offload()
    assert all(t.untyped_storage().nbytes() == 0 for t in slices)
    moved.onload()
    assert [bits(t) for t in (*loaded.values(), *slices)] == before
    assert slices[0].untyped_storage()._cdata == slices[1].untyped_storage()._cdata  # still one


def test_what_is_frozen_is_copied_to_the_host_once_and_the_rest_each_time():
    frozen, changing = torch.zeros(3), torch.zeros(3)
    moved = PinnedTensors()
    moved.add([frozen], frozen=True)
    moved.add([changing], frozen=False)
    moved.offload()
    moved.onload()
    for tensor in (frozen, changing):
        tensor.fill_(1)  # nobody may do that to a frozen one: it shows here that it is not copied again
    moved.offload()
    moved.onload()
    assert frozen.tolist() == [0] * 3 and changing.tolist() == [1] * 3


def test_the_first_to_add_a_tensor_says_whether_it_is_frozen():
    adapter = torch.zeros(3)
    moved = PinnedTensors()
    moved.add([adapter], frozen=False)
    moved.add([adapter, torch.zeros(2)], frozen=True)  # all parameters of the module, the adapter among them
    moved.keep()
    assert moved.host_bytes() == 12
    adapter.fill_(1)
    moved.offload()
    moved.onload()
    assert adapter.tolist() == [1] * 3


def test_restore_undoes_what_came_after_keep():
    frozen, changing = torch.ones(2), torch.ones(3)
    moved = PinnedTensors()
    moved.add([frozen], frozen=True)
    moved.add([changing], frozen=False)
    moved.keep()
    for _ in range(2):
        changing.mul_(3)
        moved.restore()
        assert changing.tolist() == [1] * 3
    assert moved.host_bytes() == 12  # nothing of what is frozen
    assert frozen.tolist() == [1] * 2


def test_keeping_what_is_offloaded_keeps_its_values():
    changing = torch.ones(3)
    moved = pinned(changing)
    moved.keep()
    changing.fill_(2)
    moved.offload()
    moved.keep()
    assert changing.untyped_storage().nbytes() == 0
    moved.onload()
    changing.fill_(3)
    moved.restore()
    assert changing.tolist() == [2] * 3
