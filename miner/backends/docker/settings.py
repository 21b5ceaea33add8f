"""The settings of Docker."""

# No `annotations` from __future__: pydantic would evaluate every string of them twice, at each start.
from miner.settings import values
from miner.settings.fields import Section, setting


class DockerSection(Section):
    title = "Docker"

    docker_host: values.DockerHost = setting(
        "unix:///var/run/docker.sock",
        "Socket of the Docker Engine, on this machine.",
    )
    trainer_text_image: values.ImageName = setting("god-miner/text-trainer:latest", "Image for text tasks.")
    trainer_image_image: values.ImageName = setting(
        "god-miner/image-trainer:latest", "Image for image tasks with kohya."
    )
    trainer_toolkit_image: values.ImageName = setting(
        "god-miner/toolkit-trainer:latest", "Image for image tasks with ai-toolkit."
    )


SECTION = DockerSection
