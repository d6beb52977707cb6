"""What there is to train on: hosts, devices, memory tiers and links; written down, detected or measured.

Nothing here imports torch, except to measure how fast it multiplies.
"""

from plait.cluster.cluster import PARTS, Cluster
from plait.cluster.parts import ANY, Device, Host, Link, Tier

__all__ = ["ANY", "PARTS", "Cluster", "Device", "Host", "Link", "Tier"]
