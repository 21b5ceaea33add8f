"""Run attempts as containers of a Docker Engine on this machine."""
