# SDXL and Flux with sd-scripts, as validators build and run it, and as the daemon does. From the repository's root:
#   docker build -f dockerfiles/standalone-image-trainer.dockerfile -t god-miner/image-trainer .
#
# sd-scripts with the packages it was written against, and Flux's text encoders and VAE in /app/flux: its Python is
# too old for ours, which therefore comes along and only starts the engine.
ARG BASE_IMAGE=diagonalge/kohya_latest:latest@sha256:d34dd5750e1018455e111f63c03bb2a4e16204607e00ba5af870dd7c71beb84e
ARG UV_IMAGE=ghcr.io/astral-sh/uv:0.9.7@sha256:ba4857bf2a068e9bc0e64eed8563b065908a4cd6bfb66b531a9c424c8e25e142

FROM ${UV_IMAGE} AS uv
FROM ${BASE_IMAGE}
# The base's own Python where it is new enough; else uv fetches one, which is one server more to depend on.
ARG PYTHON_VERSION=">=3.11,<3.13"

COPY --from=uv /uv /usr/local/bin/uv
COPY requirements /app/god-miner/requirements
# A Python that runs on any glibc, and the three packages that the wrapper needs.
RUN UV_PYTHON_INSTALL_DIR=/opt/god-miner/python uv venv --python "${PYTHON_VERSION}" /opt/god-miner/venv \
    && uv pip install --python /opt/god-miner/venv/bin/python --require-hashes --no-deps --only-binary :all: \
        -r /app/god-miner/requirements/image.txt \
    && rm -rf /root/.cache/uv \
    # The engine goes on with the Python it came with, whatever comes first on the path from here on.
    && printf '#!/bin/sh\nPATH=%s exec %s "$@"\n' "$PATH" "$(command -v python)" > /opt/god-miner/engine-python \
    && chmod 755 /opt/god-miner/engine-python

COPY configs /app/god-miner/configs
COPY core /app/god-miner/core
COPY trainer /app/god-miner/trainer

ENV PATH=/opt/god-miner/venv/bin:$PATH \
    PYTHONPATH=/app/god-miner \
    PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1 \
    TRANSFORMERS_OFFLINE=1 \
    GOD_MINER_KOHYA=/app/sd-scripts \
    GOD_MINER_FLUX=/app/flux \
    GOD_MINER_ENGINE_PYTHON=/opt/god-miner/engine-python

# What is missing shows here, in the build.
# The engine's Python may lie below /root, and the training runs as a user who may not enter there.
RUN chmod a+rx /root \
    && python -m compileall -q /app/god-miner \
    && python -c "import trainer.image, trainer.runner.check_engines" \
    && test -f /app/sd-scripts/sdxl_train_network.py && test -f /app/sd-scripts/flux_train_network.py \
    && PYTHONPATH= /opt/god-miner/engine-python -c "import accelerate, torch"

# No USER: validators mount volumes that belong to root on /app/checkpoints and give no capabilities, so another
# user could save nothing. The daemon starts it as a user of its own.
WORKDIR /app
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "trainer.image"]
