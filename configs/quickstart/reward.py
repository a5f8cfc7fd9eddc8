"""The quickstart's reward: 1 if the whole chain is right and the model ended it by itself, else
0."""


def reward(sample) -> float:
    # The last number alone would not do: a forgotten borrow adds 10, harmless modulo 5.
    return float(sample.finish_reason == "stop" and sample.response == sample.answer)
