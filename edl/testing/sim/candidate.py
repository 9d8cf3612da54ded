"""The election's shell in virtual time: watches the key, campaigns, rules. Mirrors ``edl.master.candidate``."""

from __future__ import annotations

from typing import Any

from edl.errors import StoreError, StoreUnavailable
from edl.master import election as el
from edl.testing.sim.process import MASTER_KEY, SimDeps
from edl.testing.sim.ruling import Ruling, RulingProcess
from edl.testing.sim.store import SimStore, StoreChange
from edl.types import Token
from edl.wire.messages import NodeInfo


class Candidate(RulingProcess):
    """A process that takes part in elections; what follows from them is the launcher's business."""

    def __init__(self, deps: SimDeps, info: NodeInfo) -> None:
        super().__init__(deps, info.host, info.port)
        self.info = info
        self.election = el.ElectionState()
        self.ruling: Ruling | None = None
        self.departing = False
        self._campaign = 0

    def follow(self, ruler: el.Ruler, token: Token) -> None:
        """Attach to this Master."""
        raise NotImplementedError

    def step_down(self) -> None:
        """Rule no longer."""
        raise NotImplementedError

    def look_at_key(self, error: StoreError | None = None) -> None:
        """Read the election key and watch it from there on."""

        def read(store: SimStore) -> tuple[el.Ruler | None, Token, int]:
            entry = store.entries.get(MASTER_KEY)
            if entry is None:
                return None, Token(store.revision), len(store.history)
            return entry.value, Token(entry.create_revision), len(store.history)

        def follow_up(found: tuple[el.Ruler | None, Token, int]) -> None:
            ruler, token, position = found
            self.elect(el.KeyChanged(ruler, token))
            self.watch(MASTER_KEY, position, self._key_changed)

        self.ask(read, follow_up, lambda error: self.run(self.look_at_key, error))

    def _key_changed(self, change: StoreChange) -> None:
        if change.entry is None:
            self.elect(el.KeyChanged(None, Token(change.revision)))
        else:
            self.elect(el.KeyChanged(change.entry.value, Token(change.entry.create_revision)))

    def elect(self, event: el.ElectionEvent) -> None:
        """Feed the election machine and do what it says."""
        decision = el.elect(self.election, event)
        if self.deps.trace is not None:
            self.say(f"election <- {event}: {decision.reason}")
        self.election = decision.state
        for effect in decision.effects:
            match effect:
                case el.Campaign(depose):
                    self._campaign += 1
                    self._stand(self._campaign, depose)
                case el.Rule(token):
                    self.step_down()
                    self.ruling = Ruling(self, token)
                case el.StepDown():
                    self.step_down()
                case el.Follow(ruler, token):
                    self.follow(ruler, token)

    def _stand(self, campaign: int, depose: Token) -> None:
        """Two transactions; others may come in between."""
        lease = self.info.incarnation
        ruler = el.Ruler(self.info.node, self.host, self.port)

        def clear(store: SimStore) -> None:
            if depose and store.token(MASTER_KEY) == depose:
                store.delete(MASTER_KEY)

        def create(_: Any) -> None:
            self.ask(lambda store: store.create(MASTER_KEY, ruler, lease), ended, failed)

        def ended(token: Token) -> None:
            self.after(0.0 if token else 0.05, self._campaign_ended, campaign, token)

        def failed(error: StoreError) -> None:
            if isinstance(error, StoreUnavailable):
                self._find_out(campaign, lease)
            else:
                ended(Token(0))

        if depose:
            self.ask(clear, create, failed)
        else:
            create(None)

    def _find_out(self, campaign: int, lease: int) -> None:
        """No answer; the key may have been created all the same. Look until the store says."""

        def mine(store: SimStore) -> Token:
            entry = store.entries.get(MASTER_KEY)
            return Token(entry.create_revision if entry is not None and entry.lease == lease else 0)

        def ended(token: Token) -> None:
            self._campaign_ended(campaign, token)

        def unanswered(_: StoreError) -> None:
            self.after(0.05, self._find_out, campaign, lease)

        if campaign == self._campaign:
            self.ask(mine, ended, unanswered)

    def _campaign_ended(self, campaign: int, token: Token) -> None:
        if campaign == self._campaign and not self.departing:
            self.elect(el.CampaignEnded(bool(token), token))
