# The daemon alone: no training stack, no GPU. From the repository's root:
#   docker build -f dockerfiles/miner.dockerfile -t god-miner .
ARG BASE=python:3.12.12-slim-bookworm@sha256:593bd06efe90efa80dc4eee3948be7c0fde4134606dd40d8dd8dbcade98e669c

FROM ${BASE} AS build
WORKDIR /src
RUN python3 -m venv /opt/god-miner
# What it needs first, in a layer of its own: it changes seldom, the code often.
COPY requirements ./requirements
RUN /opt/god-miner/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes --no-deps \
        --only-binary :all: -r requirements/build.txt -r requirements/image.txt -r requirements/daemon.txt
COPY pyproject.toml README.md LICENSE ./
COPY configs ./configs
COPY core ./core
COPY miner ./miner
COPY trainer ./trainer
RUN /opt/god-miner/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation .

FROM ${BASE}
# A fixed number, so that mounted directories can be given to it: chown -R 10001 data
RUN useradd --uid 10001 --user-group --create-home --shell /usr/sbin/nologin miner \
    && install -d -o miner -g miner -m 700 /data
COPY --from=build /opt/god-miner /opt/god-miner
ENV PATH=/opt/god-miner/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    DATA_DIR=/data
USER miner
WORKDIR /home/miner
VOLUME /data
EXPOSE 7999
STOPSIGNAL SIGTERM
# http.client and not urllib: that one would ask a proxy of the environment for 127.0.0.1.
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python3", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('PUBLIC_PORT') or 7999), timeout=4); c.request('GET', '/healthz'); sys.exit(c.getresponse().status != 200)"]
ENTRYPOINT ["god-miner"]
CMD ["run"]
