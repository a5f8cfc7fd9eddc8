"""The models of the presets: how many bytes a version has, and how long it is on its way.

Owns sizes and the rates behind a preset's `Transfer`. Nobody has published how long these systems
take to publish and to load weights, so the rates are our own, measured without a GPU
(weights/README.md), for as many devices as publish and load side by side.
"""

from lightrl.sim.costs import Transfer

# Bytes of the parameters in bfloat16, `total_size` in model.safetensors.index.json of each model at
# https://huggingface.co/Qwen.
QWEN2_5_7B = 2 * 7_615_616_512
QWEN2_5_14B = 2 * 14_770_033_664
QWEN2_5_32B = 2 * 32_763_876_352
QWEN3_14B = 2 * 14_768_307_200

GPUS_OF_MACHINE = 8
# One core casts, copies and hashes 2.2 GB/s (4.4 GB/s with two, 0.99 of what bare copies and hashes
# take); a core for each rank of the machine that publishes.
PUBLISH_BYTES_PER_S = 2.2e9 * GPUS_OF_MACHINE
# A torch engine copies its parts of a version out of the mapped file, for each device.
LOAD_BYTES_PER_S = 5.9e9


def transfer(
    num_bytes: float, engine_gpus: int, machines: int, line: float, sender_line: float = 0.0
) -> Transfer:
    """Of a version of `num_bytes`, to engines on `engine_gpus` GPUs each.

    `machines` train as one: the ranks of all but one send their rows to that one, and their engines
    get the version from it, both over its line. Lines in bytes a second: `line` of a machine that
    is shared by its engines, `sender_line` of the trainer's, 0 = the same.
    """
    sender = sender_line or line
    others = (machines - 1) / machines + (machines > 1)
    return Transfer(
        num_bytes=num_bytes,
        receiver_bytes_per_s=line * (engine_gpus / GPUS_OF_MACHINE),
        sender_bytes_per_s=sender,
        publish_s=others * num_bytes / sender,
        publish_bytes_per_s=PUBLISH_BYTES_PER_S,
        load_s=0.0,
        load_bytes_per_s=LOAD_BYTES_PER_S * engine_gpus,
    )
