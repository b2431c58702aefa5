"""The stand-in raises where CUDA raises, allows what CUDA allows, and computes what the CPU computes."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.standin.cuda import present
from tests.standin.syncs import count_host_work, count_reads, recorded

TWO_DEVICES = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu"

# Of a tensor on the device (3 x 4), one on the CPU (3 x 4), an index on each.
MIXED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda d, h: d + h,
    "add to the host's": lambda d, h: h + d,
    "in place": lambda d, h: d.add_(h),
    "in place on the host's": lambda d, h: h.add_(d),
    "in place on a host scalar": lambda d, h: h[0, 0].mul_(d[0, 0]),
    "out": lambda d, h: torch.add(d, d, out=h),
    "compare": lambda d, h: d == h,
    "where": lambda d, h: torch.where(d > 0, d, h),
    "where's condition": lambda d, h: torch.where(h > 0, d, d),
    "matmul": lambda d, h: d @ h.T,
    "linear": lambda d, h: F.linear(d, h),
    "cat": lambda d, h: torch.cat([d, h]),
    "stack": lambda d, h: torch.stack([d, h]),
    "stack of scalars": lambda d, h: torch.stack([d[0, 0], h[0, 0]]),
    "einsum": lambda d, h: torch.einsum("ij,ij->i", d, h),
    "lerp": lambda d, h: torch.lerp(d, d, h),
    "masked_fill": lambda d, h: d.masked_fill(h > 0, 0.0),
    "masked_select": lambda d, h: d.masked_select(h > 0),
    "index_select": lambda d, h: d.index_select(0, torch.tensor([0])),
    "index_select's source": lambda d, h: h.index_select(0, torch.tensor([0]).to(d.device)),
    "index_add": lambda d, h: d.index_add(0, torch.tensor([0]), d[:1]),
    "gather": lambda d, h: d.gather(0, torch.zeros(1, 4, dtype=torch.int64)),
    "scatter": lambda d, h: d.scatter(0, torch.zeros(1, 4, dtype=torch.int64), 1.0),
    "scatter_add's source": lambda d, h: d.scatter_add(0, torch.zeros(3, 4, dtype=torch.int64).to(d.device), h),
    "embedding": lambda d, h: F.embedding(torch.tensor([0]), d),
    "put by index": lambda d, h: d.__setitem__(torch.tensor([0]), h[:1]),
    "labels": lambda d, h: F.cross_entropy(d, torch.tensor([0, 1, 2])),
    "class weights": lambda d, h: F.cross_entropy(d, torch.tensor([0, 1, 2]).to(d.device), weight=torch.ones(4)),
    "mse": lambda d, h: F.mse_loss(d, h),
    "kl": lambda d, h: F.kl_div(d, h, reduction="batchmean"),
    "batch norm": lambda d, h: F.batch_norm(d, torch.zeros(4), torch.ones(4)),
    "a module": lambda d, h: nn.Linear(4, 2)(d),
    "a module's input": lambda d, h: nn.Linear(4, 2).to(d.device)(h),
    "equal": lambda d, h: torch.equal(d, h),
    "allclose": lambda d, h: torch.allclose(d, h),
    "cosine": lambda d, h: F.cosine_similarity(d, h),
    "foreach": lambda d, h: torch._foreach_add([d], [h]),
    "norm of both": lambda d, h: torch.cat([d.flatten(), h.flatten()]).norm(),
}


@pytest.mark.parametrize("name", MIXED)
def test_a_mix_of_host_and_device_is_refused(name, cuda):
    host = torch.rand(3, 4)
    with pytest.raises(RuntimeError, match=TWO_DEVICES):
        MIXED[name](torch.rand(3, 4).to(cuda), host)


ALLOWED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a host scalar": lambda d, h: d * torch.tensor(2.0),
    "a host scalar first": lambda d, h: torch.tensor(2.0) - d,
    "where with a host scalar": lambda d, h: torch.where(d > 0.5, d, torch.tensor(0.0)),
    "in place with a host scalar": lambda d, h: d.clone().add_(torch.tensor(2.0)),
    "fill with a host scalar": lambda d, h: d.clone().fill_(torch.tensor(2.0)),
    "a host index": lambda d, h: d[torch.tensor([2, 0])],
    "a host mask": lambda d, h: d[torch.tensor([True, False, True])],
    "put a host scalar": lambda d, h: _put(d, torch.tensor([0]), torch.tensor(3.0)),
    "copy from the host": lambda d, h: d.clone().copy_(h),
    "slices, views and in-place on them": lambda d, h: _add_to_view(d),
    "dtype": lambda d, h: d.double().to(torch.float16).float(),
    "like": lambda d, h: torch.zeros_like(d) + d.new_ones(3, 4) + torch.full_like(d, 2),
    "one hot": lambda d, h: F.one_hot((d * 3).long(), 4),
    "sort": lambda d, h: d.sort(dim=1).values,
    "softmax": lambda d, h: d.log_softmax(dim=1),
    "std": lambda d, h: d.std(dim=0),
}


def _put(tensor: Tensor, index: Tensor, value: Tensor) -> Tensor:
    changed = tensor.clone()
    changed[index] = value
    return changed


def _add_to_view(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[2:5].add_(1)
    return changed.T[1:]


@pytest.mark.parametrize("name", ALLOWED)
def test_what_cuda_allows_has_the_cpus_values_and_stays_on_the_device(name, cuda):
    host = torch.rand(3, 4)
    out = ALLOWED[name](host.to(cuda), host)
    assert out.device == cuda
    assert torch.equal(out.cpu(), ALLOWED[name](host, host))


def test_a_device_tensor_says_where_it_is(cuda):
    tensor = torch.rand(3).to("cuda")
    assert tensor.device == torch.device("cuda:0")
    assert tensor.is_cuda
    assert not tensor.is_cpu
    assert tensor.get_device() == 0
    assert tensor.type() == "torch.cuda.FloatTensor"
    assert "cuda:0" in repr(tensor)
    assert tensor.to(cuda) is tensor
    assert tensor.cuda() is tensor
    back = tensor.cpu()
    assert type(back) is Tensor
    assert back.device.type == "cpu"
    back += 1
    assert not torch.equal(back, tensor.cpu()), "a copy"
    assert torch.rand(2).to(tensor).device == cuda
    assert torch.rand(2).type_as(tensor).device == cuda


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.zeros(3, device=device),
        lambda device: torch.empty(3, dtype=torch.int64, device=device),
        lambda device: torch.arange(3, device=device),
        lambda device: torch.tensor([1.0, 2.0], device=device),
        lambda device: torch.as_tensor(np.ones(2), device=device),
        lambda device: torch.eye(2, device=device),
        lambda device: torch.full((2,), 3.0, device=device),
        lambda device: torch.randperm(4, device=device),
        lambda device: torch.zeros_like(torch.ones(2), device=device),
        lambda device: torch.ones(2).new_zeros(3, device=device),
        lambda device: nn.Linear(2, 2, device=device).weight,
    ],
)
def test_factories_make_device_tensors(make, cuda):
    assert make(cuda).device == make("cuda").device == cuda
    assert make("cpu").device.type == make(None).device.type == "cpu"


def test_a_default_device_is_obeyed(cuda):
    with torch.device("cuda"):
        assert torch.zeros(2).device == cuda
        assert nn.Linear(2, 2).bias.device == cuda
    assert torch.zeros(2).device.type == "cpu"


@pytest.mark.parametrize("take", [lambda t: t.numpy(), np.asarray])
def test_numpy_of_a_device_tensor_is_refused(take, cuda):
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        take(torch.rand(3).to(cuda))
    assert isinstance(take(torch.rand(3).to(cuda).cpu()), np.ndarray)


def test_a_device_index_on_a_host_tensor_is_refused(cuda):
    host = torch.rand(3, 4)
    with pytest.raises(RuntimeError, match="indices should be either on cpu or on the same device"):
        host[torch.tensor([0]).to(cuda)]
    with pytest.raises(RuntimeError, match="indices should be either on cpu or on the same device"):
        host[torch.tensor([0]).to(cuda)] = torch.zeros(4)


def test_memory_is_pinned_on_the_host_alone(cuda):
    pinned = torch.rand(4).pin_memory()
    assert pinned.is_pinned()
    assert pinned[1:].is_pinned()
    assert not torch.rand(4).is_pinned()
    with pytest.raises(RuntimeError, match=r"cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors"):
        pinned.to(cuda).pin_memory()
    with recorded() as syncs:
        pinned.to(cuda, non_blocking=True)
        assert syncs == []
        torch.rand(4).to(cuda, non_blocking=True)
        pinned.to(cuda)
    assert [sync.kind for sync in syncs] == ["upload", "upload"]


def test_another_ordinal_is_refused(cuda):
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.rand(3).to("cuda:1")


# Random numbers


def test_a_generator_of_the_other_device_is_refused(cuda):
    host, device = torch.Generator(), torch.Generator("cuda")
    assert isinstance(host, torch.Generator)
    assert isinstance(device, torch.Generator)
    on_device = torch.zeros(3).to(cuda)
    for draw in (
        lambda: torch.randn(3, generator=host, device=cuda),
        lambda: torch.normal(0.0, 1.0, (3,), generator=host, device=cuda),
        lambda: on_device.normal_(generator=host),
        lambda: torch.bernoulli(on_device, generator=host),
        lambda: torch.randperm(3, generator=host, device=cuda),
    ):
        with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
            draw()
    for draw in (
        lambda: torch.randn(3, generator=device),
        lambda: torch.zeros(3).uniform_(generator=device),
        lambda: torch.randperm(3, generator=device),
    ):
        with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'cuda'"):
            draw()


def test_the_state_of_a_device_generator_is_a_seed_and_an_offset(cuda):
    generator = torch.Generator("cuda").manual_seed(5)
    torch.randn(3, generator=generator, device=cuda)
    state = generator.get_state()
    drawn = torch.randn(3, generator=generator, device=cuda)
    assert state.numel() == 16
    assert torch.equal(torch.randn(3, generator=generator.set_state(state), device=cuda), drawn)
    with pytest.raises(RuntimeError, match="wrong size"):
        generator.set_state(torch.Generator().get_state())
    with pytest.raises(RuntimeError, match="multiple of 4"):
        generator.set_state(torch.tensor([0] * 8 + [1] + [0] * 7, dtype=torch.uint8))


def test_the_device_has_a_default_generator_of_its_own(cuda):
    dropout, ones = nn.Dropout(0.5), torch.ones(100).to(cuda)
    host = torch.get_rng_state()
    torch.cuda.manual_seed_all(3)
    first, state = dropout(ones), torch.cuda.get_rng_state()
    second = torch.rand(4, device=cuda)
    assert torch.equal(torch.get_rng_state(), host), "the CPU's generator drew nothing"
    torch.cuda.manual_seed_all(3)
    assert torch.equal(dropout(ones), first)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4, device=cuda), second)


# Modules, autograd, optimizers


def build_network() -> nn.Module:
    torch.manual_seed(0)
    stage = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(stage, nn.GroupNorm(2, 12), nn.Linear(12, 4))


def train(network: nn.Module, optimizer: torch.optim.Optimizer, device: Any) -> nn.Module:
    torch.manual_seed(1)
    for _ in range(3):
        x, y = torch.randn(5, 1, 6, 6), torch.arange(5) % 4
        optimizer.zero_grad()
        F.cross_entropy(network(x.to(device)), y.to(device)).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
    return network


@pytest.mark.parametrize(
    "options",
    [
        {"cls": torch.optim.SGD, "momentum": 0.9, "weight_decay": 0.01},
        {"cls": torch.optim.SGD, "fused": True},
        {"cls": torch.optim.Adam},
        {"cls": torch.optim.Adam, "fused": True},
        {"cls": torch.optim.AdamW, "foreach": False},
    ],
    ids=str,
)
def test_training_has_the_cpus_values_and_never_waits(options, cuda):
    options = dict(options)
    build = options.pop("cls")
    on_host, on_device = build_network(), build_network().to(cuda)
    train(on_host, build(on_host.parameters(), lr=0.1, **options), "cpu")
    with recorded() as syncs:
        train(on_device, build(on_device.parameters(), lr=0.1, **options), cuda)
    assert not count_reads(syncs)
    for name, value in on_device.state_dict().items():
        assert value.device == cuda
        torch.testing.assert_close(value.cpu(), on_host.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_a_module_keeps_its_parameters_when_it_moves(cuda):
    network = build_network()
    before, optimizer = list(network.parameters()), torch.optim.SGD(network.parameters(), lr=0.1)
    assert all(old is new for old, new in zip(before, network.to(cuda).parameters(), strict=True))
    assert all(isinstance(parameter, nn.Parameter) and parameter.is_cuda for parameter in before)
    train(network, optimizer, cuda)
    network.cpu()
    assert all(type(parameter) is nn.Parameter for parameter in before)


def test_a_state_loads_across_devices(cuda):
    network, other = build_network().to(cuda), build_network()
    with torch.no_grad():
        other[2].bias.add_(1)
    network.load_state_dict(other.state_dict())
    assert network[2].bias.device == cuda
    assert torch.equal(network[2].bias.cpu(), other[2].bias)
    other.load_state_dict(network.state_dict())
    assert type(other[2].bias) is nn.Parameter


def test_copies_are_copies(cuda):
    network = build_network().to(cuda)
    for copied in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert isinstance(copied[2].weight, nn.Parameter)
        assert copied[2].weight.device == cuda
        with torch.no_grad():
            copied[2].weight.add_(1)
        assert not torch.equal(copied[2].weight, network[2].weight)


def test_gradients_cross_between_host_and_device(cuda):
    on_host = torch.tensor([1.0, 2.0], requires_grad=True)
    (on_host.to(cuda) ** 2).sum().cpu().backward()
    assert type(on_host.grad) is Tensor
    assert torch.equal(on_host.grad, torch.tensor([2.0, 4.0]))
    on_device = torch.tensor([1.0, 2.0], device=cuda, requires_grad=True)
    (on_device.cpu() ** 2).sum().backward()
    assert on_device.grad.is_cuda


def test_second_derivatives_and_hooks_see_the_device(cuda):
    x = torch.tensor([1.0, 2.0], device=cuda, requires_grad=True)
    made: list[Tensor] = []
    x.register_hook(lambda grad: made.extend([grad, torch.zeros(2), torch.zeros(2, device=grad.device)]))
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second.cpu(), torch.tensor([6.0, 12.0]))
    assert [tensor.device.type for tensor in made[:3]] == ["cuda", "cpu", "cuda"]


def test_safetensors_refuse_nothing_and_keep_the_values(cuda):
    tensor = torch.rand(3)
    saved = safetensors.torch.save({"a": tensor.to(cuda)})
    assert torch.equal(safetensors.torch.load(saved)["a"], tensor)


# Waits


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.sum().item(),
        lambda t: float(t[0]),
        lambda t: bool(t[0] > 0),
        lambda t: t.tolist(),
        lambda t: t.cpu(),
        lambda t: t.to("cpu"),
        lambda t: torch.zeros(3).copy_(t),
        lambda t: t.nonzero(),
        lambda t: t[t > 0.5],
        lambda t: torch.equal(t, t),
        lambda t: torch.allclose(t, t),
        lambda t: t.unique(),
        lambda t: torch.bincount(t.long()),
        lambda t: torch.cuda.synchronize(),
    ],
)
def test_every_read_of_the_host_is_counted(read, cuda):
    tensor = torch.rand(3).to(cuda)
    with recorded() as syncs:
        read(tensor)
    assert [sync.kind for sync in syncs] == ["read"]


def test_work_that_stays_on_the_device_is_not_counted(cuda):
    tensor = torch.rand(3, 4).to(cuda)
    with recorded() as syncs:
        tensor[tensor.argmax(dim=0)].clamp(0, 1).where(tensor[0] > 0, tensor.mean()).add_(1)
        tensor[:, 1:3].max(dim=1)
        tensor.copy_(tensor * 2)
    assert syncs == []


def test_a_network_on_the_host_is_counted(cuda):
    with recorded() as syncs:
        nn.Linear(2, 2).to(cuda)(torch.rand(1, 2, device=cuda)).sum().backward()
        assert not count_host_work(syncs)
        nn.Linear(2, 2)(torch.rand(1, 2)).sum().backward()
    assert sorted(sync.op for sync in syncs if sync.kind == "host") == ["backward", "linear"]


# Its presence


def test_threads_see_the_device_too(cuda):
    made: list[Tensor] = []
    thread = threading.Thread(target=lambda: made.append(torch.rand(3).to("cuda")))
    thread.start()
    thread.join()
    assert made[0].device == cuda


def test_it_leaves_nothing_behind():
    def describe() -> list[Any]:
        queries = [getattr(torch.cuda, name) for name in ("is_available", "manual_seed_all", "Stream")]
        return [*queries, torch.Generator, nn.Module._apply, threading.Thread.run, torch.accelerator.current_stream]

    before = describe()
    with present():
        assert describe() != before
    assert describe() == before
    assert type(nn.Linear(2, 2).to("cpu").weight) is nn.Parameter


@pytest.mark.parametrize("query", ["mem_get_info", "memory_allocated", "get_device_name", "set_device", "synchronize"])
def test_queries_of_cuda_refuse_the_cpu(query: str, cuda: torch.device) -> None:
    getattr(torch.cuda, query)(cuda)
    with pytest.raises(ValueError, match="Expected a cuda device, but got: cpu"):
        getattr(torch.cuda, query)(torch.device("cpu"))
