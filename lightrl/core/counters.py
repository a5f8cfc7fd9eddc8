"""What happened in the run so far, as numbers. Data, no policy."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What happened in the run so far; all of it is shown to operators."""

    nodes_lost: int = 0
    # of nodes that served the newest version
    engines_lost: int = 0
    # resumed elsewhere from their tokens
    responses_moved: int = 0
    # of these, because another node is faster
    migrations: int = 0
    # of attempts given up
    chunks_ignored: int = 0
    # chunks with tokens missing before them
    holes: int = 0
    # wrong version, digest or size; the sender is lost
    bad_chunks: int = 0
    rewards_failed: int = 0
    groups_dropped: int = 0
    # of these, without signal: replaced by dynamic sampling
    groups_flat: int = 0
    # a prompt at most once in an epoch
    prompts_put_off: int = 0
    # accepted for training rounds
    rollout_tokens: int = 0
    eval_tokens: int = 0
    # accepted from nodes, but never trained
    aborted_tokens: int = 0
    groups_trained: int = 0
    trained_responses: int = 0

    def count_tokens(self, num_tokens: int, are_for_eval: bool) -> None:
        if are_for_eval:
            self.eval_tokens += num_tokens
        else:
            self.rollout_tokens += num_tokens
