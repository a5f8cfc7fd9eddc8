"""What a child process makes of the GPUs that it was given; what needs one is in
tests/gpu/test_timing.py."""

import pytest
import torch

from lightrl.devices.cuda import Stopwatch, has_cuda, now
from lightrl.errors import ConfigError

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")


@without_gpu
def test_a_gpu_that_was_promised_and_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(
        ConfigError, match=r"^CUDA_VISIBLE_DEVICES = 0, but torch .* finds no GPU: "
    ):
        has_cuda()


@without_gpu
@pytest.mark.parametrize(
    ("built_for", "given"), [(None, "0"), ("13.0", ""), ("13.0", None), ("13.0", "-1")]
)
def test_else_the_cpu_is_meant(monkeypatch, built_for, given):
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert not has_cuda()


def test_stretches_on_the_cpu_add_up():
    cpu = torch.device("cpu")
    watch, begun = Stopwatch(cpu), now(cpu)
    for _ in range(2):
        with watch.running():
            torch.ones(100, 100) @ torch.ones(100, 100)
    assert 0 < watch.lap() < now(cpu) - begun
    assert watch.lap() == 0
