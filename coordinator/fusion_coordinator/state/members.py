"""How tokens, identities and nodes change by events."""

from __future__ import annotations

from msgspec.structs import replace

from fusion_coordinator.state.events import Enrolled, NodeDrains, NodeGone, NodeRegistered, Revoked, TokenCreated
from fusion_coordinator.state.records import IdentityRecord, NodeRecord, NodeState, State, TokenRecord

_TOKENS_KEPT_S = 86_400.0  #: after they expired, so that a late user is told "expired" and not "unknown"


def token_created(event: TokenCreated, state: State) -> State:
    """Add the token, and forget the ones that expired long ago."""
    kept = {key: token for key, token in state.tokens.items() if token.expires_wall_s + _TOKENS_KEPT_S > event.wall_s}
    token = TokenRecord(event.token_id, event.secret_hash, event.role, event.expires_wall_s)
    return replace(state, tokens={**kept, event.token_id: token})


def enrolled(event: Enrolled, state: State) -> State:
    """Mark the token as used and remember whom it brought."""
    tokens = state.tokens
    if event.token_id in tokens:
        used = replace(tokens[event.token_id], used_by=event.identity)
        tokens = {**tokens, event.token_id: used}
    identity = IdentityRecord(event.identity, event.role, event.name, event.wall_s)
    return replace(state, tokens=tokens, identities={**state.identities, event.identity: identity})


def revoked(event: Revoked, state: State) -> State:
    """Withdraw an identity for good."""
    return replace(state, revoked=state.revoked | {event.identity})


def node_registered(event: NodeRegistered, state: State) -> State:
    """Replace the node's earlier registration."""
    node = NodeRecord(
        event.node,
        event.name,
        event.address,
        event.seen_host,
        event.hardware,
        event.incarnation,
        since_wall_s=event.wall_s,
    )
    return replace(
        state, nodes={**state.nodes, event.node: node}, incarnation=max(state.incarnation, event.incarnation)
    )


def node_gone(event: NodeGone, state: State) -> State:
    """Mark the node as lost or left, unless it has registered anew since."""
    node = state.nodes.get(event.node)
    if node is None or node.incarnation != event.incarnation or node.state is not NodeState.MEMBER:
        return state
    gone = replace(node, state=event.state, reason=event.reason, since_wall_s=event.wall_s)
    return replace(state, nodes={**state.nodes, event.node: gone})


def node_drains(event: NodeDrains, state: State) -> State:
    """Mark the node as about to leave, unless it has registered anew since."""
    node = state.nodes.get(event.node)
    if node is None or node.incarnation != event.incarnation or node.state is not NodeState.MEMBER:
        return state
    drains = replace(node, draining=True, reason=event.reason)
    return replace(state, nodes={**state.nodes, event.node: drains})
