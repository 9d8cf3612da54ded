"""The election, event by event."""

from __future__ import annotations

from edl.master import election as el
from edl.types import FencingToken, NodeId

OTHER = el.MasterInfo(NodeId("other"), "other", 1)
SELF = el.MasterInfo(NodeId("self"), "self", 1)


def after(*events: el.ElectionEvent) -> el.ElectionDecision:
    """The last decision of a launcher to which this has happened."""
    decision = el.ElectionDecision(el.ElectionState(), (), "")
    for event in events:
        decision = el.elect(decision.state, event)
    return decision


def won(token: int) -> el.CampaignEnded:
    return el.CampaignEnded(True, FencingToken(token))


def ruled_by(master: el.MasterInfo | None, token: int) -> el.KeyChanged:
    return el.KeyChanged(master, FencingToken(token))


LOST = el.CampaignEnded(False, FencingToken(0))
MASTER = (el.LauncherRegistered(), won(5))


def test_the_first_one_stands() -> None:
    decision = after(el.LauncherRegistered())
    assert decision.effects == (el.Campaign(FencingToken(0)),)
    assert decision.reason == "there is no Master"


def test_a_winner_rules() -> None:
    decision = after(*MASTER)
    assert decision.effects == (el.BecomeMaster(FencingToken(5)),)
    assert decision.state.role is el.Role.MASTER
    assert decision.reason == "elected"


def test_who_is_not_registered_does_not_stand() -> None:
    assert after(ruled_by(None, 3)).effects == ()
    decision = after(ruled_by(OTHER, 3), el.MasterRefused(FencingToken(3)))
    assert (decision.effects, decision.reason) == ((), "about an earlier Master")


def test_a_loser_follows_whom_the_watch_shows() -> None:
    decision = after(el.LauncherRegistered(), LOST, ruled_by(OTHER, 4), LOST)
    assert decision.state.role is el.Role.FOLLOWER
    assert decision.reason == "another launcher was faster"
    assert after(el.LauncherRegistered(), ruled_by(OTHER, 4)).effects == (el.Follow(OTHER, FencingToken(4)),)


def test_a_loser_who_knows_of_nobody_asks_again() -> None:
    decision = after(el.LauncherRegistered(), LOST)
    assert decision.effects == (el.Campaign(FencingToken(0)),)
    assert decision.reason == "no Master is known: trying again"


def test_a_dead_master_is_deposed_before_its_lease_ends() -> None:
    known = (ruled_by(OTHER, 4), el.LauncherRegistered())
    assert after(*known).effects == ()
    decision = after(*known, el.MasterRefused(FencingToken(4)))
    assert decision.effects == (el.Campaign(FencingToken(4)),)
    assert decision.reason == "the Master's host refuses connections: replacing it"
    assert after(*known, el.MasterRefused(FencingToken(3))).effects == ()


def test_a_candidate_knows_the_winner_before_its_own_campaign_ends() -> None:
    known = (ruled_by(OTHER, 4), el.LauncherRegistered())
    assert after(*known).state.known == OTHER
    deposing = (*known, el.MasterRefused(FencingToken(4)))
    assert after(*deposing).state.known is None, "nobody is sent to a dead Master"
    third = el.MasterInfo(NodeId("third"), "third", 1)
    decision = after(*deposing, ruled_by(None, 6), ruled_by(third, 7))
    assert (decision.state.role, decision.state.known) == (el.Role.CANDIDATE, third)
    assert after(*deposing, ruled_by(None, 6)).state.known is None
    assert after(*MASTER, el.OutOfTouch()).state.known is None


def test_a_replaced_master_steps_down_and_follows() -> None:
    decision = after(*MASTER, ruled_by(OTHER, 9))
    assert decision.effects == (el.StepDown("other is the Master now"), el.Follow(OTHER, FencingToken(9)))


def test_a_fenced_master_steps_down_and_stands_again() -> None:
    decision = after(*MASTER, el.FencedOff())
    assert decision.effects == (el.StepDown("another Master has been elected"), el.Campaign(FencingToken(0)))


def test_a_watch_that_lags_behind_does_not_unseat_a_new_master() -> None:
    decision = after(el.LauncherRegistered(), ruled_by(OTHER, 3), won(5), ruled_by(None, 4))
    assert (decision.effects, decision.reason) == ((), "stale notification")
    assert decision.state.role is el.Role.MASTER
    assert after(el.LauncherRegistered(), won(5), ruled_by(SELF, 5)).effects == (el.Follow(SELF, FencingToken(5)),)


def test_a_win_that_has_come_and_gone_is_none() -> None:
    decision = after(el.LauncherRegistered(), ruled_by(SELF, 5), ruled_by(None, 6), won(5))
    assert decision.state.role is el.Role.CANDIDATE
    assert decision.effects == (el.Campaign(FencingToken(0)),)


def test_a_lost_lease_ends_a_rule() -> None:
    decision = after(*MASTER, el.LauncherUnregistered())
    assert decision.effects == (el.StepDown("this launcher's lease ended"),)
    assert not decision.state.registered
    again = after(*MASTER, el.LauncherUnregistered(), ruled_by(None, 8), el.LauncherRegistered())
    assert again.effects == (el.Campaign(FencingToken(0)),)


def test_a_campaign_whose_lease_ended_is_given_up() -> None:
    decision = after(el.LauncherRegistered(), el.LauncherUnregistered(), won(5))
    assert (decision.effects, decision.reason) == ((), "the campaign was abandoned")


def test_a_master_that_lost_store_and_nodes_asks_for_its_place_again() -> None:
    decision = after(*MASTER, el.OutOfTouch())
    reason = "out of touch with the store and with a node: another Master may have been elected"
    assert decision.effects == (el.StepDown(reason), el.Campaign(FencingToken(5)))
    back = el.elect(decision.state, won(5))
    assert back.effects == (el.BecomeMaster(FencingToken(5)),)
    beaten = el.elect(el.elect(decision.state, ruled_by(OTHER, 9)).state, LOST)
    assert beaten.state.role is el.Role.FOLLOWER
    assert after(el.LauncherRegistered(), el.OutOfTouch()).reason == "no longer the Master"


def test_a_key_of_its_own_makes_it_master_whatever_its_last_campaign_says() -> None:
    """An earlier campaign has created the key, and the last one, which began before that was known, finds it taken."""
    decision = after(el.LauncherRegistered(), LOST, el.KeyChanged(SELF, FencingToken(7), mine=True))
    assert decision.state.role is el.Role.MASTER
    assert decision.effects == (el.BecomeMaster(FencingToken(7)), el.Follow(SELF, FencingToken(7)))
    for late in (LOST, won(7)):
        decision = el.elect(decision.state, late)
        assert (decision.state.role, decision.effects) == (el.Role.MASTER, ())


def test_the_watch_does_not_elect_a_master_twice() -> None:
    """A second term under one token would decide again while writes of the first are on their way."""
    elected = after(el.LauncherRegistered(), won(5))
    shown = el.elect(elected.state, el.KeyChanged(SELF, FencingToken(5), mine=True))
    assert (shown.state.role, shown.effects) == (el.Role.MASTER, (el.Follow(SELF, FencingToken(5)),))
