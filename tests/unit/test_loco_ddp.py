"""Gradients averaged before every step: all ranks take the step that one trainer with all the data would take."""

from __future__ import annotations

import threading

import pytest
import torch

from pulse.errors import PulseError, WeightsMismatch
from pulse.exchange import MemoryExchange
from pulse.torch.loco.ddp import GradientMean


def model(width=16):
    """Always the same one, whichever threads draw numbers beside this one."""
    made = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 3))
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn(weight.shape, generator=numbers) * 0.3)
    return made


def on_ranks(size, work):
    """work(rank, exchange) in one thread for each rank; what each returns or raises."""
    found = [None] * size

    def run(rank, exchange):
        try:
            found[rank] = work(rank, exchange)
        except PulseError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(MemoryExchange.group(size, timeout=20))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def trained(rank, exchange, wire=torch.float32, steps=3):
    policy = model()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01)
    GradientMean(policy.parameters(), exchange, wire=wire).attach(optimizer)
    batches = torch.Generator().manual_seed(7 + rank)
    for _ in range(steps):
        optimizer.zero_grad()
        policy(torch.randn(4, 8, generator=batches)).square().mean().backward()
        optimizer.step()
    return [weight.detach() for weight in policy.parameters()]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_all_ranks_hold_the_same_bits_after_every_step(size, wire):
    found = on_ranks(size, lambda rank, exchange: trained(rank, exchange, wire))
    for other in found[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[0], other, strict=True))


def test_the_steps_are_those_of_one_trainer_with_all_the_data():
    found = on_ranks(3, trained)[0]
    policy = model()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01)
    batches = [torch.Generator().manual_seed(7 + rank) for rank in range(3)]
    for _ in range(3):
        optimizer.zero_grad()
        policy(torch.cat([torch.randn(4, 8, generator=batch) for batch in batches])).square().mean().backward()
        optimizer.step()
    for mine, theirs in zip(found, policy.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-4, atol=1e-5)


def test_the_mean_is_the_sum_in_rank_order_divided_once():
    values = [torch.tensor([1e8, 0.1, 1.0]), torch.tensor([1.0, 0.2, 1.0]), torch.tensor([-1e8, 0.3, 2.0])]

    def work(rank, exchange):
        weight = torch.nn.Parameter(torch.zeros(3))
        weight.grad = values[rank].clone()
        GradientMean([weight], exchange).average()
        return weight.grad

    expected = ((torch.zeros(3) + values[0] + values[1]) + values[2]) / 3
    for found in on_ranks(3, work):
        assert torch.equal(found, expected)


def test_a_gradient_that_is_missing_counts_as_zero_and_one_that_nobody_has_stays_missing():
    def work(rank, exchange):
        used, unused = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
        if rank == 0:
            used.grad = torch.tensor([2.0, 4.0])
        GradientMean([used, unused], exchange).average()
        return used.grad, unused.grad

    for used, unused in on_ranks(2, work):
        assert torch.equal(used, torch.tensor([1.0, 2.0]))
        assert unused is None


@pytest.mark.parametrize(("wire", "width"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_a_rank_sends_and_receives_what_a_ring_would(wire, width):
    def work(rank, exchange):
        weight = torch.nn.Parameter(torch.zeros(1000))
        weight.grad = torch.full((1000,), float(rank))
        GradientMean([weight], exchange, wire=wire).average()
        return exchange.traffic

    for traffic in on_ranks(4, work):
        words = 3 * (64 + 1)  # the layout's digest, and whether there is a gradient, to each of the others
        assert traffic.sent == traffic.received == 2 * 3 * 250 * width + words


def test_fewer_gradients_than_ranks_are_averaged_too():
    def work(rank, exchange):
        weight = torch.nn.Parameter(torch.zeros(2))
        weight.grad = torch.tensor([1.0, float(rank)])
        GradientMean([weight], exchange).average()
        return weight.grad

    for found in on_ranks(4, work):
        assert torch.equal(found, torch.tensor([1.0, 1.5]))


def test_another_shape_on_one_rank_is_refused_on_every_rank_by_name():
    def work(rank, exchange):
        weights = list(model(width=17 if rank == 2 else 16).parameters())
        GradientMean(weights, exchange).average()

    for found in on_ranks(3, work):
        assert isinstance(found, WeightsMismatch)
        assert "rank 2 has other parameters" in str(found)


def test_what_is_not_finite_on_one_rank_is_not_finite_on_any():
    def work(rank, exchange):
        weight = torch.nn.Parameter(torch.zeros(2))
        weight.grad = torch.tensor([float("nan") if rank == 1 else 1.0, 1.0])
        GradientMean([weight], exchange).average()
        return weight.grad

    for found in on_ranks(2, work):
        assert found.isnan().tolist() == [True, False]


def test_after_the_handle_is_removed_gradients_stay_as_they_are():
    def work(rank, exchange):
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        GradientMean([weight], exchange).attach(optimizer).remove()
        weight.grad = torch.tensor([float(rank)])
        optimizer.step()
        return float(weight.detach())

    assert on_ranks(2, work) == [0.0, -1.0]


def test_frozen_parameters_do_not_travel_and_a_wire_must_be_known():
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    exchange = MemoryExchange.group(1)[0]
    with pytest.raises(WeightsMismatch, match="no parameter that trains"):
        GradientMean([frozen], exchange)
    with pytest.raises(ValueError, match="float16"):
        GradientMean([torch.nn.Parameter(torch.zeros(2))], exchange, wire=torch.float16)
