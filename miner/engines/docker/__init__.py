"""Attempts as containers of a Docker Engine on this machine."""

from miner.engines.docker.engine import DockerEngine

__all__ = ["DockerEngine"]
