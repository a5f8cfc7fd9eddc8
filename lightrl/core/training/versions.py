"""Check a version that the trainer publishes, and make it official.

`fleet.py` decides which nodes are notified, and from which sources they pull.

After a restart the trainer repeats the steps since its checkpoint. On GPUs sums may round
differently, so that a version gets another digest. With `run.deterministic` the run then fails.
Otherwise the new version replaces the old one if the logprobs of the canary under both differ by
no more than the tolerance: nodes load the new one, and tokens sampled under the old one are kept.
"""

import math

from lightrl.core.arrays import decode
from lightrl.core.commands import Outbox
from lightrl.core.log_entries import VersionPublished, VersionRetrained
from lightrl.core.nodes.fleet import Fleet
from lightrl.core.rounds.round_scheduler import RoundScheduler
from lightrl.core.rounds.shutdown import Shutdown
from lightrl.core.settings import Settings
from lightrl.core.state import RunState
from lightrl.messages.weights import Canary, PublishWeights

GO_BACK = "lightrl resume --from-checkpoint goes back to the last checkpoint"


class Versions:
    """Checks each version of the trainer, and makes it official. Decides whether a version that was
    trained again with another digest replaces the old one or ends the run."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        steps: RoundScheduler,
        shutdown: Shutdown,
        outbox: Outbox,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._steps = steps
        self._feed = steps.trainer_feed
        self._shutdown = shutdown
        self._outbox = outbox

    def publish(self, name: str, message: PublishWeights, now: float) -> None:
        """Handle a version of the trainer: a new one, or its current one after it (re)joined."""
        version = message.policy_version
        published, trained_step = self._fleet.published, self._feed.trained_step
        if name != self._fleet.trainer:
            return
        if version == trained_step:  # repeated, maybe with more deltas
            self._fleet.offer_deltas(message)
            return
        if trained_step is not None and version != trained_step + 1:
            self._outbox.warn(
                f"{name} published version {version}, expected {trained_step + 1}: ignored"
            )
            return
        is_new = published is not None and version > published.policy_version
        if trained_step is not None and is_new and not self._steps.has_closed(trained_step):
            self._outbox.warn(
                f"{name} published version {version}, but the round of step {trained_step} is "
                "still open: ignored"
            )
            return
        problem = self._steps.why_not_at(version) if trained_step is None else None
        problem = problem or self._retrain(message)
        if problem is not None:
            self._shutdown.begin(RunState.FAILED, problem)
            return
        self._feed.trained_step = version
        if published is None or version > published.policy_version:
            m = message
            sizes, what = (m.num_bytes, m.manifest_bytes), (m.canary, m.base, m.replicas)
            self._outbox.record(VersionPublished(version, m.digest, m.portions, *sizes, *what))
            self._fleet.publish(message, now)
            self._steps.published(now)
        elif version == published.policy_version:
            self._fleet.publish_again(message)
        else:
            self._fleet.on_trainer_behind(version)
            behind = f"{name} is at step {version}, the run at step {self._steps.step}"
            self._outbox.report(f"{behind}: the steps in between are trained again")
        self._fleet.on_trainer_ready()
        self._steps.feed_trainer(has_joined=trained_step is None)
        if self._shutdown.has_begun:
            self._shutdown.stop_trainer()

    def _retrain(self, message: PublishWeights) -> str | None:
        """Record a version whose digest differs from the known one of its number. Returns one line
        on why it cannot replace the known one, or None."""
        m, version = message, message.policy_version
        known = self._fleet.digests.get(version, (m.digest,))[-1]
        if known == m.digest:
            return None
        digests = f"(digest {m.digest}, published was {known})"
        if version <= self._settings.first_step:
            return f"version {version} was loaded again, and the model has changed {digests}"
        what = f"version {version} was trained again and came out different"
        if self._settings.deterministic:
            return f"{what} {digests}: {GO_BACK}"
        before, apart = self._fleet.canaries.get(version), None
        if before is not None and m.canary is not None:
            apart = _apart(before, m.canary)
            tolerance = self._settings.canary_tolerances.get(m.canary.dtype, math.inf)
            if apart is not None and not apart[0] <= tolerance:
                return (
                    f"{what}: logprobs of the canary differ by up to {apart[0]:.3g} (mean "
                    f"{apart[1]:.3g}), more than {tolerance:g} (weights.canary): {GO_BACK}"
                )
        largest, mean = apart or (None, None)
        sizes = m.num_bytes, m.manifest_bytes
        self._outbox.record(
            VersionRetrained(version, known, m.digest, largest, mean, *sizes, m.canary, m.base)
        )
        by = "there is no canary to compare"
        if apart is not None:
            by = f"logprobs of the canary differ by up to {largest:.3g}, by {mean:.3g} on average"
        published = self._fleet.published
        if published is not None and version < published.policy_version:
            self._fleet.add_retrained_version(m)
            self._outbox.report(f"{what}: {by}")
        else:
            self._outbox.warn(f"{what}: {by}; nodes load it instead of the one before")
        return None


def _apart(one: Canary, other: Canary) -> tuple[float, float] | None:
    """Return the largest and mean absolute difference of the logprobs, in nats; infinite if a
    logprob is not finite. Only tokens before the first that differs count, since each text was
    drawn with its own weights; None if there are none."""
    texts = zip(decode("i", one.token_ids), decode("i", other.token_ids), strict=False)
    num_same = next((i for i, (a, b) in enumerate(texts) if a != b), len(one.token_ids) // 4)
    logprobs = zip(decode("f", one.logprobs), decode("f", other.logprobs), strict=False)
    found = [abs(a - b) for a, b in list(logprobs)[: max(0, num_same - 1)]]
    if not found:
        return None
    if not all(map(math.isfinite, found)):
        return math.inf, math.inf
    return max(found), math.fsum(found) / len(found)
