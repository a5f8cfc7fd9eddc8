"""Where a version becomes official: what the trainer says that it has, and whether it can be so.

Owns that; who is told of a version, and gets it from whom, is decided in `fleet.py`.
"""

from lightrl.core.commands import Outbox
from lightrl.core.ending import Ending
from lightrl.core.fleet import Fleet
from lightrl.core.log_entries import VersionPublished
from lightrl.core.round_scheduler import RoundScheduler
from lightrl.core.state import RunState
from lightrl.messages.weights import PublishWeights


class Versions:
    def __init__(self, fleet: Fleet, steps: RoundScheduler, ending: Ending, outbox: Outbox) -> None:
        self._fleet = fleet
        self._steps = steps
        self._feed = steps.trainer_feed
        self._ending = ending
        self._outbox = outbox

    def publish(self, name: str, message: PublishWeights, now: float) -> None:
        """The trainer has a version: a new one, or after it has come (back) where it stands."""
        version, digest = message.policy_version, message.digest
        published, stood_at = self._fleet.published, self._feed.stands_at
        if name != self._fleet.trainer:
            return
        if version == stood_at:  # it came twice, maybe with more
            self._fleet.offer_deltas(message)
            return
        if stood_at is not None and version != stood_at + 1:
            self._outbox.warn(
                f"{name} published version {version}, expected {stood_at + 1}: ignored"
            )
            return
        is_new = published is not None and version > published.policy_version
        if stood_at is not None and is_new and not self._steps.has_closed(stood_at):
            self._outbox.warn(
                f"{name} published version {version}, but the round of step {stood_at} is "
                "still open: ignored"
            )
            return
        if (problem := self._why_wrong(version, digest)) is not None:
            self._ending.begin(RunState.FAILED, problem)
            return
        self._feed.stands_at = version
        if published is None or version > published.policy_version:
            m = message
            sizes, what = (m.num_bytes, m.manifest_bytes), (m.canary, m.base, m.replicas)
            self._outbox.record(VersionPublished(version, digest, m.portions, *sizes, *what))
            self._fleet.publish(message, now)
            self._steps.published(now)
        elif version == published.policy_version:
            self._fleet.publish_again(message)
        else:
            self._fleet.trainer_is_behind(version)
            behind = f"{name} is at step {version}, the run at step {self._steps.step}"
            self._outbox.warn(f"{behind}: the steps in between are trained again")
        self._fleet.trainer_stands()
        self._steps.feed_trainer(has_come=stood_at is None)
        if self._ending.has_begun:
            self._ending.dismiss_trainer()

    def _why_wrong(self, version: int, digest: str) -> str | None:
        """Why this version cannot be the trainer's, in one line."""
        known = self._fleet.digests.get(version, digest)
        if known != digest:
            return (
                f"version {version} was trained again and came out different (digest {digest}, "
                f"published was {known}): lightrl resume --from-checkpoint goes back to the last "
                "checkpoint"
            )
        return self._steps.why_not_at(version) if self._feed.stands_at is None else None
