"""The counts of a step have the same bits as plain numbers and on the device."""

from __future__ import annotations

import torch

from paceline.training.tally import DeviceSums, DeviceTally, HostSums, HostTally


def test_plain_numbers_and_tensors_agree_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(3)
    for parts in (1, 2, 7):
        host, device = HostTally(), DeviceTally("cpu")
        for _ in range(parts):
            loss = torch.rand((), generator=generator).requires_grad_() * 3
            correct, samples = torch.randint(0, 50, (), generator=generator), 50
            for tally in (host, device):
                tally.add(loss, correct, samples)
        assert torch.equal(torch.tensor(host.sums(), dtype=torch.float64), device.sums())
        assert host.sums()[2] == 50 * parts
        for wants_stop in (False, True):
            shown = host.piggybacked_scalars(wants_stop)
            assert shown.dtype == torch.float32
            assert torch.equal(shown, device.piggybacked_scalars(wants_stop))
            assert shown[0] == wants_stop


def test_one_microbatch_gives_the_exact_loss() -> None:
    # Multiplied by the samples and divided again in float64: no bit of a float32 changes.
    for number in range(1000):
        loss = torch.rand((), generator=torch.Generator().manual_seed(number))
        tally = HostTally()
        tally.add(loss, torch.tensor(1), 48)
        assert tally.piggybacked_scalars(False)[1] == loss


def test_the_sums_of_an_interval_agree_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(4)
    host, device = HostSums(2), DeviceSums(2, "cpu")
    for _ in range(2):  # taking starts anew
        for _ in range(7):
            rows = torch.rand(2, 3, generator=generator, dtype=torch.float64)
            host.add(rows.tolist())
            device.add(rows)
        taken = host.take(0.25)
        assert torch.equal(taken, device.take(0.25))
        assert taken[:, 3].tolist() == [0.25, 0.0]
