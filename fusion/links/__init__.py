"""Floor 2: what is known of the links between nodes, from few and noisy measurements. Pure; the time is an argument."""

from fusion.links.book import LinkBook
from fusion.links.estimate import LinkEstimate
from fusion.links.probing import ProbeWish, next_probes
from fusion.links.view import LinkView, under_load, view_of

__all__ = ["LinkBook", "LinkEstimate", "LinkView", "ProbeWish", "next_probes", "under_load", "view_of"]
