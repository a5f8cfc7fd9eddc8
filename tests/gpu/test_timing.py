"""Times on CUDA are those of the device, and taking them does not hold up the launches."""

import time

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

CYCLES = 400_000_000  # some 0.2 s of a spinning kernel
TWICE = 2


def test_a_stretch_lasts_as_long_as_its_kernels_and_launching_it_does_not():
    from lightrl.devices.cuda import Stopwatch, now

    device = torch.device("cuda", 0)
    torch.cuda._sleep(CYCLES)  # an idle GPU counts slowly
    begun = now(device)
    torch.cuda._sleep(CYCLES)
    alone_s = now(device) - begun
    watch = Stopwatch(device)
    begun = time.perf_counter()
    for _ in range(TWICE):
        with watch.running():
            torch.cuda._sleep(CYCLES)
    launched_s = time.perf_counter() - begun
    assert launched_s < alone_s / 2
    assert watch.lap() == pytest.approx(TWICE * alone_s, rel=0.2)
    assert watch.lap() == 0.0


def test_what_is_launched_between_stretches_does_not_count():
    from lightrl.devices.cuda import Stopwatch, now

    device = torch.device("cuda", 0)
    watch = Stopwatch(device)
    with watch.running():
        torch.cuda._sleep(1000)
    torch.cuda._sleep(CYCLES)
    begun = now(device)
    assert watch.lap() < 0.05
    assert time.perf_counter() - begun < 0.05
