# Paceline as a container image: small, not root, every package at the version it is tested with.
#
#   docker build --tag paceline:0.1.0 .                             # CPU
#   docker build --tag paceline:0.1.0-cuda --build-arg VARIANT=cuda .
#
# More packages: --build-arg EXTRAS=tensorboard,wandb

ARG VARIANT=cpu

FROM python:3.11.7-slim-bookworm AS base
ENV PATH=/opt/paceline/bin:$PATH \
    PYTHONUNBUFFERED=1

# Torch alone, in a layer that stays the same while the code changes.
FROM base AS torch
WORKDIR /build
COPY constraints.txt ./
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
ARG EXTRAS=tensorboard
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install ".[${EXTRAS}]"

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
ENTRYPOINT ["python", "-m", "paceline"]
CMD ["--help"]
