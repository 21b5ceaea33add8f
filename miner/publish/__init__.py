"""Publishing: a submission is checked, uploaded, verified and fingerprinted, in a process of its own."""

from miner.publish.publisher import HubPublisher, PublishTarget

__all__ = ["HubPublisher", "PublishTarget"]
