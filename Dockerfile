# Paceline as a container image: small, not root, every package at the version it is tested with.
#
#   docker build --tag paceline:0.1.0 .                             # CPU
#   docker build --tag paceline:0.1.0-cuda --build-arg VARIANT=cuda .
#   docker build --tag paceline:0.1.0-metaflow --build-arg FLOW=metaflow .     # or FLOW=runnable
#
# More packages: --build-arg EXTRAS=tensorboard,wandb (with a FLOW, name it too: EXTRAS=metaflow,timm)

ARG VARIANT=cpu
ARG FLOW=plain

FROM python:3.11.7-slim-bookworm AS base
ENV PATH=/opt/paceline/bin:$PATH \
    PYTHONUNBUFFERED=1
# Compiled steps need a compiler at run time: Triton a C compiler, torch on CPUs a C++ compiler.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# The versions of each use. Flow engines have constraints of their own.
FROM base AS versions-plain
COPY constraints.txt /build/constraints.txt

FROM base AS versions-metaflow
COPY constraints-flows.txt /build/constraints.txt

FROM versions-metaflow AS versions-runnable

# Torch alone, in a layer that stays the same while the code changes.
FROM versions-${FLOW} AS torch
WORKDIR /build
ENV PIP_CONSTRAINT=/build/constraints.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/paceline

# PyTorch's own index has builds without CUDA; a version with +cpu counts as newer than the same one without.
FROM torch AS torch-cpu
RUN pip install --extra-index-url https://download.pytorch.org/whl/cpu torch

# The package index has the build with CUDA and brings its libraries; the node brings the driver.
FROM torch AS torch-cuda
RUN pip install torch

FROM torch-${VARIANT} AS build
ARG FLOW=plain
ARG EXTRAS=
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN case "$FLOW" in plain) extras=tensorboard ;; *) extras="$FLOW" ;; esac \
    && pip install ".[${EXTRAS:-$extras}]"

FROM base AS final
LABEL org.opencontainers.image.title="paceline" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/paceline /opt/paceline
# The number is what `paceline submit kubernetes` runs pods as; a volume mounted here is theirs to write.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp paceline \
    && install --directory --owner=10001 --group=10001 /runs /data
ENV HOME=/tmp
WORKDIR /tmp
USER 10001:10001
ENTRYPOINT ["python", "-P", "-m", "paceline"]
CMD ["--help"]
