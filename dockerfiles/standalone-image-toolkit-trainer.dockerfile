# z-image, qwen-image, ideogram4, krea2 and Flux with ai-toolkit, as validators build and run it, and as the daemon
# does. From the repository's root:
#   docker build -f dockerfiles/standalone-image-toolkit-trainer.dockerfile -t god-miner/toolkit-trainer .
# For a reviewer: ai-toolkit, which trains where the evaluator's own ComfyUI cannot, with the packages it is written against.
ARG BASE_IMAGE=diagonalge/ai-toolkit:latest@sha256:c24f8bb95bf1dc8da7cd6158a763f2c9782783ad7648dc4047c5757ef3447db8
# For a reviewer: it installs the packages below, by their hashes.
ARG UV_IMAGE=ghcr.io/astral-sh/uv:0.9.7@sha256:ba4857bf2a068e9bc0e64eed8563b065908a4cd6bfb66b531a9c424c8e25e142

FROM ${UV_IMAGE} AS uv
FROM ${BASE_IMAGE}
# The base's own Python where it is new enough; else uv fetches one, which is one server more to depend on.
ARG PYTHON_VERSION=">=3.11,<3.13"

COPY --from=uv /uv /usr/local/bin/uv
COPY requirements /app/god-miner/requirements
# A Python of our own: the engine's may be too old, and its packages are its own affair.
RUN UV_PYTHON_INSTALL_DIR=/opt/god-miner/python uv venv --python "${PYTHON_VERSION}" /opt/god-miner/venv \
    && uv pip install --python /opt/god-miner/venv/bin/python --require-hashes --no-deps --only-binary :all: \
        -r /app/god-miner/requirements/image.txt \
    && rm -rf /root/.cache/uv \
    # The engine goes on with the Python it came with, whatever comes first on the path from here on.
    && printf '#!/bin/sh\nPATH=%s exec %s "$@"\n' "$PATH" "$(command -v python3)" > /opt/god-miner/engine-python \
    && chmod 755 /opt/god-miner/engine-python

# What scores pictures, and therefore trains them: ComfyUI at the evaluator's commit, in a Python of its own with the
# evaluator's versions of torch, transformers and diffusers. An empty commit builds without: another engine trains.
ARG COMFYUI_COMMIT=694815f498295080a0e15a1502edc9dba841b110
RUN [ -z "${COMFYUI_COMMIT}" ] || { UV_PYTHON_INSTALL_DIR=/opt/god-miner/python \
        uv venv --python 3.12 /opt/god-miner/pictures \
    && uv pip install --python /opt/god-miner/pictures/bin/python --require-hashes --no-deps --only-binary :all: \
        -r /app/god-miner/requirements/pictures.txt \
    && rm -rf /root/.cache/uv \
    && { command -v git > /dev/null || { apt-get update -q && apt-get install -qy --no-install-recommends git; }; } \
    && git init -q /app/ComfyUI && cd /app/ComfyUI \
    && git fetch -q --depth 1 https://github.com/comfyanonymous/ComfyUI.git "${COMFYUI_COMMIT}" \
    && git checkout -q FETCH_HEAD && rm -rf .git; }

# For a reviewer: the evaluator's public VAEs, and Ideogram's base, unchanged and checked by digest, where the cache
# lacks them. They are read and never trained. requirements/evaluator_files.py has addresses and digests.
# "no" builds without.
ARG EVALUATOR_FILES=yes
RUN [ "${EVALUATOR_FILES}" = no ] || /opt/god-miner/venv/bin/python /app/god-miner/requirements/evaluator_files.py \
        /app/weights qwen_image_vae.safetensors flux2-vae.safetensors ideogram4_fp8_scaled.safetensors

COPY configs /app/god-miner/configs
COPY core /app/god-miner/core
COPY trainer /app/god-miner/trainer

ENV PATH=/opt/god-miner/venv/bin:$PATH \
    PYTHONPATH=/app/god-miner \
    PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1 \
    TRANSFORMERS_OFFLINE=1 \
    GOD_MINER_AI_TOOLKIT=/app/ai-toolkit \
    GOD_MINER_ENGINE_PYTHON=/opt/god-miner/engine-python \
    GOD_MINER_PICTURES_PYTHON=/opt/god-miner/pictures/bin/python \
    GOD_MINER_COMFYUI=/app/ComfyUI \
    GOD_MINER_WEIGHTS=/app/weights

# What is missing shows here, in the build.
# The engine's Python may lie below /root, and the training runs as a user who may not enter there.
RUN chmod a+rx /root \
    && python -m compileall -q /app/god-miner \
    && python -c "import trainer.image, trainer.runner.check_engines" \
    && { [ -z "${COMFYUI_COMMIT}" ] || /opt/god-miner/pictures/bin/python -c "from pathlib import Path; \
        from trainer.pictures.stack import import_comfyui; import_comfyui(Path('/app/ComfyUI')); \
        import comfy.sd, comfy.samplers, comfy_extras.nodes_model_advanced, folder_paths, node_helpers; \
        import trainer.pictures.train, trainer.pictures.evaluate; from diffusers import AutoencoderKL"; } \
    && test -f /app/ai-toolkit/run.py \
    && PYTHONPATH= /opt/god-miner/engine-python -c "import torch"

# No USER: validators mount volumes that belong to root on /app/checkpoints and give no capabilities, so another
# user could save nothing. The daemon starts it as a user of its own.
WORKDIR /app
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "trainer.image"]
