"""Who gets which GPU and how much of it: a table of machines, restrictions and wishes."""

from dataclasses import replace

import pytest

from lightrl.devices.assign import DeviceRequest, Part, TooLittleMemory, assign, environment
from lightrl.devices.driver import NO_DRIVER, Gpu, Machine, Slice
from lightrl.devices.memory import GIB, Item
from lightrl.devices.visible import visible
from lightrl.errors import ConfigError

NEED = 30 * GIB


def gpu(index: int, total: int = 80, free: int = 79, name: str = "NVIDIA H100 80GB HBM3") -> Gpu:
    return Gpu(index, f"GPU-{index}abc-0000", name, total * GIB, free * GIB)


def machine(*gpus: Gpu) -> Machine:
    return Machine(gpus, "580.95.05")


def gpus(count: int) -> Machine:
    return machine(*map(gpu, range(count)))


SLICED = machine(
    replace(
        gpu(0),
        is_mig=True,
        slices=(Slice("MIG-aaa", "3g.40gb", 40 * GIB), Slice("MIG-bbb", "3g.40gb", 40 * GIB)),
    ),
    gpu(1),
)
SIZES = {"engines": 2, "parallel": (1, 2), "asleep": 1}  # that take turns
RUN = DeviceRequest(
    ranks=1, engines=1, rank_items=(Item("all", NEED),), rank_bytes=NEED, least=5 * GIB
)


@pytest.mark.parametrize(
    ("found", "setting", "wanted", "ranks", "engines"),
    [
        pytest.param(NO_DRIVER, None, {}, (), (), id="no driver: nothing changes"),
        pytest.param(gpus(2), "", {}, (), (), id="an empty setting works on the CPU"),
        pytest.param(gpus(2), "-1", {}, (), (), id="so does -1"),
        pytest.param(
            gpus(2), "NoDevFiles", {}, (), (), id="and what Slurm says to a job without GPUs"
        ),
        pytest.param(gpus(2), None, {}, ("0",), (("1", 0.0),), id="engine behind the rank"),
        pytest.param(
            gpus(8),
            None,
            {"ranks": 2, "engines": 3, "per_engine": 2},
            ("0", "1"),
            (("2,3", 0.0), ("4,5", 0.0), ("6,7", 0.0)),
            id="ranks first, then engines in pairs",
        ),
        pytest.param(
            gpus(1), None, {}, ("0",), (("0", 0.53),), id="one GPU: (0.92 - 30/80) - 0.01"
        ),
        pytest.param(
            gpus(1),
            None,
            {"engines": 2},
            ("0",),
            (("0", 0.26), ("0", 0.26)),
            id="the rest is divided",
        ),
        pytest.param(
            gpus(2),
            None,
            {"engines": 3},
            ("0",),
            (("1", 0.29), ("1", 0.29), ("1", 0.29)),
            id="more engines than GPUs: beside each other, not beside the rank",
        ),
        pytest.param(
            gpus(2),
            None,
            {"per_engine": 2},
            ("0",),
            (("0,1", 0.53),),
            id="of both its GPUs an engine takes what there is on the one that it shares",
        ),
        pytest.param(gpus(4), "2,3", {}, ("2",), (("3", 0.0),), id="a restriction holds"),
        pytest.param(gpus(4), " 3 , 1 ", {}, ("3",), (("1", 0.0),), id="and its order"),
        pytest.param(
            gpus(4), "2,3", {"train_devices": (1,)}, ("3",), (("2", 0.0),), id="indices count in it"
        ),
        pytest.param(gpus(4), "GPU-3,GPU-1", {}, ("3",), (("1", 0.0),), id="UUIDs become numbers"),
        pytest.param(
            gpus(4),
            None,
            {"train_devices": (3,), "rollout_devices": (1,), "engines": 2},
            ("3",),
            (("1", 0.45), ("1", 0.45)),
            id="named",
        ),
        pytest.param(
            SLICED, "MIG-bbb", {}, ("MIG-bbb",), (("MIG-bbb", 0.16),), id="one slice for both"
        ),
        pytest.param(SLICED, None, {}, ("MIG-aaa",), (("MIG-bbb", 0.0),), id="slices are devices"),
        pytest.param(
            machine(gpu(0, free=50)), None, {"ranks": 0}, (), (("0", 0.61),), id="others use some"
        ),
        pytest.param(
            machine(gpu(0, total=16, free=12)),
            None,
            {"ranks": 0},
            (),
            (("0", 0.71),),
            id="small: 0.6 GiB apart",
        ),
        pytest.param(
            machine(gpu(0, total=16, free=15)),
            None,
            {"ranks": 0},
            (),
            (("0", 0.9),),
            id="alone, but not 0.92",
        ),
        pytest.param(
            gpus(1), None, {"utilization": 0.4}, ("0",), (("0", 0.4),), id="as the config says"
        ),
        pytest.param(
            gpus(1), None, {"utilization": 0.8, "ranks": 0}, (), (("0", 0.0),), id="alone, as well"
        ),
        pytest.param(
            gpus(1),
            None,
            {"rank_items": (), "rank_bytes": 0, "least": 0},
            ("0",),
            (("0", 0.45),),
            id="unknown model",
        ),
        pytest.param(
            gpus(4),
            None,
            {"engines": 0, "ranks": 4},
            ("0", "1", "2", "3"),
            (),
            id="a trainer alone",
        ),
        pytest.param(gpus(4), None, {"ranks": 0}, (), (("0", 0.0),), id="a rollout node alone"),
        pytest.param(
            gpus(4),
            None,
            {"is_shared": True, "ranks": 2, "engines": 2},
            ("0", "1"),
            (("0", 0.9), ("1", 0.9)),
            id="in turn with the ranks: all but what one keeps that is parked",
        ),
        pytest.param(
            gpus(4),
            None,
            {"is_shared": True, "ranks": 4, "trainers": 2, "engines": 3, "per_engine": 2},
            ("0", "1", "2", "3"),
            (("0,1", 0.44), ("2,3", 0.9), ("0,1", 0.44)),
            id="in turn with the ranks of one trainer node",
        ),
        pytest.param(
            gpus(4),
            None,
            {"is_shared": True, "ranks": 2, "rollout_devices": (1,)},
            ("0", "1"),
            (("1", 0.9),),
            id="in turn with one of two ranks",
        ),
        pytest.param(
            machine(gpu(0, free=2)),
            None,
            {"is_shared": True, "ranks": 0},
            (),
            (("0", 0.0),),
            id="joined: the ranks have it now",
        ),
    ],
)
def test_who_gets_what(found, setting, wanted, ranks, engines):
    environ = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    got = assign(found, environ, replace(RUN, **wanted))
    assert got.ranks == ranks
    assert got.engines == tuple(Part(tuple(tokens.split(",")), share) for tokens, share in engines)


@pytest.mark.parametrize(
    ("found", "setting", "wanted", "line"),
    [
        (
            NO_DRIVER,
            None,
            {"train_devices": (0,)},
            "train.devices: names GPUs, but there is none here",
        ),
        (gpus(2), "", {"rollout_devices": (0,)}, "CUDA_VISIBLE_DEVICES = '' leaves none"),
        (gpus(2), "0,2", {}, "CUDA_VISIBLE_DEVICES = 0,2: there is no GPU 2 here, only 0, 1"),
        (gpus(2), "1,1", {}, "names GPU 1 (NVIDIA H100 80GB HBM3) 2 times"),
        (gpus(2), "1,GPU-1abc", {}, "names GPU 1 (NVIDIA H100 80GB HBM3) 2 times"),
        (gpus(2), "0,", {}, "'' is no GPU or MIG slice of this machine; nvidia-smi -L lists them"),
        (gpus(2), "0,-1,1", {}, "'-1' is no GPU or MIG slice"),
        (gpus(2), "GPU-7", {}, "'GPU-7' is no GPU of this machine"),
        (gpus(12), "GPU-1", {}, "'GPU-1' is no GPU of this machine"),  # of two
        (
            SLICED,
            "0",
            {},
            "GPU 0 is divided into 2 MIG slices; name them by the UUIDs of nvidia-smi -L",
        ),
        (SLICED, "MIG-ccc", {}, "'MIG-ccc' is no MIG slice"),
        (SLICED, None, {"ranks": 2}, "NCCL does not connect MIG slices"),
        (
            SLICED,
            "MIG-aaa,MIG-bbb",
            {"ranks": 0, "per_engine": 2},
            "an engine cannot span MIG slices",
        ),
        (
            gpus(2),
            None,
            {"train_devices": (2,)},
            "train.devices: there is no GPU 2 to use here, only 0, 1",
        ),
        (
            gpus(4),
            "1",
            {"rollout_devices": (1,)},
            "rollout.devices: there is no GPU 1 to use here, only 0",
        ),
        (
            gpus(1),
            None,
            {"ranks": 2},
            "train.ranks = 2: each needs a GPU of its own, and 1 can be used",
        ),
        (gpus(1), None, {"per_engine": 2}, "an engine takes 2 GPUs (tensor_parallel_size"),
        (
            machine(gpu(0, free=20)),
            None,
            {},
            "has 20.0 GiB free of 80.0 GiB, and a training rank needs 30.0",
        ),
        (
            machine(gpu(0, free=1)),
            None,
            {"ranks": 0},
            "an engine needs 5.0 GiB and would get 0.0 GiB",
        ),
        (machine(gpu(0, free=33)), None, {}, "an engine needs 5.0 GiB and would get 1.6 GiB"),
        (
            gpus(2),
            None,
            {"is_shared": True, "rollout_devices": (1,)},
            "rollout.devices: no rank trains on GPU 1, and rollout.placement = 'shared' uses the "
            "trainer's (0): leave it out",
        ),
        (
            gpus(4),
            None,
            {"is_shared": True, "ranks": 2, "trainers": 2, "per_engine": 2},
            "an engine takes 2 GPUs (tensor_parallel_size of rollout.engine_args), and a trainer "
            "node has 1 that it could use in turn with it",
        ),
        (
            gpus(4),
            None,
            {**SIZES, "engines": 4},
            "rollout.parallel: 4 engines of 1 (rollout.nodes) take 4 GPUs, and 3 can be used here "
            "beside train.ranks = 1",
        ),
        (
            Machine(problem="no driver"),
            None,
            SIZES,
            "rollout.parallel: its engines span several GPUs, and no GPU can be used here",
        ),
        (gpus(2), "", SIZES, "no GPU can be used here; leave it out"),
        (SLICED, None, {**SIZES, "ranks": 0}, "rollout.parallel: an engine cannot span MIG slices"),
        (
            machine(gpu(0), gpu(1), gpu(2, free=5)),
            None,
            SIZES,
            "has 5.0 GiB free of 80.0 GiB - 0.6 GiB of engines asleep; an engine needs 5.0 GiB",
        ),
        (
            machine(gpu(0, total=31, free=30)),
            None,
            {"is_shared": True},
            "has 30.0 GiB free of 31.0 GiB, and a training rank needs 30.6 GiB beside 1 engine "
            "asleep",
        ),
        (
            gpus(1),
            None,
            {"utilization": 0.8},
            "gpu_memory_utilization = 0.8 for 1 engine is more than that; 0.61",
        ),
        (
            Machine(problem="nvidia-smi fails: X"),
            None,
            {"train_devices": (0,)},
            "nvidia-smi fails: X",
        ),
        (
            Machine((gpu(0),), "450.1", "driver 450.1 is too old"),
            None,
            {},
            "driver 450.1 is too old",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(found, setting, wanted, line):
    environ = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    with pytest.raises(ConfigError) as refused:
        assign(found, environ, replace(RUN, **wanted))
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_engines_of_all_sizes_lie_over_the_same_gpus_and_one_of_them_is_awake_on_each():
    sizes = {"engines": 4, "parallel": (1, 2, 4), "asleep": 2}
    got = assign(gpus(8), {}, replace(RUN, **sizes))
    assert got.ranks == ("0",)
    assert [part.tokens for part in got.engines] == [
        *(("1",), ("2",), ("3",), ("4",)),
        *(("1", "2"), ("3", "4")),
        ("1", "2", "3", "4"),
    ]
    # together with what two of them keep that sleep
    assert {part.memory for part in got.engines} == {0.91}
    assert (
        "engine 4 of 2, in turn with others: GPU 1 (NVIDIA H100 80GB HBM3), GPU 2" in got.notes[5]
    )
    named = assign(gpus(8), {}, replace(RUN, **SIZES, rollout_devices=(5, 3)))
    assert [part.tokens for part in named.engines] == [("5",), ("3",), ("5", "3")]


def test_what_another_process_may_be_giving_back_is_told_apart():
    with pytest.raises(TooLittleMemory):
        assign(machine(gpu(0, free=20)), {}, RUN)


def test_a_driver_that_fails_leaves_the_cpu_and_says_so():
    got = assign(Machine(problem="nvidia-smi fails: X"), {}, RUN)
    assert got.ranks == ()
    assert got.notes == ("no GPU is used: nvidia-smi fails: X",)


def test_the_parts_of_a_shared_gpu_fit_into_it():
    for free in (40, 60, 79):
        for engines in (1, 2, 3):
            try:
                got = assign(
                    machine(gpu(0, free=free)), {}, replace(RUN, engines=engines, least=GIB)
                )
            except TooLittleMemory:
                continue
            assert NEED + sum(part.memory for part in got.engines) * 80 * GIB <= free * GIB


def test_numbers_of_unlike_gpus_mean_what_cuda_says_unless_it_counts_as_nvidia_smi_does():
    unlike = machine(gpu(0, name="T4", total=16), gpu(1))
    (first,) = visible(unlike, {"CUDA_VISIBLE_DEVICES": "0"})
    assert (first.token, first.total) == ("0", None)
    (first,) = visible(unlike, {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert first.total == 16 * GIB


@pytest.mark.parametrize(
    ("tokens", "setting", "expected"),
    [
        ((), None, {}),
        (("2", "3"), None, {"CUDA_VISIBLE_DEVICES": "2,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        (("3",), "GPU-3", {"CUDA_VISIBLE_DEVICES": "3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        (("3",), "3,1", {"CUDA_VISIBLE_DEVICES": "3"}),
    ],
)
def test_what_a_child_is_told(tokens, setting, expected):
    assert (
        environment(tokens, {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting})
        == expected
    )


def test_the_options_of_each_daemon():
    got = assign(gpus(1), {}, replace(RUN, engines=2))
    assert got.options("trainer-0") == ("--gpus", "0", "--gpu-memory", "0.0")
    assert got.options("rollout-1") == ("--gpus", "0", "--gpu-memory", "0.26")
    assert assign(NO_DRIVER, {}, RUN).options("rollout-0") == ()


def test_each_of_several_trainer_daemons_gets_its_share_of_the_ranks():
    got = assign(gpus(5), {}, replace(RUN, ranks=4, trainers=2, engines=1))
    assert got.options("trainer-0")[:2] == ("--gpus", "0,1")
    assert got.options("trainer-1")[:2] == ("--gpus", "2,3")
    with pytest.raises(ConfigError, match=r"train.nodes x train.ranks = 4: each needs a GPU"):
        assign(gpus(3), {}, replace(RUN, ranks=4, trainers=2, engines=1))
