"""Rotary embeddings whose frequencies depend on the length, and how long a context they give."""

from typing import Any

import pytest

from lightrl.rope import context, settle

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({}, None),
        ({"max_position_embeddings": 32768}, 32768),
        # as Qwen's model cards say, in the words of either release of transformers
        ({"max_position_embeddings": 32768, "rope_scaling": YARN}, 131072),
        (
            {
                "max_position_embeddings": 32768,
                "rope_parameters": {**YARN, "rope_type": "yarn", "rope_theta": 1e6},
            },
            131072,
        ),
        ({"max_position_embeddings": 131072, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 40960, "rope_scaling": {**YARN, "factor": 1.0}}, 40960),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": 2}}, 8192),
        (
            {"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            8192,
        ),
        (
            {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}},
            8192,
        ),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "default"}}, 64),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            131072,
        ),
        (  # of each kind of layers; stated as a whole
            {
                "model_type": "gemma3_text",
                "max_position_embeddings": 131072,
                "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 64,
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "yarn",
                        "factor": 8.0,
                        "original_max_position_embeddings": 64,
                    },
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            512,
        ),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": None}}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": "yarn"}, 64),
    ],
)
def test_how_long_a_context_is(config: dict[str, Any], tokens: int | None):
    assert context(config) == tokens


class Config:
    """What is read of a Hugging Face config."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__ |= {"hidden_size": 8, "num_attention_heads": 2, **attributes}

    def get_text_config(self) -> "Config":
        return self


def longrope(**more: Any) -> Config:
    rope = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [9.0], **more}
    rope["original_max_position_embeddings"] = 64
    return Config(max_position_embeddings=512, rope_parameters=rope)


@pytest.mark.parametrize(("length", "factors"), [(64, [1.0]), (65, [9.0])])
def test_the_factors_of_longrope_follow_from_the_longest_sequence(length, factors):
    config = longrope()
    kind = "short" if length == 64 else "long"
    assert settle(config, length) == (
        f"longrope: the {kind} factors are used at all lengths, since sequences may have {length} "
        "tokens"
    )
    rope = config.rope_parameters
    assert rope["short_factor"] == rope["long_factor"] == factors
    expected = (1 + 1 / 2) ** 0.5  # log 8 / log 64
    assert rope["attention_factor"] == pytest.approx(expected)
    assert rope["short_mscale"] == rope["long_mscale"] == rope["attention_factor"]


def test_scales_that_the_config_names_are_kept():
    config = longrope(short_mscale=1.25, long_mscale=1.5)
    settle(config, 500)
    assert config.rope_parameters["attention_factor"] == 1.5
    config = longrope(attention_factor=2.0)
    settle(config, 500)
    assert config.rope_parameters["short_mscale"] == 2.0


def test_dynamic_scaling_is_that_of_the_longest_sequence():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    config = Config(max_position_embeddings=64, rope_parameters=dict(rope))
    assert not settle(config, 64)
    assert config.rope_parameters == rope
    assert settle(config, 128)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": pytest.approx(900.0)}
    assert config.max_position_embeddings == 129


@pytest.mark.parametrize("kind", ["default", "linear", "yarn", "llama3"])
def test_other_kinds_depend_on_no_length(kind):
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 100.0}
    config = Config(max_position_embeddings=64, rope_parameters=dict(rope))
    assert not settle(config, 128)
    assert config.rope_parameters == rope
    assert not settle(Config(rope_parameters=None), 128)
    assert not settle(Config(), 128)
