# lbproxy in a container: `docker build -t lbproxy .`; docs/docker.md says how to run it.
#
# Everything comes from requirements.lock, and with `--build-arg EXTRAS="otel replicas kv-events"`, or some of them, from
# requirements-otel.lock (traces; 12 MB more), requirements-replicas.lock (several lbproxies) and
# requirements-kv-events.lock; hash by hash, and as wheels: only lbproxy itself is compiled, in a stage of its own. The
# final image is the base plus one folder: a virtual environment without pip. Python 3.11 is what the tests run on; all
# stages must name the same base, because an environment points at the Python that made it. `make image-test` runs the
# build's commands and what they install without Docker.

FROM python:3.11-slim-bookworm AS wheel
WORKDIR /src
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY requirements-compile.lock ./
RUN pip --disable-pip-version-check install \
        --no-cache-dir --only-binary :all: --require-hashes -r requirements-compile.lock
COPY pyproject.toml setup.py README.md LICENSE ./
COPY lbproxy lbproxy
# An image that is not compiled is no image: the build fails instead.
ENV LBPROXY_COMPILED=1
RUN pip --disable-pip-version-check wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM python:3.11-slim-bookworm AS build
WORKDIR /src
RUN python -m venv --without-pip /opt/lbproxy
COPY requirements.lock requirements-otel.lock requirements-replicas.lock requirements-kv-events.lock ./
# Nothing, or some of otel, replicas and kv-events, with spaces between. The locks have the same versions.
ARG EXTRAS=
RUN for extra in "" $EXTRAS; do \
        pip --python /opt/lbproxy/bin/python --disable-pip-version-check install \
            --no-cache-dir --only-binary :all: --require-hashes -r "requirements${extra:+-$extra}.lock" || exit 1; \
    done
COPY --from=wheel /wheels /wheels
RUN pip --python /opt/lbproxy/bin/python --disable-pip-version-check install --no-cache-dir --no-deps /wheels/*.whl \
    && pip --python /opt/lbproxy/bin/python --disable-pip-version-check uninstall --yes setuptools

FROM python:3.11-slim-bookworm
COPY --from=build /opt/lbproxy /opt/lbproxy
# Bytecode was written at the build, and the file system may be read-only. RUNTIME_DIRECTORY is where a token for changes by
# the admin API is put, if a tmpfs is mounted there.
ENV PATH=/opt/lbproxy/bin:$PATH \
    RUNTIME_DIRECTORY=/run/lbproxy \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# A number, so that Kubernetes' runAsNonRoot can tell; it needs no entry in /etc/passwd.
USER 65532:65532
EXPOSE 8080 9901
STOPSIGNAL SIGTERM
# The default admin port. http.client, because urllib would go by way of an http_proxy that Docker may have put in.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s --retries=3 \
    CMD ["python", "-c", "import http.client as h; c = h.HTTPConnection('127.0.0.1', 9901, timeout=2); c.request('GET', '/healthz'); exit(c.getresponse().status != 200)"]
ENTRYPOINT ["lbproxy"]
CMD ["--config", "/etc/lbproxy/lbproxy.yaml"]
