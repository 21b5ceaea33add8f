# Text training as validators build and run it, and as the daemon does. From the repository's root:
#   docker build -f dockerfiles/standalone-text-trainer.dockerfile -t god-miner/text-trainer .
# Validators pass the task's arguments straight to the entry point, mount /cache read-only, give no network, no
# capabilities and perhaps another user: nothing is written but below /app/checkpoints and in /tmp.
#
# The engine's own image, with kernels that take hours to build. Axolotl builds no others than CUDA 13 for these
# versions. CUDA 13 wants a driver of 580; on data center GPUs it runs from 535 on with the user-space half of the
# driver that the image brings along in /usr/local/cuda/compat. `trainer/runner/processes.py` sees to it.
ARG BASE_IMAGE=axolotlai/axolotl:0.19.0-py3.12-cu130-2.13.0@sha256:b38049f2454ceafc58c7a8269c7b400a75416e15b0f308a33850d48ae11e384d
FROM ${BASE_IMAGE}

COPY requirements /app/god-miner/requirements

# What plays the games of environment tasks, beside the engine's packages as they are.
RUN python -m pip list --format=freeze > /tmp/kept.txt \
    && python /app/god-miner/requirements/lacking.py /app/god-miner/requirements/games.txt > /tmp/lacking.txt \
    && python -m pip install -q --no-cache-dir --require-hashes --only-binary :all: -c /tmp/kept.txt -r /tmp/lacking.txt \
    && rm /tmp/kept.txt /tmp/lacking.txt

# What validators' own reward functions import. The engine's packages keep their versions; without a network, or
# where one of these wants others, the build goes on: rewards that import it then give zeros and say why.
ARG REWARD_PACKAGES="textstat langcheck detoxify"
RUN python -m pip list --format=freeze > /tmp/kept.txt \
    && at=/app/god-miner/requirements \
    && for name in ${REWARD_PACKAGES}; do \
        python $at/lacking.py "$at/reward-$name.txt" > /tmp/lacking.txt \
        && timeout 400 python -m pip install -q --no-cache-dir --retries 1 --require-hashes --only-binary :all: \
            -c /tmp/kept.txt -r /tmp/lacking.txt \
        || echo "$name is not installed"; \
    done \
    && if python -c "import nltk" 2> /dev/null; then \
        timeout 100 python $at/nltk_data.py /usr/share/nltk_data || echo "nltk's data are not there"; \
    fi \
    && rm -f /tmp/kept.txt /tmp/lacking.txt

COPY configs /app/god-miner/configs
COPY core /app/god-miner/core
COPY trainer /app/god-miner/trainer

ENV PYTHONPATH=/app/god-miner \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HUB_OFFLINE=1 \
    TRANSFORMERS_OFFLINE=1

# A base that lacks something fails here, in the build, and not after an hour in a tournament: Axolotl goes on
# without a plugin that it cannot import. Compiled now, because the user it will run as may not write.
# The engine's Python may lie below /root, and the training runs as a user who may not enter there.
RUN chmod a+rx /root \
    && python -m compileall -q /app/god-miner \
    && python -c "import axolotl.cli.train, trainer.axolotl.plugin, trainer.axolotl.trainers, trainer.runner.prepare, trainer.runner.check_engines, trainer.text, pyspiel, numba"

# No USER: validators mount volumes that belong to root on /app/checkpoints and give no capabilities, so another
# user could save nothing. The daemon starts it as a user of its own.
WORKDIR /app
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "trainer.text"]
